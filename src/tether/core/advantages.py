"""Advantage estimators: shaped rewards and values in, advantages and value targets out."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.types import AdvantageEstimate


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    gamma: float,
    gae_lambda: float,
) -> AdvantageEstimate:
    """Generalised advantage estimation over one finite response per row.

        δₜ = rₜ + γ V(sₜ₊₁) − V(sₜ),    V = 0 after the last response token
        Âₜ = δₜ + γλ Âₜ₊₁,              R̂ₜ = Âₜ + V(sₜ)

    Args:
        rewards: shaped reward of emitting token t, reward units.
        values: V(sₜ), the value before token t is emitted, reward units.
        response_mask: True on response tokens, the first EOS included.
        gamma: discount γ in [0, 1].
        gae_lambda: λ in [0, 1]; 0 is one-step TD, 1 is Monte Carlo minus V.

    Returns:
        Unwhitened advantages and value targets, both 0 outside the mask.

    Source:
        Schulman et al. 2016, arXiv:1506.02438, eqs. 11-16.
    """
    values = torch.where(response_mask, values, 0.0)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = torch.where(response_mask, rewards + gamma * next_values - values, 0.0)
    advantages = torch.zeros_like(deltas)
    running = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        running = deltas[:, t] + gamma * gae_lambda * running
        advantages[:, t] = running
    advantages = torch.where(response_mask, advantages, 0.0)
    return AdvantageEstimate(advantages=advantages, returns=advantages + values)
