"""One step: prompts, rollout, scores, KL, rewards, advantages, update, controller.

One loop serves every on-policy algorithm; an algorithm is a choice of advantage function and loss.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tether.config import Recipe
from tether.core.advantages import gae
from tether.core.controllers import ControllerState, step_fixed, step_target
from tether.core.diagnostics import Mean, sequence_kl
from tether.core.masking import whiten
from tether.core.shaping import shape_rewards
from tether.data.prompts import prompt_batch, step_prompts
from tether.data.splits import derived_seed
from tether.guard.gates import check_alive
from tether.prepare import Prepared
from tether.rewards import score
from tether.rollout import collect_rollout, measure_kl, read_reference
from tether.summary import controller_metrics, step_metrics
from tether.types import PromptBatch
from tether.update import set_learning_rates, training_data, update_policy


@contextmanager
def timed(times: dict[str, float], stage: str) -> Iterator[None]:
    """Add the seconds spent inside to `times["time/<stage>"]`."""
    began = time.monotonic()
    yield
    times[f"time/{stage}"] = times.get(f"time/{stage}", 0.0) + time.monotonic() - began


def train_step(
    ready: Prepared, optimizer: torch.optim.AdamW, controller: ControllerState, *, step: int
) -> tuple[ControllerState, dict]:
    """One step of RLHF.

    Args:
        ready: policy, reward, prompts and the reference's baseline.
        optimizer: of the policy and the value head.
        controller: β and what it follows from.
        step: counted from 1; prompts and random numbers follow from it and the seed.

    Returns:
        The next controller, and this step's metrics.
    """
    recipe, policy = ready.recipe, ready.policy
    sampling, beta, times = recipe.generation, controller.kl_coef, dict[str, float]()
    with timed(times, "generate_s"):
        rollout = collect_rollout(
            policy, next_prompts(ready, step), responses_per_prompt=sampling.responses_per_prompt,
            max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature,
            seed=derived_seed(recipe.seed, "sampling", step), reward_layer=ready.reward.layer,
            recompute_logprobs=ready.baseline.recompute_logprobs, memory_gib=sampling.memory_gib,
        )  # fmt: skip
    with timed(times, "reference_s"):
        reference = read_reference(
            policy, rollout, reward_layer=ready.reward.layer, memory_gib=sampling.memory_gib
        )
    with timed(times, "score_s"):
        scores = score(ready.reward, policy.base, rollout, reference)
    with timed(times, "reference_s"):
        drift = measure_kl(policy, rollout, reference, temperature=sampling.temperature)
    rewards = shape_rewards(
        scores, rollout.old_logprobs, drift.ref_logprobs, rollout.response_mask, kl_coef=beta
    )
    estimate = gae(
        rewards, rollout.values, rollout.response_mask,
        gamma=recipe.advantages.gamma, gae_lambda=recipe.advantages.gae_lambda,
    )  # fmt: skip
    data = training_data(rollout, estimate, whiten(estimate.advantages, rollout.response_mask))
    set_learning_rates(optimizer, recipe.ppo, recipe.critic, step=step, steps=recipe.steps)
    with timed(times, "update_s"):
        updated = update_policy(
            policy, optimizer, data, ppo=recipe.ppo, critic=recipe.critic,
            temperature=sampling.temperature, seed=derived_seed(recipe.seed, "minibatches", step),
        )  # fmt: skip
    check_alive(policy, rollout, scores, step=step, temperature=sampling.temperature)
    row = step_metrics(rollout, drift, scores, rewards, estimate) | updated | times
    controller = next_controller(recipe, controller, sequence_kl(drift.kl, rollout.response_mask))
    return controller, row | controller_metrics(recipe.kl, controller, used=beta)


def next_prompts(ready: Prepared, step: int) -> PromptBatch:
    """The step's prompts: a function of the seed and the step alone."""
    recipe, base = ready.recipe, ready.policy.base
    chosen = step_prompts(
        ready.prompts.train, step=step, per_step=recipe.prompts.per_step, seed=recipe.seed
    )
    return prompt_batch(chosen, base.pad_token).to(base.device)


def next_controller(recipe: Recipe, state: ControllerState, measured: Mean) -> ControllerState:
    """β for the next step, from the exact KL of the batch just used."""
    if recipe.kl.controller == "fixed":
        return step_fixed(state, measured.mean)
    kl = recipe.kl
    return step_target(
        state, measured.mean, kl_target=kl.target, rate=kl.rate, coef_min=kl.coef_min,
        coef_max=kl.coef_max,
    )  # fmt: skip
