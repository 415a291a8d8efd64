"""Losses, each a sum over real tokens divided by the optimiser batch's token count."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.core.kl import k3
from tether.core.masking import token_sum_over
from tether.types import LossOutput


def clipped_policy_loss(
    logprobs: Float[Tensor, "batch response"],
    old_logprobs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_epsilon: float,
    total_tokens: int,
) -> LossOutput:
    """PPO's clipped surrogate with one ratio per token.

        Lₜ = −min(ρₜ Âₜ, clip(ρₜ, 1−ε, 1+ε) Âₜ),   ρₜ = exp(log π(aₜ) − log π_old(aₜ))

    Args:
        logprobs: log π of the sampled tokens, differentiable, nats.
        old_logprobs: the same under the policy that sampled them, constant.
        advantages: whitened advantages, constant.
        response_mask: True on response tokens.
        clip_epsilon: ε, ratio units.
        total_tokens: response tokens of the whole optimiser batch.

    Returns:
        The loss, with clip_fraction and approx_kl_old (k3 of new against old) as token means.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    # Outside the mask the ratio is exactly 1, so padding can neither overflow nor carry gradient.
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        was_clipped = (clipped * advantages < ratio * advantages).to(losses.dtype)
        approx_kl = k3(-log_ratio.detach()).to(losses.dtype)
    return LossOutput(
        loss=token_sum_over(losses, response_mask, total_tokens),
        stats={
            "policy/loss": token_sum_over(losses.detach(), response_mask, total_tokens),
            "policy/clip_fraction": token_sum_over(was_clipped, response_mask, total_tokens),
            "policy/approx_kl_old": token_sum_over(approx_kl, response_mask, total_tokens),
        },
    )


def value_loss(
    values: Float[Tensor, "batch response"],
    old_values: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    value_clip: float | None,
    total_tokens: int,
) -> LossOutput:
    """Half the squared error of the value function; with a clip range the worse of two.

        Lₜ = ½ max((Vₜ − R̂ₜ)², (clip(Vₜ, V_old ± c) − R̂ₜ)²)

    Args:
        values: V(sₜ), differentiable, reward units.
        old_values: V(sₜ) at rollout, constant.
        returns: value targets, constant.
        response_mask: True on response tokens.
        value_clip: c, reward units, or None for no clipping.
        total_tokens: response tokens of the whole optimiser batch.

    Returns:
        The loss and its value for the log.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 9; clipping as in the PPO2 baseline.
    """
    losses = (values - returns) ** 2
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        losses = torch.maximum(losses, (near - returns) ** 2)
    loss = 0.5 * token_sum_over(losses, response_mask, total_tokens)
    return LossOutput(loss=loss, stats={"value/loss": loss.detach()})


def pairwise_reward_loss(
    better: Float[Tensor, " pairs"], worse: Float[Tensor, " pairs"]
) -> Float[Tensor, ""]:
    """Bradley-Terry loss: −log σ(score of the better − score of the worse), mean over pairs.

    Source:
        Stiennon et al. 2020, arXiv:2009.01325, section 3.3.
    """
    return -torch.nn.functional.logsigmoid(better - worse).mean()
