"""The list of sabotages: ten that training loops are known for, and what else the checks must see.

Each is the production function with one thing wrong, and what it is wrong with has been shipped
somewhere.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.advantages import gae
from tether.core.controllers import ControllerState, step_target
from tether.core.kl import compare, full_kl, k1, k2, k3
from tether.core.logprobs import log_softmax, predicting_positions
from tether.core.losses import clipped_policy_loss
from tether.core.masking import length_mask, masked_mean, token_sum_over
from tether.core.shaping import shape_rewards
from tether.exact.selftest.sabotage import Sabotage, replaced
from tether.generation.sampler import inverse_cdf
from tether.models.load import Policy, merged, reference_of
from tether.models.trunk import final_hidden
from tether.types import AdvantageEstimate, LossOutput

Tokens = Float[Tensor, "batch response"]


def instead_of(
    original: Callable[..., Any], substitute: Callable[..., Any], *, within: str = "tether"
) -> Callable[[], AbstractContextManager[None]]:
    """A sabotage of one function."""
    return lambda: replaced(original, substitute, within=within)


def sum_of_ratios(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_epsilon: float,
    total_tokens: int,
) -> LossOutput:
    """The ratios of a response added up and clipped as one; padding adds 1 each."""
    right = clipped_policy_loss(
        logprobs, old_logprobs, advantages, response_mask,
        clip_epsilon=clip_epsilon, total_tokens=total_tokens,
    )  # fmt: skip
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp().sum(dim=1, keepdim=True)
    clipped = ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    cut = (clipped * advantages < ratio * advantages).to(losses)
    return LossOutput(
        loss=token_sum_over(losses, response_mask, total_tokens),
        stats=right.stats
        | {"policy/clip_fraction": token_sum_over(cut, response_mask, total_tokens)},
    )


def unclipped(*args: Tensor, clip_epsilon: float, total_tokens: int) -> LossOutput:
    """The surrogate without its clip."""
    assert clip_epsilon > 0
    return clipped_policy_loss(*args, clip_epsilon=1e9, total_tokens=total_tokens)


@contextmanager
def k1_in_loss() -> Iterator[None]:
    """No KL in the reward; log π − log π_ref of the tokens is differentiated instead."""
    charged = {"kl_coef": 0.0}

    def shape(*args: Tensor, kl_coef: float) -> Tokens:
        charged["kl_coef"] = kl_coef
        return shape_rewards(*args, kl_coef=0.0)

    def loss(
        logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **options: Any
    ) -> LossOutput:
        right = clipped_policy_loss(logprobs, old, advantages, mask, **options)
        penalty = token_sum_over(logprobs, mask, options["total_tokens"])
        return replace(right, loss=right.loss + charged["kl_coef"] * penalty)

    with replaced(shape_rewards, shape), replaced(clipped_policy_loss, loss):
        yield


def k3_as_k1(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k3, in the precision of k1."""
    return k3(log_ratio).to(log_ratio)


def shifted(
    hidden: Float[Tensor, "batch time hidden"], *, prompt_width: int, response_width: int
) -> Float[Tensor, "batch response hidden"]:
    """The state at each response token instead of the one before it."""
    return hidden[:, prompt_width : prompt_width + response_width]


def without_eos(lengths: Int[Tensor, " batch"], width: int) -> Bool[Tensor, "batch width"]:
    """Rows that end before the limit lose their last token, which is the EOS."""
    shorter = torch.where(lengths < width, lengths - 1, lengths).clamp(min=1)
    return length_mask(shorter, width)


@contextmanager
def padding_in_the_mean() -> Iterator[None]:
    """Means are taken over the padded grid."""

    def mean(values: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0).mean()

    def total(values: Tensor, mask: Tensor, _total_tokens: int) -> Tensor:
        return mean(values, mask)

    with replaced(masked_mean, mean), replaced(token_sum_over, total):
        yield


def tempered_logprobs(
    logits: Float[Tensor, "*batch vocab"], temperature: float
) -> Float[Tensor, "*batch vocab"]:
    """Log-probabilities divided by the temperature; they are none any more."""
    return log_softmax(logits, 1.0) / temperature


def half_precision(
    logits: Float[Tensor, "*batch vocab"], temperature: float
) -> Float[Tensor, "*batch vocab"]:
    """A softmax whose result is rounded to bfloat16."""
    return log_softmax(logits, temperature).bfloat16().float()


def with_dropout(lm: PreTrainedModel, *args: Any, **options: Any) -> Tensor:
    """A pass in training mode."""
    lm.train()
    try:
        return final_hidden(lm, *args, **options)
    finally:
        lm.eval()


def seeing_padding(lm: PreTrainedModel, tokens: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """A pass that attends to padding."""
    return final_hidden(lm, tokens, torch.ones_like(mask), **options)


@contextmanager
def reference_swapped() -> Iterator[None]:
    """Policy and reference change places where they are compared."""

    def comparison(own: Tensor, ref: Tensor, tokens: Tensor, **options: Any) -> Any:
        heads = {"head": options.pop("ref_head"), "ref_head": options.pop("head")}
        return compare(ref, own, tokens, **heads, **options)

    def divergence(own: Tensor, ref: Tensor, **options: float) -> Tensor:
        return full_kl(ref, own, **options)

    with replaced(compare, comparison), replaced(full_kl, divergence):
        yield


@contextmanager
def adapter_left_on(policy: Policy) -> Iterator[PreTrainedModel]:
    """The reference read with the adapter on."""
    if policy.adapter is not None:
        yield policy.lm
        return
    with reference_of(policy) as lm:
        yield lm


@contextmanager
def adapter_subtracted(policy: Policy) -> Iterator[None]:
    """The adapter folded in and subtracted again, which leaves its rounding behind."""
    if policy.adapter is not None:
        policy.adapter.merge_adapter()
    yield
    if policy.adapter is not None:
        policy.adapter.unmerge_adapter()


def centred_rewards(
    scores: Tensor, old: Tensor, ref: Tensor, mask: Tensor, *, kl_coef: float
) -> Tokens:
    """Rewards with their mean over tokens subtracted: a charge for every token written."""
    rewards = shape_rewards(scores, old, ref, mask, kl_coef=kl_coef)
    return torch.where(mask, rewards - masked_mean(rewards, mask), 0.0)


def neighbours_scores(scores: Tensor, *args: Tensor, kl_coef: float) -> Tokens:
    """Every response gets the score of the one before it."""
    return shape_rewards(scores.roll(1), *args, kl_coef=kl_coef)


def cooler_draws(
    logprobs: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """Tokens drawn at 0.8 of the temperature that they are scored at."""
    return inverse_cdf((logprobs / 0.8).log_softmax(dim=-1), uniform)


def gae_without_lambda(*args: Tensor, gamma: float, gae_lambda: float) -> AdvantageEstimate:
    """λ taken for 1."""
    assert gae_lambda <= 1
    return gae(*args, gamma=gamma, gae_lambda=1.0)


def against_the_error(state: ControllerState, measured: float, **options: float) -> ControllerState:
    """β falls where the KL is above its target."""
    return step_target(state, measured, **(options | {"rate": -options["rate"]}))


def squared(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k2 without its half."""
    return log_ratio**2


def without_control_variate(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k3 without the term that keeps it unbiased."""
    return k3(log_ratio) - log_ratio


TEN = (
    Sabotage(
        name="sum of per-token ratios",
        switched_on=instead_of(clipped_policy_loss, sum_of_ratios),
    ),
    Sabotage(name="k1 in loss", switched_on=k1_in_loss, worth_training=True),
    Sabotage(
        name="k3 in reward", switched_on=instead_of(k1, k3_as_k1, within="tether.core.shaping"),
        worth_training=True,
    ),
    Sabotage(name="shift by one", switched_on=instead_of(predicting_positions, shifted)),
    Sabotage(name="EOS dropped", switched_on=instead_of(length_mask, without_eos)),
    Sabotage(name="padding in the mean", switched_on=padding_in_the_mean),
    Sabotage(
        name="temperature on log-probs", switched_on=instead_of(log_softmax, tempered_logprobs)
    ),
    Sabotage(
        name="dropout on",
        switched_on=instead_of(final_hidden, with_dropout, within="tether.update"),
    ),
    Sabotage(name="reference swapped", switched_on=reference_swapped),
    Sabotage(
        name="advantage shift per token", switched_on=instead_of(shape_rewards, centred_rewards),
        worth_training=True,
    ),
)  # fmt: skip
"""What training loops have been wrong in, most often without anybody noticing."""

FURTHER = (
    Sabotage(name="no clipping", switched_on=instead_of(clipped_policy_loss, unclipped)),
    Sabotage(
        name="sampler at another temperature", switched_on=instead_of(inverse_cdf, cooler_draws)
    ),
    Sabotage(name="softmax in half precision", switched_on=instead_of(log_softmax, half_precision)),
    Sabotage(name="k2 without its half", switched_on=instead_of(k2, squared)),
    Sabotage(name="k3 without k1", switched_on=instead_of(k3, without_control_variate)),
    Sabotage(name="attention to padding", switched_on=instead_of(final_hidden, seeing_padding)),
    Sabotage(
        name="scores of the neighbour", switched_on=instead_of(shape_rewards, neighbours_scores)
    ),
    Sabotage(name="λ left out of GAE", switched_on=instead_of(gae, gae_without_lambda)),
    Sabotage(name="adapter left on", switched_on=instead_of(reference_of, adapter_left_on)),
    Sabotage(name="adapter subtracted again", switched_on=instead_of(merged, adapter_subtracted)),
    Sabotage(name="β against the error", switched_on=instead_of(step_target, against_the_error)),
)  # fmt: skip
"""What the checks beyond those ten are there for."""

SABOTAGES = TEN + FURTHER
"""All of them, in the order in which they are tried."""
