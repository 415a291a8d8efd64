"""β as a controlled quantity: a small frozen state and one pure update a rollout batch.

The input is the exact sequence KL of the batch just used, in nats per response. Without a
usable measurement nothing is steered, and the reason is returned.
"""

import math
from dataclasses import dataclass, replace

TREND_STEPS = 5
"""Measurements that the KL's slope is read from."""
STEPS_AHEAD = 5
"""The KL is judged by where its slope takes it in so many steps, so that β acts in time."""
SETTLED_RISE = 0.025
"""A rise over those measurements below this share of the target counts as settled."""

ROUNDING = 1e-3
"""Nats per response: a KL this little below 0 is float32 rounding; below that, a wrong sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """What the controller remembers; saved in every checkpoint.

    Attributes:
        kl_coef: β for the next step, reward per nat.
        recent_kl: the last measurements, nats per response, newest last.
        error: relative error that β was moved by; None when nothing was steered.
        saturated: True where the last step was clipped, held or met a bound.
        note: why β did not move as the error asks; empty otherwise.
    """

    kl_coef: float
    recent_kl: tuple[float, ...] = ()
    error: float | None = None
    saturated: bool = False
    note: str = ""


def initial_kl_coef(score_std: float, kl_target: float) -> float:
    """β at which a Gaussian reward's optimum lies at the target: β₀ = sd_ref(r)/√(2·target).

    Args:
        score_std: standard deviation of the scores of reference samples, reward units.
        kl_target: nats per response.
    """
    return score_std / math.sqrt(2 * kl_target)


def step_fixed(state: ControllerState, measured_kl: float) -> ControllerState:
    """Keep β; only the measurement is remembered."""
    recent = (*state.recent_kl, measured_kl)[-TREND_STEPS:]
    return replace(state, recent_kl=recent, error=None, saturated=False, note="")


def step_target(
    state: ControllerState,
    measured_kl: float,
    *,
    kl_target: float,
    rate: float,
    coef_min: float,
    coef_max: float,
) -> ControllerState:
    """Move log β by the relative error: the dual ascent of max E[r] subject to KL ≤ target.

        log β ← log β + rate · clip(error, −1, 1),   β in [coef_min, coef_max]
        error = (KL + 5 · slope)/target − 1

    The slope is that of the last five measurements' least-squares line: the KL answers to β with a
    delay, so it is judged by where it will be, which damps the loop in both directions.

    Anti-wind-up: KL starts at 0 and climbs for a while whatever β is, so β is lowered only when the
    last measurements have settled. Raising it is always allowed.

    Args:
        state: the state before this batch.
        measured_kl: exact KL of the batch just used, nats per response.
        kl_target: nats per response.
        rate: largest change of log β.
        coef_min: lower bound of β.
        coef_max: upper bound of β.

    Returns:
        The next state. A NaN, infinite or negative measurement leaves β where it is.
    """
    if not math.isfinite(measured_kl) or measured_kl < -ROUNDING:
        return replace(state, error=None, saturated=True, note=f"KL measured as {measured_kl}")
    recent = (*state.recent_kl, measured_kl)[-TREND_STEPS:]
    slope = _slope(recent)
    error = (measured_kl + STEPS_AHEAD * slope) / kl_target - 1
    settled = len(recent) == TREND_STEPS and slope * TREND_STEPS < SETTLED_RISE * kl_target
    if error < 0 and not settled:
        note = "KL is still rising"
        return replace(state, recent_kl=recent, error=error, saturated=True, note=note)
    proposed = state.kl_coef * math.exp(rate * max(-1.0, min(1.0, error)))
    kl_coef = min(max(proposed, coef_min), coef_max)
    bound = kl_coef != proposed
    note = f"β is at its bound {kl_coef:g}" if bound else ""
    saturated = bound or abs(error) > 1
    return ControllerState(
        kl_coef=kl_coef, recent_kl=recent, error=error, saturated=saturated, note=note
    )


def _slope(values: tuple[float, ...]) -> float:
    """Least-squares slope per step; 0 for a single value."""
    count = len(values)
    if count < 2:
        return 0.0
    middle = (count - 1) / 2
    mean = sum(values) / count
    spread = sum((i - middle) ** 2 for i in range(count))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
