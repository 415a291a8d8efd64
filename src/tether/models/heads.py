"""Small networks on hidden states: the value function and the reward."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tether.core.masking import length_mask, masked_time_mean

FEATURE_LIMIT = 6.0
"""Standardised features beyond this many deviations are outliers of the trunk, not signal."""


class ValueHead(nn.Module):
    """V(s) from the policy's final hidden state; its last layer starts at 0, so V starts at 0."""

    def __init__(self, hidden_size: int, hidden_units: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(hidden_size),
            nn.Linear(hidden_size, hidden_units),
            nn.GELU(),
            nn.Linear(hidden_units, 1),
        )
        last = self.net[-1]
        nn.init.zeros_(last.weight)  # type: ignore[arg-type]
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def forward(
        self, hidden: Float[Tensor, "batch response hidden"]
    ) -> Float[Tensor, "batch response"]:
        """Value before each token, reward units, float32."""
        return self.net(hidden.float()).squeeze(-1)


class RewardHead(nn.Module):
    """One score from pooled hidden states: standardise, limit, (one hidden layer,) one number.

    `mean`, `std` describe the features of the training texts; `shift`, `scale` put the scores of
    reference samples at mean 0 and standard deviation 1, and never change afterwards.
    """

    mean: Tensor
    std: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, hidden_size: int, hidden_units: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("std", torch.ones(hidden_size))
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.net = (
            nn.Sequential(
                nn.Linear(hidden_size, hidden_units), nn.GELU(), nn.Linear(hidden_units, 1)
            )
            if hidden_units
            else nn.Linear(hidden_size, 1)
        )

    def forward(self, pooled: Float[Tensor, "batch hidden"]) -> Float[Tensor, " batch"]:
        """Score of each pooled text, in standard deviations of reference samples."""
        features = ((pooled.float() - self.mean) / self.std).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)
        return (self.net(features).squeeze(-1) - self.shift) / self.scale


def pool(
    hidden: Float[Tensor, "batch time hidden"], mask: Bool[Tensor, "batch time"], *, how: str
) -> Float[Tensor, "batch hidden"]:
    """Pool hidden states over the positions of a mask: their mean, or the last of them.

    Args:
        hidden: states of whole sequences.
        mask: positions to pool, at least one a row (see `pooling_mask`).
        how: "mean" or "last".
    """
    if how == "mean":
        return masked_time_mean(hidden, mask)
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


def pooling_mask(
    response_mask: Bool[Tensor, "batch response"],
    *,
    ended: Bool[Tensor, " batch"],
    prompt_mask: Bool[Tensor, "batch prompt"],
) -> Bool[Tensor, "batch time"]:
    """Choose what the reward reads: the response without EOS and without a sequence's first token.

    A sequence's first token carries an activation thousands of times larger than all others,
    which would ruin a mean. A response with nothing left is read at the token before its EOS.

    Args:
        response_mask: True on response tokens.
        ended: True where the last response token is EOS.
        prompt_mask: True on prompt tokens; may have no column.
    """
    lengths = response_mask.long().sum(dim=1) - ended.long()
    answer = length_mask(lengths, response_mask.shape[1])
    whole = torch.cat([torch.zeros_like(prompt_mask), answer], dim=1)
    real = torch.cat([prompt_mask, response_mask], dim=1)
    columns = torch.arange(real.shape[1], device=real.device)
    first = columns == torch.where(real, columns, real.shape[1]).amin(dim=1, keepdim=True)
    kept = whole & ~first
    before_end = torch.where(real, columns, -1).amax(dim=1) - ended.long()
    fallback = columns == before_end.clamp(min=0)[:, None]
    return torch.where(kept.any(dim=1, keepdim=True), kept, fallback)
