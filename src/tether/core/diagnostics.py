"""Numbers that say whether the sampler is the policy and whether the critic learns."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.core.kl import k3
from tether.core.masking import masked_row_sum, masked_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean with its standard error, None for a single value."""

    mean: float
    standard_error: float | None

    @property
    def z(self) -> float | None:
        """The mean in standard errors; None where equal values other than 0 show no spread."""
        if self.mean == 0:
            return 0.0
        return self.mean / self.standard_error if self.standard_error else None


def mean_with_error(values: Float[Tensor, " count"]) -> Mean:
    """Mean and standard error of independent values."""
    count = values.numel()
    error = values.double().std().item() / math.sqrt(count) if count > 1 else None
    return Mean(mean=values.double().mean().item(), standard_error=error)


@torch.no_grad()
def sampler_bias(
    logprobs: Float[Tensor, "batch response"],
    ref_logprobs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Mean:
    """mean(k3 − k1) = mean(π_ref/π) − 1, which is 0 exactly when tokens were sampled from π.

    Blind while π = π_ref; `surprisal_gap` is not.
    """
    log_ratio = (logprobs - ref_logprobs)[response_mask].double()
    return mean_with_error(k3(log_ratio) - log_ratio)


@torch.no_grad()
def surprisal_gap(
    logprobs: Float[Tensor, "batch response"],
    entropy: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Mean:
    """mean(−log π(token) − H(π)) over tokens: a martingale difference, 0 for tokens from π."""
    return mean_with_error((-logprobs - entropy)[response_mask])


@torch.no_grad()
def explained_variance(
    values: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> float:
    """1 − Var(returns − values)/Var(returns); 0 when the returns do not vary."""
    spread = masked_variance(returns, response_mask).item()
    residual = masked_variance(returns - values, response_mask).item()
    return 1 - residual / spread if spread > 0 else 0.0


def sequence_kl(
    kl: Float[Tensor, "batch response"], response_mask: Bool[Tensor, "batch response"]
) -> Mean:
    """Mean over responses of the KL summed along each, nats per response."""
    return mean_with_error(masked_row_sum(kl, response_mask))
