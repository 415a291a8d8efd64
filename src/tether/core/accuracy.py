"""How often scores order pairs as people did, and how far that can be trusted.

Scores and pairs in, a rate with its interval out; what the texts say is deliberately absent.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

RESAMPLES = 200
FEWEST_TO_RESAMPLE = 20
"""Independent pairs from which a bootstrap over them can be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAccuracy:
    """Share of held-out pairs ordered as people did, with its 95 % interval."""

    accuracy: float
    interval: tuple[float, float]
    pairs: int


def pair_accuracy(
    scores: Float[Tensor, " texts"],
    pairs: Int[Tensor, "pairs 2"],
    *,
    clusters: Int[Tensor, " texts"],
) -> PairAccuracy:
    """Held-out pair accuracy, ties half; its interval resamples texts (or prompts), not pairs.

    Pairs share texts, so they are not independent: a Poisson bootstrap weights each pair by its
    two texts' draws. Below `FEWEST_TO_RESAMPLE` independent pairs a bootstrap is too narrow (and
    may draw no pair at all), and where all pairs are alike it has no width: there Wilson's
    interval for that many pairs takes its place.

    Args:
        scores: one number per text, any unit.
        pairs: (better, worse) indices into the texts, at least one.
        clusters: texts with the same number are dependent.

    Source:
        Owen and Eckles 2012, arXiv:1106.2125 (bootstrapping data arrays); Wilson 1927,
        J. Am. Stat. Assoc. 22:209 (the score interval).
    """
    better, worse = pairs.unbind(dim=1)
    margin = scores[better] - scores[worse]
    correct = (margin > 0).double() + 0.5 * (margin == 0).double()
    first, second = clusters[better], clusters[worse]
    independent = _independent_pairs(first, second)
    accuracy = correct.mean().item()
    if independent < FEWEST_TO_RESAMPLE or accuracy in (0.0, 1.0):
        interval = _wilson(accuracy, independent)
    else:
        interval = _bootstrap(correct, first, second)
    return PairAccuracy(accuracy=accuracy, interval=interval, pairs=len(margin))


def _independent_pairs(first: Int[Tensor, " pairs"], second: Int[Tensor, " pairs"]) -> float:
    """How many pairs without a shared cluster would say as much as these.

        n = 2 pairs² / Σ (pairs of a cluster)²    (1 for 2 where no pair joins two clusters)

    Disjoint pairs count in full; pairs that all share one text count as about two.
    """
    joining = second[first != second]
    touched = torch.bincount(torch.cat([first, joining])).double()
    sides = 2 if len(joining) else 1
    return sides * len(first) ** 2 / touched.square().sum().item()


def _wilson(rate: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate over `count` independent draws."""
    z_squared = 1.96**2 / count
    middle = (rate + z_squared / 2) / (1 + z_squared)
    half = math.sqrt(z_squared * (rate * (1 - rate) + z_squared / 4)) / (1 + z_squared)
    # at a rate of 0 or 1 rounding would put the bound beside the rate
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


def _bootstrap(
    correct: Float[Tensor, " pairs"], first: Int[Tensor, " pairs"], second: Int[Tensor, " pairs"]
) -> tuple[float, float]:
    """95 % interval of a mean over pairs from resampled clusters."""
    clusters = int(torch.stack([first, second]).max()) + 1
    generator = torch.Generator().manual_seed(0)
    rates = []
    for _ in range(RESAMPLES):
        draws = torch.poisson(torch.ones(clusters), generator=generator)
        weights = torch.where(first == second, draws[first], draws[first] * draws[second])
        rates.append((weights * correct).sum() / weights.sum())
    low, high = torch.stack(rates).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return low.item(), high.item()
