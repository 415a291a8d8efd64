"""Scores per response become rewards per token, with the KL penalty inside."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.core.kl import k1


@torch.no_grad()
def shape_rewards(
    scores: Float[Tensor, " batch"],
    old_logprobs: Float[Tensor, "batch response"],
    ref_logprobs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    kl_coef: float,
) -> Float[Tensor, "batch response"]:
    """Charge each token for leaving the reference and pay the score at the last real token.

        r̃ₜ = −β (log π(aₜ) − log π_ref(aₜ)) + [t is last] · score

    Detached k1 with discount 1 is the simple form whose policy gradient is exactly that of
    E[score] − β·KL(π‖π_ref) on whole responses. The penalty is not clamped.

    Args:
        scores: one number per response, before any KL.
        old_logprobs: log π of the sampled tokens under the sampling policy, nats.
        ref_logprobs: log π_ref of the same tokens, nats.
        response_mask: True on response tokens, the first EOS included.
        kl_coef: β, reward per nat.

    Returns:
        Shaped rewards, 0 outside the mask.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    penalty = kl_coef * k1(old_logprobs - ref_logprobs)
    rewards = torch.where(response_mask, -penalty, 0.0)
    columns = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, columns, -1).amax(dim=1)
    return rewards.index_put(
        (torch.arange(len(scores), device=scores.device), last), scores.to(rewards), accumulate=True
    )
