"""Numbers for people: the metrics of a step and the one line that a run ends with."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tether.config import KLConfig
from tether.core.controllers import ControllerState
from tether.core.diagnostics import (
    explained_variance,
    sampler_bias,
    sequence_kl,
    surprisal_gap,
)
from tether.core.kl import k1, k3
from tether.core.masking import masked_mean, masked_row_sum
from tether.guard.diversity import distinct_n
from tether.report.headline import summary
from tether.types import AdvantageEstimate, Drift, Rollout


@torch.no_grad()
def step_metrics(
    rollout: Rollout,
    drift: Drift,
    scores: Float[Tensor, " batch"],
    rewards: Float[Tensor, "batch response"],
    estimate: AdvantageEstimate,
) -> dict[str, float | None]:
    """Metrics of the rollout, before any update; keys as in `metrics.REGISTRY`."""
    mask, logprobs = rollout.response_mask, rollout.old_logprobs
    log_ratio = logprobs - drift.ref_logprobs
    exact = sequence_kl(drift.kl, mask)
    return {
        "score/mean": scores.mean().item(),
        "score/std": scores.std(correction=0).item(),
        "reward/shaped_mean": masked_row_sum(rewards, mask).mean().item(),
        "kl/ref_nats_per_response": exact.mean,
        "kl/ref_standard_error": exact.standard_error,
        "kl/ref_nats_per_token": masked_mean(drift.kl, mask).item(),
        "kl/k1_nats_per_response": masked_row_sum(k1(log_ratio), mask).mean().item(),
        "kl/k3_nats_per_response": masked_row_sum(k3(log_ratio), mask).mean().item(),
        "kl/sampler_bias_z": sampler_bias(logprobs, drift.ref_logprobs, mask).z,
        "kl/surprisal_gap_z": surprisal_gap(logprobs, drift.entropy, mask).z,
        "rollout/response_tokens_mean": mask.sum(dim=1).float().mean().item(),
        "rollout/eos_fraction": rollout.finished.float().mean().item(),
        "rollout/entropy_nats_per_token": masked_mean(drift.entropy, mask).item(),
        "rollout/distinct_2": distinct_n(list(rollout.texts), 2),
        "value/explained_variance": explained_variance(rollout.values, estimate.returns, mask),
    }


def controller_metrics(
    kl: KLConfig, state: ControllerState, *, used: float
) -> dict[str, float | None]:
    """β that this step used, and what the controller made of the step's KL."""
    return {
        "controller/kl_coef": used,
        "controller/kl_target": kl.target if kl.controller == "target" else None,
        "controller/error": state.error,
        "controller/saturated": float(state.saturated),
    }


def summarise(rows: list[dict]) -> dict[str, Any]:
    """The result of a run: the report's headline and how diverse the answers stayed.

    Args:
        rows: metrics of all steps, in order.
    """
    ratios = [row["heldout/distinct_2_ratio"] for row in rows if "heldout/distinct_2_ratio" in row]
    return summary(rows) | {"distinct_2_ratio": ratios[-1] if ratios else None}
