"""Human judgements of texts in one shape, whether they came as ratings or as preference pairs.

Parts are disjoint by text (ratings) or by prompt (preferences): the reward model is fitted on one,
the judge on another, and both are measured on a third that neither has seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.data.preferences import Preference, load_preferences
from tether.data.ratings import Rating, load_ratings
from tether.data.readers import read_rows
from tether.data.splits import hash_share
from tether.data.vader import MoviePart, movie_part
from tether.errors import DataError

Item = TypeVar("Item")
MOVIE_RATINGS = "builtin:vader-movie-ratings"
SHARES: dict[MoviePart, tuple[float, float]] = {
    "proxy": (0.0, 0.45),
    "judge": (0.45, 0.9),
    "test": (0.9, 1.0),
}
"""Where a text's hash must lie for each part of a file of judgements."""

TEST_TEXTS = 600
"""Most texts that held-out pairs are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgements:
    """Texts and which of them people preferred.

    Attributes:
        texts: what was judged.
        prompts: what it answered; '' for a rating.
        scores: mean ratings; None where only pairs are known.
        pairs: (better, worse) indices into the texts.
        clusters: texts of one cluster are dependent: the text itself, or its prompt.
        rows: each text's row in its source, counted from 1; () or None where it has none.
    """

    texts: tuple[str, ...]
    prompts: tuple[str, ...]
    scores: Float[Tensor, " texts"] | None
    pairs: Int[Tensor, "pairs 2"]
    clusters: Int[Tensor, " texts"]
    rows: tuple[int | None, ...] = ()

    def place(self, index: int) -> str:
        """How a message names a text: by its row, where it has one, and its beginning."""
        text = repr(self.texts[index][:60])
        row = self.rows[index] if self.rows else None
        return text if row is None else f"row {row} ({text})"


def from_ratings(ratings: Sequence[Rating], gap: float) -> Judgements:
    """Ratings become pairs wherever two of them are at least `gap` apart."""
    scores = torch.tensor([rating.score for rating in ratings])
    return Judgements(
        texts=tuple(rating.text for rating in ratings),
        prompts=("",) * len(ratings),
        scores=scores,
        pairs=(scores[:, None] - scores[None, :] >= gap).nonzero(),
        clusters=torch.arange(len(ratings)),
        rows=tuple(rating.row for rating in ratings),
    )


def from_preferences(preferences: Sequence[Preference]) -> Judgements:
    """Each preference is one pair; answers to the same prompt are dependent."""
    known = {prompt: i for i, prompt in enumerate(dict.fromkeys(p.prompt for p in preferences))}
    rows = [(p.prompt, text) for p in preferences for text in (p.chosen, p.rejected)]
    return Judgements(
        texts=tuple(text for _, text in rows),
        prompts=tuple(prompt for prompt, _ in rows),
        scores=None,
        pairs=torch.arange(len(rows)).reshape(-1, 2),
        clusters=torch.tensor([known[prompt] for prompt, _ in rows], dtype=torch.long),
        rows=tuple(p.row for p in preferences for _ in range(2)),
    )


def load_judgements(
    source: str, *, gap: float, max_texts: int, seed: int, render: Callable[[list[dict]], str]
) -> dict[str, Judgements]:
    """Read ratings or preferences and split them into proxy, judge and test.

    Args:
        source: file, datasets name, or builtin:vader-movie-ratings.
        gap: ratings this far apart make a pair, rating units.
        max_texts: most texts of the proxy and of the judge part, drawn at random.
        seed: of the draw.
        render: puts a list of messages into the model's words.

    Raises:
        DataError: nothing usable, or a part without a single pair.
    """
    field = "reward.fit"
    if source == MOVIE_RATINGS:
        most = {"proxy": max_texts, "judge": max_texts, "test": TEST_TEXTS}
        rows = {p: from_ratings(_draw(movie_part(p), most[p], seed), gap) for p in SHARES}
    else:
        rows = _from_file(source, field, gap=gap, max_texts=max_texts, seed=seed, render=render)
    for part, judged in rows.items():
        if not len(judged.pairs):
            raise DataError(
                f"{field}: {source!r} leaves no pair in its {part} part "
                f"({len(judged.texts)} texts, gap {gap}); give more data or a smaller reward.gap"
            )
    return rows


def _from_file(
    source: str,
    field: str,
    *,
    gap: float,
    max_texts: int,
    seed: int,
    render: Callable[[list[dict]], str],
) -> dict[str, Judgements]:
    """Judgements of a file, told apart by its columns: chosen and rejected, or text and score."""
    rows = read_rows(source, field)
    if {"chosen", "rejected"} <= set(rows[0]):
        preferences = load_preferences(rows, field, render)
        return {
            part: from_preferences(
                _draw(
                    [p for p in preferences if low <= hash_share(p.prompt) < high], max_texts, seed
                )
            )
            for part, (low, high) in SHARES.items()
        }
    ratings = load_ratings(rows, field)
    return {
        part: from_ratings(
            _draw([r for r in ratings if low <= hash_share(r.text) < high], max_texts, seed), gap
        )
        for part, (low, high) in SHARES.items()
    }


def _draw(items: Sequence[Item], most: int, seed: int) -> list[Item]:
    """At most this many items, drawn without replacement; order kept."""
    chosen = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))[:most]
    return [items[i] for i in sorted(chosen.tolist())]
