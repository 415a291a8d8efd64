"""What `tether toy` says: one document of plain numbers for each objective, over one or more seeds.

Flows in: coefficients, seeds. Flows out: the JSON document that the table and the figure are
drawn from, so that all three show the same numbers.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tether.observer import Observer
from tether.study import toy, toy_article
from tether.study.toy import Best, Row
from tether.study.toy_article import Published
from tether.study.toy_ground import Ground

Figures = dict[str, float]


def tether_document(
    known: Ground, coefs: Sequence[float], *, seeds: int, observer: Observer
) -> dict[str, Any]:
    """Train at every β and seed; every row's figures are exact."""
    rows = []
    for kl_coef in coefs:
        best = toy.best_bigram(known, kl_coef)
        runs = [toy.tether_row(known, kl_coef, seed, observer) for seed in range(seeds)]
        rows.append(_entry(runs, [_tether_figures(row, best) for row in runs]))
    reference = toy.reference_row(known)
    return {
        "objective": "tether", "seeds": seeds, "reference": _reference(reference), "rows": rows,
    }  # fmt: skip


def article_document(
    known: Ground, coefs: Sequence[float], *, seeds: int, observer: Observer
) -> dict[str, Any]:
    """Train as published; reward and fluency are the means of 512 sentences, as published."""
    fitted = toy_article.article_reference()
    rows = []
    for coefficient in coefs:
        runs = [
            toy_article.article_row(known, fitted, coefficient, seed, observer)
            for seed in range(seeds)
        ]
        published = toy_article.PUBLISHED.get(coefficient)
        entry = _entry(runs, [_figures(row) | _sampled(row) for row in runs])
        rows.append(entry | {"published": _printed(published)})
    reference = _reference(toy.row_of(known, fitted, 0.0))
    return {
        "objective": "article",
        "seeds": seeds,
        "reference": reference | {"published": _printed(toy_article.REFERENCE)},
        "first_step": asdict(toy_article.first_step(known.language, fitted)),
        "rows": rows,
    }


def _printed(published: Published | None) -> dict[str, Any] | None:
    """What the article printed of a row; None where it has no such row."""
    if published is None:
        return None
    sample = published.sample
    return asdict(published) | {"sample": None if sample is None else list(sample)}


def _entry(runs: list[Row], figures: list[Figures]) -> dict[str, Any]:
    """Means over seeds, standard deviations where there are several, the first seed's samples."""
    columns = {name: [run[name] for run in figures] for name in figures[0]}
    mean = {name: statistics.fmean(values) for name, values in columns.items()}
    several = len(figures) > 1
    spread = {name: statistics.stdev(v) for name, v in columns.items()} if several else {}
    return {
        "coefficient": runs[0].coefficient,
        **mean,
        "sample": list(runs[0].samples[0]),
        "samples": [list(sample) for sample in runs[0].samples],
        "spread": spread,
        "runs": figures,
    }


def _figures(row: Row) -> Figures:
    """What both objectives are told by; reward and fluency exact."""
    standing = row.standing
    return {
        "reward": standing.reward,
        "fluency": standing.fluency,
        "kl_nats_per_response": standing.kl,
        "least_kl": standing.least_kl,
        "efficiency": standing.efficiency,
        "distinct": row.distinct,
        "exact_reward": standing.reward,
        "exact_fluency": standing.fluency,
    }


def _sampled(row: Row) -> Figures:
    """Reward and fluency as the article measured them."""
    return {"reward": row.reported[0], "fluency": row.reported[1]}


def _tether_figures(row: Row, best: Best) -> Figures:
    """The row beside the best bigram at the same β."""
    reached = toy.objective(row)
    return _figures(row) | {
        "objective": reached,
        "best_bigram_objective": best.objective,
        "best_bigram_reward": best.reward,
        "best_bigram_kl": best.kl,
        "objective_gap": (best.objective - reached) / best.objective,
        "bigram_efficiency": toy.bigram_efficiency(row, best),
    }


def _reference(row: Row) -> dict[str, Any]:
    """The reference: as published by 512 sentences, and exactly."""
    return {
        "reward": row.reported[0],
        "fluency": row.reported[1],
        "sample": list(row.samples[0]),
        "exact_reward": row.standing.reward,
        "exact_fluency": row.standing.fluency,
        "distinct": row.distinct,
    }
