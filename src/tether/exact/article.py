"""A published objective, kept as a specimen: what its loss does instead of what it says.

    L = −(min(R Â, clip(R, 1−ε, 1+ε) Â) − c Σₜ (log π − log π_ref)),   R = Σₜ exp(log π − log π_old)

R sums over tokens, so at the first step it is their number instead of 1: every positive advantage
is clipped and carries no gradient, no negative one ever is. The reference is a constant under
autograd, so the c-term does not depend on it and pushes away from whatever was sampled.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tether.exact.batch import Batch


def article_ratio(batch: Batch) -> Float[Tensor, " sequences"]:
    """R: the sum of the ratios of all columns; a padded column counts exp(0) = 1."""
    gap = torch.where(batch.mask, batch.logprobs - batch.old_logprobs, 0.0)
    return gap.exp().sum(dim=1)


def article_loss(
    batch: Batch, advantages: Float[Tensor, " sequences"], *, kl_weight: float, epsilon: float = 0.2
) -> Float[Tensor, ""]:
    """The published loss, expected over responses.

    Args:
        batch: all responses.
        advantages: one for each response, constant.
        kl_weight: c.
        epsilon: ε of the clip.
    """
    ratio = article_ratio(batch)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    log_ratio = torch.where(batch.mask, batch.log_ratio, 0.0).sum(dim=1)
    return -(batch.weights * (gain - kl_weight * log_ratio)).sum()
