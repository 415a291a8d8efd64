"""Numbers for people: the metrics of a step and the one line that a run ends with."""

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
from tether.types import AdvantageEstimate, Drift, Rollout


@torch.no_grad()
def step_metrics(
    rollout: Rollout,
    drift: Drift,
    scores: Float[Tensor, " batch"],
    rewards: Float[Tensor, "batch response"],
    estimate: AdvantageEstimate,
) -> dict[str, float]:
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


def summarise(rows: list[dict], kl: KLConfig) -> dict[str, object]:
    """The result of a run from its metrics: held-out gains at the end, KL over the last third.

    Args:
        rows: metrics of all steps, in order.
        kl: for the target.

    Returns:
        reward_gain, heldout_gain, heldout_interval, kl_nats_per_response, kl_target, kl_coef,
        distinct_2_ratio.
    """
    last_third = rows[-max(1, len(rows) // 3) :]
    held = next((row for row in reversed(rows) if "heldout/score_gain" in row), {})
    low, high = held.get("heldout/judge_gain_low"), held.get("heldout/judge_gain_high")
    nats = [row["kl/ref_nats_per_response"] for row in last_third]
    return {
        "reward_gain": held.get("heldout/score_gain"),
        "heldout_gain": held.get("heldout/judge_gain"),
        "heldout_interval": None if low is None else [low, high],
        "kl_nats_per_response": sum(nats) / len(nats),
        "kl_target": kl.target if kl.controller == "target" else None,
        "kl_coef": rows[-1]["controller/kl_coef"],
        "distinct_2_ratio": held.get("heldout/distinct_2_ratio"),
    }
