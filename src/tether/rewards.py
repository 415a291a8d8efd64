"""From rollouts to scores: a reward model, Python functions, or their weighted sum."""

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tether.errors import ConfigError, DataError
from tether.generation.sequences import sequence
from tether.models.load import Base
from tether.models.reward_model import RewardModel, score_generated, score_hidden
from tether.types import ReferenceStates, RewardFunction, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The terms of the reward, in the order of their weights: the model first, then functions.

    Attributes:
        model: a fitted reward model, or None.
        functions: Python rewards by name.
        weights: one a term.
        missing_eos_penalty: taken from unfinished responses, reward units.
    """

    model: RewardModel | None
    functions: tuple[tuple[str, RewardFunction], ...]
    weights: tuple[float, ...]
    missing_eos_penalty: float

    @property
    def layer(self) -> int | None:
        """Depth whose reference states the model reads; None where it needs none of them."""
        if self.model is None or self.model.adapter is not None:
            return None
        return self.model.spec.layer


def load_function(name: str) -> RewardFunction:
    """Import `module:callable`; modules beside the working folder are found too.

    Raises:
        ConfigError: the module or the callable does not exist.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"reward.function: got {name!r}; {error}") from error
    if not callable(function):
        raise ConfigError(f"reward.function: {name!r} is not callable")
    return cast("RewardFunction", function)


def call_function(
    name: str, function: RewardFunction, prompts: Sequence[str], responses: Sequence[str]
) -> list[float]:
    """Call a user's reward and insist on one finite number per response.

    Raises:
        DataError: it raised, or returned something else; names function and response.
    """
    try:
        values = [float(value) for value in function(list(prompts), list(responses))]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"reward.function {name} failed on a batch ({reason})") from error
    if len(values) != len(responses):
        raise DataError(
            f"reward.function {name} returned {len(values)} numbers for {len(responses)} responses"
        )
    for value, response in zip(values, responses, strict=True):
        if not math.isfinite(value):
            raise DataError(f"reward.function {name} returned {value} for {response[:60]!r}")
    return values


@torch.no_grad()
def score(
    reward: Reward, base: Base, rollout: Rollout, reference: ReferenceStates
) -> Float[Tensor, " batch"]:
    """One number per response, before any KL: the weighted terms less the missing-EOS penalty.

    Args:
        reward: the terms.
        base: the shared language model (an adapter reward model runs on it).
        rollout: sampled responses; the ids that were sampled are what is scored.
        reference: the reference's states, which a model on the frozen trunk reads.

    Returns:
        Scores in reward units.
    """
    terms = []
    if reward.model is not None:
        terms.append(_model_scores(reward.model, base, rollout, reference))
    for name, function in reward.functions:
        values = call_function(name, function, rollout.generation.prompt_texts, rollout.texts)
        terms.append(torch.tensor(values, device=base.device))
    total = sum(w * term.float() for w, term in zip(reward.weights, terms, strict=True))
    return total - reward.missing_eos_penalty * (~rollout.finished).float()  # type: ignore[operator]


def _model_scores(
    model: RewardModel, base: Base, rollout: Rollout, reference: ReferenceStates
) -> Float[Tensor, " batch"]:
    """The reward model's scores, from kept states on a frozen trunk, else from its own pass."""
    masks = {
        "prompt_mask": rollout.generation.prompt_mask,
        "response_mask": rollout.response_mask,
        "ended": rollout.finished,
    }
    if model.adapter is None:
        return score_hidden(model, reference.layer_hidden[model.spec.layer], **masks)
    tokens, _ = sequence(rollout.generation)
    return score_generated(model, base, tokens, **masks)
