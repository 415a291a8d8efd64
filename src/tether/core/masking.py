"""Masks and the reductions over them; the only module that divides by a mask.

A mask is True on real tokens and comes from lengths, never from comparing with a pad id.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def length_mask(lengths: Int[Tensor, " batch"], width: int) -> Bool[Tensor, "batch width"]:
    """Make the mask of right-padded rows: True on the first `lengths` columns of `width`."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def position_ids(mask: Bool[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Count real tokens from 0 in each row, so that padding shifts no position."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def masked_row_sum(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, " batch"]:
    """Sum each row over its real tokens."""
    return torch.where(mask, values, 0.0).sum(dim=1)


def masked_mean(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, ""]:
    """Mean over all real tokens of the batch (longer rows weigh more)."""
    return torch.where(mask, values, 0.0).sum() / mask.sum()


def masked_time_mean(
    hidden: Float[Tensor, "batch time hidden"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch hidden"]:
    """Mean of each row's states over its masked positions, at least one a row."""
    summed = torch.einsum("bth,bt->bh", torch.where(mask[..., None], hidden, 0.0), mask.to(hidden))
    return summed / mask.sum(dim=1, keepdim=True)


def token_sum_over(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], total_tokens: int
) -> Float[Tensor, ""]:
    """Sum over real tokens divided by the token count of the whole optimiser batch.

    Dividing every micro-batch by the same total makes the gradient independent of how the
    optimiser batch is split over micro-batches and ranks.
    """
    return torch.where(mask, values, 0.0).sum() / total_tokens


def masked_variance(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, ""]:
    """Population variance over all real tokens of the batch."""
    return masked_mean((values - masked_mean(values, mask)) ** 2, mask)


def whiten(
    values: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    epsilon: float = 1e-8,
) -> Float[Tensor, "batch time"]:
    """Shift and scale the real tokens of a whole rollout batch to mean 0 and variance 1.

        x̂ = (x − mean(x)) / √(var(x) + ε),   population variance;   0 outside the mask

    Whiten over the whole batch, not a minibatch, so that all minibatches share one scale.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (advantage whitening).
    """
    centred = values - masked_mean(values, mask)
    return torch.where(mask, centred / (masked_variance(values, mask) + epsilon).sqrt(), 0.0)
