"""Who is told about progress: a protocol of five methods, and the observer that says nothing.

The loop calls these and knows no more about terminals. Imports no torch.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Observer(Protocol):
    """Receives the progress of a command; none of its methods returns anything."""

    def stage(self, name: str, total: int | None) -> None:
        """A long stage begins.

        Args:
            name: what is being done, e.g. 'loading the model'.
            total: units until it ends, for the time left; None where that is unknown.
        """

    def advance(self, n: int = 1) -> None:
        """So many more units of the stage are done."""

    def note(self, text: str) -> None:
        """One line worth saying."""

    def step(self, row: Mapping[str, float | int | None], total_steps: int) -> None:
        """A training step is done; keys of `row` as in `metrics.REGISTRY`."""

    def sample(self, prompt: str, reference: str, response: str) -> None:
        """One response of the policy beside the reference's to the same prompt."""


class SilentObserver:
    """Says nothing; for tests and for use as a library."""

    def stage(self, name: str, total: int | None) -> None:
        """Say nothing."""

    def advance(self, n: int = 1) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def step(self, row: Mapping[str, float | int | None], total_steps: int) -> None:
        """Say nothing."""

    def sample(self, prompt: str, reference: str, response: str) -> None:
        """Say nothing."""
