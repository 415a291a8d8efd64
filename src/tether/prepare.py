"""Everything before the first step: models, data, reward, judge, reference answers and gates.

A resumed run reads its reward model, judge and reference answers back from the run folder, so
that nothing is fitted, drawn or normalised a second time.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.baseline import Baseline, measure_baseline, store_baseline, stored_baseline
from tether.config import Recipe
from tether.core.accuracy import pair_accuracy
from tether.data.judgements import Judgements, load_judgements
from tether.data.prompts import PromptSet, load_prompts, prompt_batch, render_messages
from tether.data.splits import derived_seed
from tether.distributed import choose_device, set_threads
from tether.fit import fit_reward_model
from tether.models.load import Base, Policy, load_base, make_policy
from tether.models.reward_model import (
    RewardModel,
    attach_reward_adapter,
    load_reward_model,
    save_reward_model,
)
from tether.models.usable import check_context
from tether.models.word_judge import (
    WordJudge,
    fit_word_judge,
    fit_word_judge_pairs,
    load_word_judge,
    save_word_judge,
)
from tether.observer import Observer
from tether.rewards import Reward, load_function
from tether.run_folder import require_empty, run_lock
from tether.types import PromptBatch


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
    longest = max(len(prompt.tokens) for prompt in (*prompts.train, *prompts.heldout))
    limit = recipe.generation.max_new_tokens
    check_context(base.lm, longest_prompt=longest, max_new_tokens=limit)
    functions = tuple((name, load_function(name)) for name in recipe.reward.function)
    model, adapter_weights, judge = reward_and_judge(recipe, base, run, observer, resume=resume)
    policy = make_policy(
        base, recipe.model, value_units=recipe.critic.hidden_units,
        seed=derived_seed(recipe.seed, "policy"),
    )  # fmt: skip
    if model is not None:
        model = attach_reward_adapter(model, base, policy.adapter, adapter_weights)
    terms = (model is not None) + len(functions)
    reward = Reward(
        model=model,
        functions=functions,
        weights=recipe.reward.weights or (1.0,) * terms,
        missing_eos_penalty=recipe.reward.missing_eos_penalty,
    )
    heldout = prompt_batch(prompts.heldout, base.pad_token).to(device)
    if resume:
        baseline = stored_baseline(run, policy)
    else:
        baseline = measure_baseline(recipe, policy, reward, judge, prompts, heldout, observer)
    return Prepared(
        recipe=recipe, policy=policy, reward=reward, judge=judge, prompts=prompts,
        heldout=heldout, baseline=baseline,
    )  # fmt: skip


def store_prepared(run: Path, ready: Prepared) -> None:
    """Write what a resumed run reads back, once nothing about the input can be wrong any more."""
    if ready.reward.model is not None and ready.recipe.reward.fit:
        save_reward_model(ready.reward.model, run / "reward_model")
    if ready.judge is not None:
        save_word_judge(ready.judge, run / "judge")
    store_baseline(run, ready.baseline)


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
    return model, weights, judge


def fit_reward(recipe: Recipe, folder: Path, observer: Observer) -> dict[str, Any]:
    """Fit a recipe's reward model into a folder, its scale frozen on reference samples.

    Returns:
        path, accuracy, accuracy_interval and pairs, as `tether fit-reward --json` prints them.
    """
    set_threads(recipe.threads)
    device = choose_device(recipe.device)
    with run_lock(folder):
        require_empty(folder)
        ready = prepare(recipe, folder, observer, device=device, resume=False)
        store_prepared(folder, ready)
    assert ready.reward.model is not None
    spec = ready.reward.model.spec
    return {
        "path": str(folder / "reward_model"),
        "accuracy": spec.accuracy,
        "accuracy_interval": spec.accuracy_interval,
        "pairs": spec.pairs,
    }


def _fit_judge(parts: dict[str, Judgements], observer: Observer) -> WordJudge:
    """Fit the bag-of-words judge on its own part and say how good it is."""
    part, test = parts["judge"], parts["test"]
    if part.scores is None:
        chosen, rejected = ([part.texts[i] for i in side] for side in part.pairs.T.tolist())
        judge = fit_word_judge_pairs(chosen, rejected)
    else:
        judge = fit_word_judge(list(part.texts), part.scores.tolist())
    scores = torch.tensor(judge.score(list(test.texts)))
    found = pair_accuracy(scores, test.pairs, clusters=test.clusters)
    observer.note(
        f"judge (words, other texts): held-out pair accuracy {found.accuracy:.3f} "
        f"[{found.interval[0]:.3f}, {found.interval[1]:.3f}]"
    )
    return judge
