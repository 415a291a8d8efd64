"""The reference's own answers and scores: what a run is compared with, frozen at its start."""

import json
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from tether.checkpoint import fingerprint, write_atomically
from tether.config import Recipe
from tether.core.controllers import ControllerState, initial_kl_coef
from tether.data.prompts import PromptSet, prompt_batch
from tether.data.splits import derived_seed
from tether.errors import CheckpointError, ConfigError
from tether.guard.gates import check_reference, check_sampler
from tether.guard.heldout import Answers, answers, answers_from_json, judge_varies
from tether.models.load import Base, Policy
from tether.models.word_judge import WordJudge
from tether.observer import Observer
from tether.rewards import Reward, score
from tether.rollout import collect_rollout, measure_kl, read_reference
from tether.types import PromptBatch, ReferenceStates, Rollout

CALIBRATION_RESPONSES = 256
"""Reference responses behind the scores' mean and standard deviation, and so behind β₀."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The reference's own scores, drawn once and frozen with the run.

    Attributes:
        score_mean: mean score of its answers to training prompts, reward units.
        score_std: their standard deviation.
        responses: how many there were.
        kl_floor: largest KL that the reference shows to itself, nats per response.
        recompute_logprobs: True where the sampler's log-probs are not within the trainer's floor.
        answers: its answers to the held-out prompts.
        fingerprint: of its weights.
    """

    score_mean: float
    score_std: float
    responses: int
    kl_floor: float
    recompute_logprobs: bool
    answers: Answers
    fingerprint: str


def sample_and_read(
    recipe: Recipe, policy: Policy, reward: Reward, prompts: PromptBatch, *, seed: int
) -> tuple[Rollout, ReferenceStates]:
    """One response to each of some prompts outside the training step, and the reference pass."""
    generation = recipe.generation
    rollout = collect_rollout(
        policy, prompts, responses_per_prompt=1, max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature, seed=seed, reward_layer=reward.layer,
        recompute_logprobs=False, memory_gib=generation.memory_gib,
    )  # fmt: skip
    reference = read_reference(
        policy, rollout, reward_layer=reward.layer, memory_gib=generation.memory_gib
    )
    return rollout, reference


def measure_baseline(
    recipe: Recipe,
    policy: Policy,
    reward: Reward,
    judge: WordJudge | None,
    prompts: PromptSet,
    heldout: PromptBatch,
    observer: Observer,
) -> Baseline:
    """Sample the reference, pass the gates, freeze the scores' scale, answer held-out prompts."""
    observer.stage("reference answers", None)
    asked = islice(cycle(prompts.train), CALIBRATION_RESPONSES - len(heldout.texts))
    batch = prompt_batch(list(asked), policy.base.pad_token).to(policy.base.device)
    seed = derived_seed(recipe.seed, "calibration")
    rollout, reference = sample_and_read(recipe, policy, reward, batch, seed=seed)
    seed = derived_seed(recipe.seed, "heldout")
    held, held_reference = sample_and_read(recipe, policy, reward, heldout, seed=seed)
    floor, recompute = _pass_gates(recipe, policy, held, held_reference, observer)
    if reward.model is not None and recipe.reward.fit:
        _freeze_scale(reward, policy.base, rollout, reference)
    held_scores = score(reward, policy.base, held, held_reference)
    scores = torch.cat([score(reward, policy.base, rollout, reference), held_scores])
    if not scores.max() > scores.min():
        raise ConfigError(
            f"reward: all {len(scores)} reference responses got {scores[0].item():g}; a reward "
            "that never varies cannot train anything"
        )
    found = answers(held, held_scores, judge)
    if found.judged and not judge_varies(found):
        observer.note(
            f"the judge gives all {len(found.judged)} reference answers the score "
            f"{found.judged[0]:.3g}; without a spread there is no unit, so its metrics are left out"
        )
    return Baseline(
        score_mean=scores.mean().item(),
        score_std=scores.std().item(),
        responses=len(scores),
        kl_floor=floor,
        recompute_logprobs=recompute,
        answers=found,
        fingerprint=reference_fingerprint(policy),
    )


def _pass_gates(
    recipe: Recipe,
    policy: Policy,
    rollout: Rollout,
    reference: ReferenceStates,
    observer: Observer,
) -> tuple[float, bool]:
    """The KL's numerical floor, and whether old log-probs need a pass of their own."""
    generation = recipe.generation
    drift = measure_kl(policy, rollout, reference, temperature=generation.temperature)
    floor = check_reference(policy, rollout, drift)
    sampler = check_sampler(
        policy, rollout, temperature=generation.temperature, memory_gib=generation.memory_gib
    )
    if not sampler.matches:
        observer.note(
            f"sampler and trainer differ by {sampler.deviation:.2g} in the ratio; old log-probs "
            "are recomputed with one pass a step"
        )
    return floor, not sampler.matches


def _freeze_scale(reward: Reward, base: Base, rollout: Rollout, reference: ReferenceStates) -> None:
    """Put the fitted model's scores of reference samples at mean 0, sd 1, once and for all."""
    assert reward.model is not None
    alone = Reward(model=reward.model, functions=(), weights=(1.0,), missing_eos_penalty=0.0)
    raw = score(alone, base, rollout, reference)
    if not raw.max() > raw.min():
        raise ConfigError(
            f"reward.fit: the fitted model gives all {len(raw)} reference responses the score "
            f"{raw[0].item():g}; it cannot train anything; fit on texts like the responses, or "
            "with another reward.layer"
        )
    reward.model.head.shift.copy_(raw.mean())
    reward.model.head.scale.copy_(raw.std())


def reference_fingerprint(policy: Policy) -> str:
    """SHA-256 of the reference's weights, adapters left out."""
    model = policy.frozen_copy or policy.lm
    named = sorted(model.named_parameters())
    return fingerprint(p for name, p in named if "lora_" not in name)


def store_baseline(run: Path, baseline: Baseline) -> None:
    """Write reference.json."""
    names = [n for n in Baseline.__slots__ if n != "answers"]  # type: ignore[attr-defined]
    data = {n: getattr(baseline, n) for n in names} | {"answers": baseline.answers.as_json()}
    write_atomically(run / "reference.json", json.dumps(data) + "\n")


def stored_baseline(run: Path, policy: Policy) -> Baseline:
    """Read the baseline back and insist that the reference's weights are the same ones.

    Raises:
        CheckpointError: the file is missing or damaged, or the weights are others.
    """
    path = run / "reference.json"
    try:
        data: dict[str, Any] = dict(json.loads(path.read_text("utf-8")))
        data["answers"] = answers_from_json(data["answers"])
        stored = Baseline(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"--resume: {str(path)!r} is missing or damaged, and the run cannot be compared with "
            "its reference without it; put it back or start the run anew"
        ) from error
    if stored.fingerprint != reference_fingerprint(policy):
        raise CheckpointError(
            f"--resume: the weights of {policy.base.name!r} are not those that {str(run)!r} began "
            "with; put the original model back"
        )
    return stored


def first_controller(recipe: Recipe, baseline: Baseline, observer: Observer) -> ControllerState:
    """β for the first step: the given one, or the Gaussian rule from the reward's spread."""
    if recipe.kl.coef is not None:
        return ControllerState(multiplier=recipe.kl.coef)
    proposed = initial_kl_coef(baseline.score_std, recipe.kl.target)
    observer.note(
        f"β₀ = {proposed:.3g} from the scores' standard deviation {baseline.score_std:.3g} over "
        f"{baseline.responses} reference responses and the target {recipe.kl.target:g} nats"
    )
    low, high = recipe.kl.coef_min, recipe.kl.coef_max
    if not low <= proposed <= high:
        raise ConfigError(
            f"kl.coef: the rule gives {proposed:.3g}, outside [{low:g}, {high:g}]; give kl.coef, "
            "widen kl.coef_min and kl.coef_max, or rescale the reward"
        )
    return ControllerState(multiplier=proposed)
