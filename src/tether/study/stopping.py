"""Stopping a run by a held-out preference rate that is itself measured with noise."""

from dataclasses import dataclass

import torch

ASKED = 256
"""Held-out comparisons in one check."""
SEEDS = 20
"""Draws of the comparisons that results are averaged over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a distribution over answers stands.

    Attributes:
        label: β, n or step.
        kl: from the reference, nats.
        proxy: mean of what is trained on.
        true: mean of what is wanted.
        wins: held-out preference rate against the reference's answers.
    """

    label: float
    kl: float
    proxy: float
    true: float
    wins: float


def measured_rates(checks: list[Stand], *, seed: int) -> list[float]:
    """Each check's preference rate as so many comparisons measure it."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.tensor([s.wins for s in checks], dtype=torch.float64)
    drawn = torch.rand(len(exact), ASKED, generator=generator, dtype=torch.float64)
    return (drawn < exact[:, None]).double().mean(dim=1).tolist()


def stop(rates: list[float], patience: int) -> tuple[int, int]:
    """The check at which a run stops for want of progress, and the best check until then."""
    best = 0
    for i, rate in enumerate(rates):
        best = i if rate > rates[best] else best
        if i - best == patience:
            return i, best
    return len(rates) - 1, best


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What stopping gives, averaged over draws of the comparisons."""

    patience: int
    step: float
    kl: float
    last: float
    kept: float


def stopped(checks: list[Stand], patience: int) -> Stopped:
    """Stop by measured rates, many times."""
    ends = [stop(measured_rates(checks, seed=seed), patience) for seed in range(SEEDS)]

    def mean(values: list[float]) -> float:
        return sum(values) / SEEDS

    return Stopped(
        patience=patience,
        step=mean([checks[last].label for last, _ in ends]),
        kl=mean([checks[last].kl for last, _ in ends]),
        last=mean([checks[last].true for last, _ in ends]),
        kept=mean([checks[best].true for _, best in ends]),
    )
