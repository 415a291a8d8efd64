"""Texts that people rated, and the pairs that follow from the ratings."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tether.data.readers import Row, require_column, require_text
from tether.errors import DataError

LARGEST_SCORE = 1e6
"""A rating beyond this, either way, is a slip: no difference of ratings would survive float32."""

_BLOCK = 1024  # rows of the comparison matrix held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """A rated text.

    Attributes:
        text: what was rated, as it was shown.
        score: its mean rating, higher is better, in the units of the source.
        raters: each person's rating, same units; () where the source has none.
        row: where the source has it, counted from 1; None where it has no rows.
    """

    text: str
    score: float
    raters: tuple[float, ...] = ()
    row: int | None = field(default=None, compare=False)


def load_ratings(rows: list[Row], field: str) -> list[Rating]:
    """Read ratings from the columns text, score (or rating) and raters (or ratings) where present.

    Args:
        rows: rows of the source.
        field: the option that named the source, for messages.

    Raises:
        DataError: a column is missing, a text is empty or a number is not finite or beyond ±1e6.
    """
    require_column(rows, "text", field)
    score_column = "rating" if "rating" in rows[0] and "score" not in rows[0] else "score"
    require_column(rows, score_column, field)
    raters_column = "ratings" if "ratings" in rows[0] and "raters" not in rows[0] else "raters"
    return [
        Rating(
            text=require_text(row["text"], number, "text", field),
            score=_number(row[score_column], number, score_column, field),
            raters=_numbers(row.get(raters_column), number, raters_column, field),
            row=number,
        )
        for number, row in enumerate(rows, 1)
    ]


def rating_pairs(scores: list[float], gap: float) -> list[tuple[int, int]]:
    """All (i, j) where scores[i] − scores[j] ≥ gap: text i is better than text j.

    Args:
        scores: one finite number per text, rating units.
        gap: smallest difference that makes a pair, rating units, above 0.

    Returns:
        Index pairs, ordered by i, then j.

    Raises:
        DataError: the gap is not above 0, so a text would beat itself.
    """
    if not gap > 0:
        raise DataError(f"gap: got {gap!r}; it must be above 0")
    values = np.asarray(scores, dtype=np.float64)
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(values), _BLOCK):
        better = values[start : start + _BLOCK, None] - values[None, :] >= gap
        first, second = np.nonzero(better)
        pairs.extend(zip((first + start).tolist(), second.tolist(), strict=True))
    return pairs


def _number(value: Any, row: int, column: str, field: str) -> float:
    # CSV stores numbers as strings; True is an int to Python but no rating.
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{field}: row {row}, {column!r}: got {value!r}; it must be a number")
    if abs(number) > LARGEST_SCORE:
        allowed = f"within ±{LARGEST_SCORE:g}; correct it or rescale the ratings"
        raise DataError(f"{field}: row {row}, {column!r}: got {value!r}; it must be {allowed}")
    return number


def _numbers(value: Any, row: int, column: str, field: str) -> tuple[float, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        kind = type(value).__name__
        raise DataError(f"{field}: row {row}, {column!r}: got {kind}; it must be a list of numbers")
    return tuple(_number(item, row, column, field) for item in value)
