"""Everything before the first step: models, data, reward, judge, reference answers and gates.

A resumed run reads its reward model, judge and reference answers back from the run folder, so
that nothing is fitted, drawn or normalised a second time.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from tether.checkpoint import fingerprint, write_atomically
from tether.config import Recipe
from tether.core.controllers import ControllerState, initial_kl_coef
from tether.data.judgements import Judgements, load_judgements
from tether.data.prompts import PromptSet, load_prompts, prompt_batch, render_messages
from tether.data.splits import derived_seed
from tether.errors import CheckpointError, ConfigError
from tether.fit import fit_reward_model, pair_accuracy
from tether.guard.gates import check_reference, check_sampler
from tether.guard.heldout import Answers, answers, answers_from_json
from tether.models.load import Base, Policy, load_base, make_policy
from tether.models.reward_model import (
    RewardModel,
    attach_reward_adapter,
    load_reward_model,
    save_reward_model,
)
from tether.models.word_judge import (
    WordJudge,
    fit_word_judge,
    fit_word_judge_pairs,
    load_word_judge,
    save_word_judge,
)
from tether.observer import Observer
from tether.rewards import Reward, load_function, score
from tether.rollout import collect_rollout, measure_kl, read_reference
from tether.types import Drift, PromptBatch, ReferenceStates, Rollout

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What `train_step` works with."""

    recipe: Recipe
    policy: Policy
    reward: Reward
    judge: WordJudge | None
    prompts: PromptSet
    heldout: PromptBatch
    baseline: Baseline


def sample_and_read(
    recipe: Recipe,
    policy: Policy,
    reward: Reward,
    prompts: PromptBatch,
    *,
    seed: int,
    responses_per_prompt: int = 1,
    recompute_logprobs: bool = False,
) -> tuple[Rollout, ReferenceStates, Drift]:
    """Rollout, reference pass and exact KL for prompts outside the training step."""
    generation = recipe.generation
    rollout = collect_rollout(
        policy, prompts, responses_per_prompt=responses_per_prompt,
        max_new_tokens=generation.max_new_tokens, temperature=generation.temperature, seed=seed,
        reward_layer=reward.layer, recompute_logprobs=recompute_logprobs,
        memory_gib=generation.memory_gib,
    )  # fmt: skip
    reference = read_reference(
        policy, rollout, reward_layer=reward.layer, memory_gib=generation.memory_gib
    )
    drift = measure_kl(policy, rollout, reference, temperature=generation.temperature)
    return rollout, reference, drift


def prepare(
    recipe: Recipe, run: Path, observer: Observer, *, device: torch.device, resume: bool
) -> Prepared:
    """Load or fit everything a run needs and pass the gates.

    Raises:
        ConfigError, DataError, CheckpointError: the recipe or the run folder is at fault.
        TrainingDiverged: a gate failed.
    """
    recipe.require_reward()
    observer.stage(f"loading {recipe.model.name}", None)
    base = load_base(recipe.model, device=device)
    prompts = load_prompts(recipe.prompts, base.tokenizer, recipe.seed)
    functions = tuple((name, load_function(name)) for name in recipe.reward.function)
    model, adapter_weights, judge = reward_and_judge(recipe, base, run, observer, resume=resume)
    policy = make_policy(base, recipe.model, value_units=recipe.critic.hidden_units)
    if model is not None:
        model = attach_reward_adapter(model, policy.adapter, adapter_weights)
    terms = (model is not None) + len(functions)
    reward = Reward(
        model=model,
        functions=functions,
        weights=recipe.reward.weights or (1.0,) * terms,
        missing_eos_penalty=recipe.reward.missing_eos_penalty,
    )
    heldout = prompt_batch(prompts.heldout, base.pad_token).to(device)
    if resume:
        baseline = _stored_baseline(run, policy)
    else:
        baseline = _measure_baseline(recipe, policy, reward, judge, prompts, heldout, observer)
        if model is not None and recipe.reward.fit:
            save_reward_model(model, run / "reward_model")
        write_atomically(run / "reference.json", json.dumps(_baseline_json(baseline)) + "\n")
    return Prepared(
        recipe=recipe, policy=policy, reward=reward, judge=judge, prompts=prompts,
        heldout=heldout, baseline=baseline,
    )  # fmt: skip


def reward_and_judge(
    recipe: Recipe, base: Base, run: Path, observer: Observer, *, resume: bool
) -> tuple[RewardModel | None, dict[str, Tensor], WordJudge | None]:
    """The reward model (given, fitted or read back), its adapter's weights, and the judge."""
    judged = recipe.reward.fit and recipe.heldout.judge != "none"
    if resume and recipe.reward.fit:
        model, weights = load_reward_model(run / "reward_model", base)
        return model, weights, load_word_judge(run / "judge") if judged else None
    if recipe.reward.model:
        model, weights = load_reward_model(Path(recipe.reward.model), base)
        return model, weights, None
    if not recipe.reward.fit:
        return None, {}, None
    parts = load_judgements(
        recipe.reward.fit, gap=recipe.reward.gap, max_texts=recipe.reward.max_texts,
        seed=recipe.seed, render=lambda m: render_messages(base.tokenizer, m),
    )  # fmt: skip
    model, weights = fit_reward_model(
        base, parts["proxy"], parts["test"], model=recipe.model, reward=recipe.reward,
        seed=recipe.seed, observer=observer,
    )  # fmt: skip
    spec = model.spec
    assert spec.accuracy_interval is not None
    low, high = spec.accuracy_interval
    observer.note(
        f"reward model: held-out pair accuracy {spec.accuracy:.3f} [{low:.3f}, {high:.3f}] over "
        f"{spec.pairs} pairs of {len(parts['test'].texts)} texts"
    )
    judge = _fit_judge(parts, observer) if judged else None
    if judge is not None:
        save_word_judge(judge, run / "judge")
    return model, weights, judge


def _fit_judge(parts: dict[str, Judgements], observer: Observer) -> WordJudge:
    """Fit the bag-of-words judge on its own part and say how good it is."""
    part, test = parts["judge"], parts["test"]
    if part.scores is None:
        chosen, rejected = ([part.texts[i] for i in side] for side in part.pairs.T.tolist())
        judge = fit_word_judge_pairs(chosen, rejected)
    else:
        judge = fit_word_judge(list(part.texts), part.scores.tolist())
    found = pair_accuracy(torch.tensor(judge.score(list(test.texts))), test)
    observer.note(
        f"judge (words, other texts): held-out pair accuracy {found.accuracy:.3f} "
        f"[{found.interval[0]:.3f}, {found.interval[1]:.3f}]"
    )
    return judge


def _measure_baseline(
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
    asked = prompts.train[:CALIBRATION_RESPONSES]
    batch = prompt_batch(asked, policy.base.pad_token).to(policy.base.device)
    rollout, reference, drift = sample_and_read(
        recipe, policy, reward, batch, seed=derived_seed(recipe.seed, "calibration"),
        responses_per_prompt=-(-CALIBRATION_RESPONSES // len(asked)),
    )  # fmt: skip
    floor = check_reference(policy, rollout, drift)
    sampler = check_sampler(
        policy, rollout, temperature=recipe.generation.temperature,
        memory_gib=recipe.generation.memory_gib,
    )  # fmt: skip
    if not sampler.matches:
        observer.note(
            f"sampler and trainer differ by {sampler.deviation:.2g} in the ratio; old log-probs "
            "are recomputed with one pass a step"
        )
    if reward.model is not None and recipe.reward.fit:
        _freeze_scale(reward, policy.base, rollout, reference)
    scores = score(reward, policy.base, rollout, reference)
    if not scores.std() > 0:
        raise ConfigError(
            f"reward: all {len(scores)} reference responses got {scores[0].item():g}; a reward "
            "that never varies cannot train anything"
        )
    held, held_reference, _ = sample_and_read(
        recipe, policy, reward, heldout, seed=derived_seed(recipe.seed, "heldout")
    )
    return Baseline(
        score_mean=scores.mean().item(),
        score_std=scores.std().item(),
        responses=len(scores),
        kl_floor=floor,
        recompute_logprobs=not sampler.matches,
        answers=answers(held, score(reward, policy.base, held, held_reference), judge),
        fingerprint=reference_fingerprint(policy),
    )


def _freeze_scale(
    reward: Reward, base: Base, rollout: Rollout, reference: ReferenceStates
) -> None:
    """Put the fitted model's scores of reference samples at mean 0, sd 1, once and for all."""
    assert reward.model is not None
    alone = Reward(model=reward.model, functions=(), weights=(1.0,), missing_eos_penalty=0.0)
    raw: Float[Tensor, " batch"] = score(alone, base, rollout, reference)
    reward.model.head.shift.copy_(raw.mean())  # type: ignore[operator]
    reward.model.head.scale.copy_(raw.std())  # type: ignore[operator]


def reference_fingerprint(policy: Policy) -> str:
    """SHA-256 of the reference's weights, adapters left out."""
    model = policy.frozen_copy or policy.lm
    named = sorted(model.named_parameters())
    return fingerprint(p for name, p in named if "lora_" not in name)


def _baseline_json(baseline: Baseline) -> dict:
    names = [n for n in Baseline.__slots__ if n != "answers"]  # type: ignore[attr-defined]
    return {n: getattr(baseline, n) for n in names} | {"answers": baseline.answers.as_json()}


def _stored_baseline(run: Path, policy: Policy) -> Baseline:
    """Read the baseline back and insist that the reference's weights are the same ones."""
    data = json.loads((run / "reference.json").read_text("utf-8"))
    if data["fingerprint"] != reference_fingerprint(policy):
        raise CheckpointError(
            f"--resume: the weights of {policy.base.name!r} are not those that {str(run)!r} began "
            "with; put the original model back"
        )
    return Baseline(**data | {"answers": answers_from_json(data["answers"])})


def first_controller(recipe: Recipe, baseline: Baseline, observer: Observer) -> ControllerState:
    """β for the first step: the given one, or the Gaussian rule from the reward's spread."""
    if recipe.kl.coef is not None:
        return ControllerState(kl_coef=recipe.kl.coef)
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
    return ControllerState(kl_coef=proposed)
