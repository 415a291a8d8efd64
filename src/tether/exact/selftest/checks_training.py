"""Checks of the rest of a step: advantages, the certificate, LoRA, the controller, the optimum."""

import math
from dataclasses import replace
from functools import lru_cache

import torch

from tether.config import CriticConfig, PPOConfig
from tether.core.advantages import gae
from tether.core.controllers import ControllerState, initial_kl_coef, step_target
from tether.core.masking import whiten
from tether.exact.certificate import certificate
from tether.exact.enumerate import Table, kl, objective
from tether.exact.optimum import Optimum, optimum
from tether.exact.selftest.bench import (
    KL_COEF,
    WARM,
    Bench,
    every_response,
    prepared,
)
from tether.exact.selftest.check import Check
from tether.exact.selftest.checks_values import chances
from tether.exact.selftest.oracle import (
    gae_by_double_sum,
    known_table,
    plain_table,
    precise,
    steered,
)
from tether.models.load import Policy, reference_of
from tether.models.trunk import final_hidden
from tether.update import make_optimizer, set_learning_rates, update_policy

STEPS = 50
"""Rollouts of every response in the training check."""
TRAINING = PPOConfig(
    learning_rate=0.12, final_learning_rate_fraction=0.0, epochs=4, minibatches=1,
    max_gradient_norm=1e30, max_approx_kl_old=1e30,
)  # fmt: skip
"""The optimiser sees exact gradients, so it may take long steps; the clip alone bounds them."""


def gae_error(bench: Bench) -> tuple[float, float]:
    """Largest error of GAE on ragged random rewards and values, λ = 0.7."""
    mask = bench.language.tree.mask
    rewards, values = torch.randn(2, *mask.shape, generator=torch.Generator().manual_seed(1))
    got = gae(
        rewards.to(bench.device), values.to(bench.device), mask.to(bench.device),
        gamma=1.0, gae_lambda=0.7,
    ).advantages.cpu()  # fmt: skip
    worst = 0.0
    for i, length in enumerate(mask.sum(dim=1).tolist()):
        row = rewards[i, :length].tolist(), values[i, :length].tolist()
        exact = torch.tensor(gae_by_double_sum(*row, gae_lambda=0.7))
        worst = max(worst, (got[i, :length] - exact).abs().max().item())
    return worst, 0.0


def whitened_spread(bench: Bench) -> tuple[float, float]:
    """Mean square of whitened advantages over real tokens, counted one by one."""
    mask = bench.language.tree.mask
    values = 3 + torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    white = whiten(values.to(bench.device), mask.to(bench.device)).cpu()
    kept = [
        number
        for row, real in zip(white.tolist(), mask.tolist(), strict=True)
        for number, here in zip(row, real, strict=True)
        if here
    ]
    return sum(number**2 for number in kept) / len(kept), 1.0


def best(bench: Bench) -> tuple[Optimum, Table]:
    """The optimum for the reference that the policy has, and that reference's table."""
    ref, language = known_table("reference", bench.dtype, WARM), bench.language
    return optimum(ref, language.rewards, language.tree, kl_coef=KL_COEF), ref


def certified(bench: Bench) -> tuple[float, float]:
    """Largest advantage at the optimum with its values, over all responses and four λ."""
    solved, ref = best(bench)

    def single(table: torch.Tensor) -> torch.Tensor:
        return table.to(bench.device, torch.float32)

    solved = replace(solved, policy=single(solved.policy), values=single(solved.values))
    found = [
        certificate(
            solved,
            single(ref),
            bench.scores,
            bench.tree,
            gae_lambda=gae_lambda,
            padding=2,
            junk=9.0,
        )
        for gae_lambda in (0.0, 0.5, 0.95, 1.0)
    ]
    return max(max(one.advantage, one.shaped_return) for one in found), 0.0


@torch.no_grad()
def adapter_off(bench: Bench) -> tuple[float, float]:
    """Largest difference between the reference and the untouched base, after sampling."""
    generation = bench.llama_rollout.generation  # sampled with the adapter folded in and out again
    tokens, mask = generation.prompt_tokens, generation.prompt_mask
    with reference_of(bench.llama) as lm:
        off = final_hidden(lm, tokens, mask)
    base = final_hidden(bench.llama_base.lm, tokens, mask)
    return (off - base).abs().max().item(), 0.0


def controller_error(_bench: Bench) -> tuple[float, float]:
    """Largest relative error of β over rise, overshoot, rest, both bounds and bad numbers."""
    rise = [0.3 * i for i in range(12)]
    rest = [3.1 + 0.5 * math.sin(i) * math.exp(-i / 6) for i in range(20)]
    measured = [*rise, 5.0, 4.0, *rest, math.nan, math.inf, -1.0, *[0.01] * 60, *[9.0] * 60]
    start = 1.7 / math.sqrt(2 * 3.0)
    exact = steered(measured, start=start, target=3.0, rate=0.2)
    state, worst = ControllerState(multiplier=initial_kl_coef(1.7, 3.0)), 0.0
    for value, beta in zip(measured, exact, strict=True):
        state = step_target(state, value, kl_target=3.0, rate=0.2, coef_min=1e-4, coef_max=10.0)
        worst = max(worst, abs(state.kl_coef / beta - 1))
    return worst, 0.0


@lru_cache(maxsize=1)
def trained(bench: Bench) -> Policy:
    """PPO from the reference with k1 in the reward; every response, weighted by its probability."""
    policy, critic = bench.tabular("reference"), CriticConfig()
    optimizer = make_optimizer(policy, TRAINING, critic)
    for step in range(STEPS):
        rollout = every_response(bench, policy, WARM)
        own = plain_table(precise(policy.lm), bench.language).detach()
        weights = chances(bench, own).to(bench.device, torch.float32)
        data = prepared(policy, rollout, bench.scores, temperature=WARM, weights=weights)
        set_learning_rates(optimizer, TRAINING, critic, step=step + 1, steps=STEPS + 1)
        update_policy(
            policy, optimizer, data, ppo=TRAINING, critic=critic, temperature=WARM, seed=step
        )
    return policy


def trained_table(bench: Bench) -> Table:
    """The trained policy as the oracle reads it."""
    return plain_table(precise(trained(bench).lm), bench.language).detach()


def trained_gap(bench: Bench) -> tuple[float, float]:
    """J* − J of the trained policy, reward units."""
    own, language, (solved, ref) = trained_table(bench), bench.language, best(bench)
    value = objective(own, ref, language.rewards, language.tree, kl_coef=KL_COEF).item()
    return solved.point.objective - value, 0.0


def trained_kl(bench: Bench) -> tuple[float, float]:
    """KL of the trained policy beside the optimum's, nats per response."""
    solved, ref = best(bench)
    return kl(trained_table(bench), ref, bench.language.tree).item(), solved.point.kl


TRAINING_CHECKS = (
    Check(
        name="GAE, λ = 0.7",
        proves="Advantages are the double sum of the definition, on responses of any length.",
        measure=gae_error, float32=1e-5, bfloat16=1e-5,
    ),
    Check(
        name="whitened advantages, mean square",
        proves="Whitening scales by the spread over real tokens, padding left out.",
        measure=whitened_spread, float32=1e-5, bfloat16=1e-5,
    ),
    Check(
        name="certificate at the optimum",
        proves="With π* and V* every shaped return is β log Z and every advantage 0, for every λ.",
        measure=certified, float32=1e-5, bfloat16=1e-5,
    ),
    Check(
        name="adapter off − base",
        proves="The reference is the untouched base bit for bit, also after sampling.",
        measure=adapter_off, float32=0.0, bfloat16=0.0,
    ),
    Check(
        name="β of the target controller",
        proves="β follows its rule through rise, overshoot, rest, bounds and bad measurements.",
        measure=controller_error, float32=1e-12, bfloat16=1e-12,
    ),
    Check(
        name="J* − J after PPO",
        proves="Production training with k1 in the reward ends at the optimum of E[r] − β KL.",
        measure=trained_gap, float32=1e-3, bfloat16=5e-3, costly=True,
    ),
    Check(
        name="KL after PPO, nats",
        proves="And at the optimum's distance from the reference.",
        measure=trained_kl, float32=2e-2, bfloat16=1e-1, costly=True,
    ),
)  # fmt: skip
"""In the order in which they are shown."""
