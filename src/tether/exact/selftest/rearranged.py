"""The same responses written down differently, in other rows or with more padding."""

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from tether.types import Rollout


def in_order(rollout: Rollout, order: Int[Tensor, " batch"]) -> Rollout:
    """The same rollout with its rows in another order."""
    old = rollout.generation
    generation = replace(
        old,
        prompt_tokens=old.prompt_tokens[order],
        prompt_mask=old.prompt_mask[order],
        prompt_texts=tuple(old.prompt_texts[i] for i in order.tolist()),
        response_tokens=old.response_tokens[order],
        response_mask=old.response_mask[order],
        sampler_logprobs=old.sampler_logprobs[order],
        policy_hidden=old.policy_hidden[order],
        layer_hidden={depth: states[order] for depth, states in old.layer_hidden.items()},
    )
    return Rollout(
        generation=generation,
        texts=tuple(rollout.texts[i] for i in order.tolist()),
        finished=rollout.finished[order],
        old_logprobs=rollout.old_logprobs[order],
        values=rollout.values[order],
    )


def with_padding(rollout: Rollout, *, left: int, right: int) -> Rollout:
    """The same rollout with more padding; what stands in it is no pad id and no zero."""
    old = rollout.generation

    def columns(values: Tensor, before: int, after: int, fill: float) -> Tensor:
        beside = (0, 0) * (values.dim() - 2)
        return torch.nn.functional.pad(values, (*beside, before, after), value=fill)

    generation = replace(
        old,
        prompt_tokens=columns(old.prompt_tokens, left, 0, 1),
        prompt_mask=columns(old.prompt_mask, left, 0, 0),
        response_tokens=columns(old.response_tokens, 0, right, 1),
        response_mask=columns(old.response_mask, 0, right, 0),
        sampler_logprobs=columns(old.sampler_logprobs, 0, right, -3.0),
        policy_hidden=columns(old.policy_hidden, 0, right, 0.5),
        layer_hidden={d: columns(x, left, right, 0.5) for d, x in old.layer_hidden.items()},
    )
    return replace(
        rollout,
        generation=generation,
        old_logprobs=columns(rollout.old_logprobs, 0, right, -3.0),
        values=columns(rollout.values, 0, right, 2.0),
    )
