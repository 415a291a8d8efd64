"""β as a controlled quantity: a small frozen state and one pure update a rollout batch.

The input is the exact sequence KL of the batch just used, in nats per response. Without a
usable measurement nothing is steered, and the reason is returned.
"""

import math
from dataclasses import dataclass, replace

STEPS_AHEAD = 4
"""The KL is judged by where its last change takes it in so many steps, so that β acts in time."""
BRAKE = 0.6
"""Log β on top of the multiplier per unit of positive error: at once, and gone with the error."""
SETTLING_STEPS = 3
"""Measurements that show whether the KL is still rising."""
SETTLED_RISE = 0.01
"""A rise from the first to the last of those below this share of the target counts as settled."""

ROUNDING = 1e-3
"""Nats per response: a KL this little below 0 is float32 rounding; below that, a wrong sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """What the controller remembers; saved in every checkpoint.

    Attributes:
        multiplier: β where the error is 0, reward per nat: the Lagrange multiplier found so far.
        brake: factor on it, at least 1, while the KL is heading above its target.
        recent_kl: the last measurements, nats per response, newest last.
        error: relative error that β was moved by; None when nothing was steered.
        saturated: True where the last step was clipped, held or met a bound.
        note: what a person should know, a bound that is met or a KL that cannot be; else empty.
    """

    multiplier: float
    brake: float = 1.0
    recent_kl: tuple[float, ...] = ()
    error: float | None = None
    saturated: bool = False
    note: str = ""

    @property
    def kl_coef(self) -> float:
        """β for the next step, reward per nat."""
        return self.multiplier * self.brake


def initial_kl_coef(score_std: float, kl_target: float) -> float:
    """β at which a Gaussian reward's optimum lies at the target: β₀ = sd_ref(r)/√(2·target).

    Args:
        score_std: standard deviation of the scores of reference samples, reward units.
        kl_target: nats per response.
    """
    return score_std / math.sqrt(2 * kl_target)


def step_fixed(state: ControllerState, measured_kl: float) -> ControllerState:
    """Keep β; only the measurement is remembered."""
    recent = (*state.recent_kl, measured_kl)[-SETTLING_STEPS:]
    return replace(state, recent_kl=recent, error=None, saturated=False, note="")


def step_ziegler(
    state: ControllerState,
    measured_kl: float,
    *,
    kl_target: float,
    horizon: float,
    responses: int,
) -> ControllerState:
    """Move β in proportion to the clipped relative error, as the first RLHF code did.

        β ← β (1 + e · n/horizon),   e = clip(KL/target − 1, −0.2, 0.2)

    It never moves faster than 0.2 n/horizon a step: with the published horizon halving β takes
    about 34,700 responses.

    Args:
        state: the state before this batch.
        measured_kl: exact KL of the batch just used, nats per response.
        kl_target: nats per response.
        horizon: responses; 10,000 as published.
        responses: n, responses in the batch.

    Returns:
        The next state. A NaN, infinite or negative measurement leaves β where it is.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2, and the code published with it.
    """
    if not _usable(measured_kl):
        return _unsteered(state, measured_kl)
    error = measured_kl / kl_target - 1
    clipped = max(-0.2, min(0.2, error))
    return ControllerState(
        multiplier=state.multiplier * (1 + clipped * responses / horizon),
        recent_kl=(*state.recent_kl, measured_kl)[-SETTLING_STEPS:],
        error=error,
        saturated=clipped != error,
    )


def step_target(
    state: ControllerState,
    measured_kl: float,
    *,
    kl_target: float,
    rate: float,
    coef_min: float,
    coef_max: float,
) -> ControllerState:
    """Steer β by the relative error: dual ascent of max E[r] subject to KL ≤ target, with a brake.

        β = multiplier · exp(0.6 · max(error, 0)),   β in [coef_min, coef_max]
        log multiplier ← log multiplier + rate · error
        error = clip((KL + 4 · last change)/target − 1, −1, 1)

    The multiplier alone oscillates, because the KL answers to β late; looking ahead and braking in
    proportion damp it (PID Lagrangian, Stooke et al. 2020, eq. 8, here for log β).

    Anti-wind-up: KL starts at 0 and climbs for a while whatever β is, so the multiplier is lowered
    only when the last measurements have settled. Raising it is always allowed.

    Args:
        state: the state before this batch.
        measured_kl: exact KL of the batch just used, nats per response.
        kl_target: nats per response.
        rate: largest change of the multiplier's logarithm.
        coef_min: lower bound of β.
        coef_max: upper bound of β.

    Returns:
        The next state. A NaN, infinite or negative measurement leaves β where it is.
    """
    if not _usable(measured_kl):
        return _unsteered(state, measured_kl)
    recent = (*state.recent_kl, measured_kl)[-SETTLING_STEPS:]
    change = measured_kl - (state.recent_kl[-1] if state.recent_kl else measured_kl)
    ahead = (measured_kl + STEPS_AHEAD * change) / kl_target - 1
    error = max(-1.0, min(1.0, ahead))
    held = error < 0 and not _settled(recent, kl_target)
    proposed = state.multiplier * (1.0 if held else math.exp(rate * error))
    multiplier = min(max(proposed, coef_min), coef_max)
    brake = math.exp(BRAKE * max(error, 0.0))
    bounded = min(brake, coef_max / multiplier)
    at_bound = multiplier != proposed or bounded != brake
    return ControllerState(
        multiplier=multiplier, brake=bounded, recent_kl=recent, error=error,
        saturated=held or at_bound or error != ahead,
        note=f"β is at its bound {multiplier * bounded:g}" if at_bound else "",
    )  # fmt: skip


def _usable(measured_kl: float) -> bool:
    """A KL is finite and not negative, but for rounding."""
    return math.isfinite(measured_kl) and measured_kl >= -ROUNDING


def _unsteered(state: ControllerState, measured_kl: float) -> ControllerState:
    """Leave β where it is and say why."""
    return replace(state, error=None, saturated=True, note=f"KL measured as {measured_kl}")


def _settled(recent: tuple[float, ...], kl_target: float) -> bool:
    """Whether enough measurements are there and hardly rise from the first to the last."""
    rise = recent[-1] - recent[0]
    return len(recent) == SETTLING_STEPS and rise < SETTLED_RISE * kl_target
