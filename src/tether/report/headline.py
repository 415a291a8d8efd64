"""The one line that a run ends with: reward gained, held-out gain, KL against target."""

from collections.abc import Mapping
from typing import Any


def summary(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of the headline, from the metrics so far: held-out gains, KL over the last third.

    Args:
        metrics: rows of metrics.jsonl, in order; may be empty.

    Returns:
        reward_gain, heldout_gain, heldout_interval, kl_nats_per_response, kl_target, kl_coef; None
        where there is no number yet.
    """
    held = next((r for r in reversed(metrics) if r.get("heldout/score_gain") is not None), {})
    low, high = held.get("heldout/judge_gain_low"), held.get("heldout/judge_gain_high")
    nats = [row["kl/ref_nats_per_response"] for row in metrics[-max(1, len(metrics) // 3) :]]
    last = metrics[-1] if metrics else {}
    return {
        "reward_gain": held.get("heldout/score_gain"),
        "heldout_gain": held.get("heldout/judge_gain"),
        "heldout_interval": None if low is None or high is None else [low, high],
        "kl_nats_per_response": sum(nats) / len(nats) if nats else None,
        "kl_target": last.get("controller/kl_target"),
        "kl_coef": last.get("controller/kl_coef"),
    }


def headline(result: Mapping[str, Any]) -> str:
    """One line from the keys of `summary` or of result.json."""
    return "; ".join(
        [f"reward {gained(result)}", f"held-out judge {judged(result)}", spent(result)]
    )


def gained(result: Mapping[str, Any]) -> str:
    """Training reward gained on held-out prompts, reward units."""
    gain = result["reward_gain"]
    return "not measured" if gain is None else f"{gain:+.3g}"


def judged(result: Mapping[str, Any]) -> str:
    """Held-out judge's gain with its interval, in standard deviations of the judge."""
    gain, interval = result["heldout_gain"], result["heldout_interval"]
    if gain is None:
        return "not measured"
    if interval is None:
        return f"{gain:+.3g} sd"
    return f"{gain:+.3g} sd [{interval[0]:+.3g}, {interval[1]:+.3g}]"


def spent(result: Mapping[str, Any]) -> str:
    """KL over the last third of the run against its target, nats per response."""
    nats, target = result["kl_nats_per_response"], result["kl_target"]
    if nats is None:
        return "KL not measured"
    if target is None:
        return f"KL {nats:.3g} nats per response (no target)"
    return f"KL {nats:.3g} of {target:.3g} nats per response"
