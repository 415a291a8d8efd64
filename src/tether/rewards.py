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

LARGEST_SCORE = 1e6
"""Scores beyond this, either way, are refused: the scale of the reward is wrong."""


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
        ConfigError: the module or the callable does not exist, or importing the module fails.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way, or exit
        raise ConfigError(
            f"reward.function: got {name!r}; importing {module_name!r} failed "
            f"({_reason(error)}); correct it, or give module:callable"
        ) from error
    function: Any = getattr(module, attribute, None)
    if function is None:
        raise ConfigError(
            f"reward.function: got {name!r}; module {module_name!r} has no {attribute!r}"
        )
    if not callable(function):
        raise ConfigError(f"reward.function: {name!r} is not callable")
    return cast("RewardFunction", function)


def _reason(error: BaseException) -> str:
    """Kind and text of an error, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def call_function(
    name: str, function: RewardFunction, prompts: Sequence[str], responses: Sequence[str]
) -> list[float]:
    """Call a user's reward and insist on one finite number per response.

    Raises:
        DataError: it raised, or returned something else; names function and response.
    """
    try:
        values = [float(value) for value in function(list(prompts), list(responses))]
    except (Exception, SystemExit) as error:
        raise DataError(f"reward.function {name} failed on a batch ({_reason(error)})") from error
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

    Raises:
        DataError: a score is not finite, or so large that float32 would lose all others.
    """
    terms = []
    if reward.model is not None:
        terms.append(_model_scores(reward.model, base, rollout, reference))
    for name, function in reward.functions:
        values = call_function(name, function, rollout.generation.prompt_texts, rollout.texts)
        terms.append(torch.tensor(values, device=base.device, dtype=torch.float64))
    # a function's numbers meet their weight before they are rounded to float32
    total = torch.stack(
        [w * term.double() for w, term in zip(reward.weights, terms, strict=True)]
    ).sum(dim=0)
    total = total - reward.missing_eos_penalty * (~rollout.finished).double()
    _check_scale(total, rollout.texts)
    return total.float()


def _check_scale(scores: Float[Tensor, " batch"], texts: Sequence[str]) -> None:
    """Insist on scores of a scale that can be whitened and averaged in float32."""
    usable = scores.abs() <= LARGEST_SCORE  # False for NaN too
    if not bool(usable.all()):
        worst = int((~usable).nonzero()[0])
        raise DataError(
            f"reward: the score of response {texts[worst][:60]!r} is {scores[worst].item():g}; its "
            f"scale must be within ±{LARGEST_SCORE:g}; rescale or bound the reward "
            "(reward.weights), as float32 would lose all other differences"
        )


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
