"""The tether: which KL is penalised, and how its coefficient is controlled."""

from dataclasses import dataclass
from typing import Literal

from tether.checks import require, require_default, require_positive


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The tether: KL(π‖π_ref) in nats per response, measured exactly and held."""

    placement: Literal["reward", "none"] = "reward"
    """reward: detached log π − log π_ref per token in the reward (exact gradient); none: only measured."""
    controller: Literal["target", "fixed"] = "target"
    """target steers β to kl.target; fixed keeps β at kl.coef."""
    target: float = 6.0
    """Target of the target controller, nats per response; fixed does not steer and leaves it unused."""
    coef: float | None = None
    """β, reward per nat; with controller target the start value (none: computed from the target)."""
    rate: float = 0.2
    """Largest change of the multiplier's logarithm in one step; the brake comes on top (theory page)."""
    coef_min: float = 1e-4
    """Lower bound of β for the target controller; reaching it is logged."""
    coef_max: float = 10.0
    """Upper bound of β for the target controller; reaching it is logged."""

    def __post_init__(self) -> None:
        require(self.target > 0, "kl.target", self.target, "above 0 nats per response")
        require_positive("kl.", self, "rate", "coef_min")
        require(self.coef_max > self.coef_min, "kl.coef_max", self.coef_max, "above kl.coef_min")
        require(self.coef is None or self.coef >= 0, "kl.coef", self.coef, "0 or above")
        if self.controller == "fixed":
            options = ("rate", "coef_min", "coef_max")
            require_default("kl.", self, *options, unless="kl.controller is target")
            require(self.coef is not None, "kl.coef", None, "given when kl.controller is fixed")
        if self.controller == "target" and self.coef is not None:
            allowed = f"within [{self.coef_min}, {self.coef_max}] when kl.controller is target"
            require(self.coef_min <= self.coef <= self.coef_max, "kl.coef", self.coef, allowed)
        if self.placement == "none":
            allowed = "fixed with kl.coef 0 when kl.placement is none: nothing would be steered"
            steered = self.controller == "target" or bool(self.coef)
            require(not steered, "kl.controller", self.controller, allowed)
