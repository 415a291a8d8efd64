"""What a self-test found: plain numbers and names. Imports no torch."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One check after it has run.

    Attributes:
        name: of the check.
        measured: production's number; None where it could not be measured.
        expected: the number it must be; None likewise.
        tolerance: largest difference allowed.
        passed: whether they are that near.
        error: what was raised instead of a number; empty otherwise.
    """

    name: str
    measured: float | None
    expected: float | None
    tolerance: float
    passed: bool
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caught:
    """What became of one sabotage.

    Attributes:
        name: of the sabotage.
        caught_by: checks that failed under it and passed without it.
    """

    name: str
    caught_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The result.

    Attributes:
        device: where the models lived.
        dtype: precision of their weights and states.
        seconds: that it took.
        checks: what was measured.
        sabotage: what was caught.
    """

    device: str
    dtype: str
    seconds: float
    checks: tuple[Outcome, ...]
    sabotage: tuple[Caught, ...]

    @property
    def missed(self) -> list[str]:
        """Sabotages that no check saw."""
        return [one.name for one in self.sabotage if not one.caught_by]

    @property
    def idle(self) -> list[str]:
        """Checks that passed and saw no sabotage: they prove nothing."""
        used = {name for one in self.sabotage for name in one.caught_by}
        return [one.name for one in self.checks if one.passed and one.name not in used]

    @property
    def passed(self) -> bool:
        """Every check passed, every sabotage was caught, every check caught one."""
        return all(one.passed for one in self.checks) and not self.missed and not self.idle

    def document(self) -> dict[str, Any]:
        """The result as JSON knows it; keys are a contract."""
        return {"passed": self.passed} | asdict(self) | {"idle_checks": self.idle}

    def defects(self) -> list[str]:
        """One line for everything that is wrong."""
        failed = [
            f"failed: {one.name}" + (f" ({one.error})" if one.error else "")
            for one in self.checks
            if not one.passed
        ]
        missed = [f"defect: no check saw the sabotage {name!r}" for name in self.missed]
        idle = [f"defect: the check {name!r} saw no sabotage" for name in self.idle]
        return failed + missed + idle

    def headline(self) -> str:
        """The last line."""
        right, count = sum(one.passed for one in self.checks), len(self.checks)
        seen, known = len(self.sabotage) - len(self.missed), len(self.sabotage)
        return (
            f"{'passed' if self.passed else 'FAILED'}: {right} of {count} checks passed, "
            f"{seen} of {known} sabotages caught, {self.dtype} on {self.device}, "
            f"{self.seconds:.0f} s"
        )
