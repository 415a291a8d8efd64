"""What a check is: a number from production beside the number it must be, and how near."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tether.errors import TetherError
from tether.exact.selftest.bench import Bench
from tether.exact.selftest.result import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is proved.

    Attributes:
        name: short, unique.
        proves: in a sentence, for the documentation.
        measure: production's number and the number it must be.
        float32: largest difference allowed where the models are float32.
        bfloat16: the same where their weights and states are bfloat16.
        costly: takes seconds; repeated under the sabotages that name themselves worth it alone.
    """

    name: str
    proves: str
    measure: Callable[[Bench], tuple[float, float]]
    float32: float
    bfloat16: float
    costly: bool = False

    def tolerance(self, dtype: torch.dtype) -> float:
        """Largest difference allowed in this precision."""
        return self.bfloat16 if dtype == torch.bfloat16 else self.float32


def run_check(check: Check, bench: Bench) -> Outcome:
    """Measure and judge; where production refuses to go on, the check fails and says why."""
    tolerance = check.tolerance(bench.dtype)
    try:
        measured, expected = check.measure(bench)
    except TetherError as error:
        return Outcome(
            name=check.name, measured=None, expected=None, tolerance=tolerance, passed=False,
            error=str(error),
        )  # fmt: skip
    finite = math.isfinite(measured)
    return Outcome(
        name=check.name, measured=measured if finite else None, expected=expected,
        tolerance=tolerance, passed=finite and abs(measured - expected) <= tolerance,
        error="" if finite else f"measured {measured}",
    )  # fmt: skip
