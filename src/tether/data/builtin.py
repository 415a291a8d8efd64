"""Sources that need no file: `builtin:` names, and the one door to any source.

To add one, write a function without arguments that returns rows and name it in `_SOURCES`.
"""

import difflib
from collections.abc import Callable

from tether.data.readers import Row, read_rows
from tether.data.vader import movie_part
from tether.errors import DataError

_WHO = (
    "Alice", "The little dog", "The Queen", "An old man", "The white cat", "My sister",
    "The King", "A small bird", "The two children", "The Mouse", "A young girl", "The gardener",
    "The fish", "Her mother", "The Rabbit", "A very tall boy",
)  # fmt: skip
_HOW = (
    "was", "looked at the", "said that", "went to", "thought of", "had never", "began to",
    "could not",
)  # fmt: skip

GLASSLLM_PROMPTS: tuple[str, ...] = tuple(f"{who} {how}" for who in _WHO for how in _HOW)
"""Story openings of three to six short words, enough for 64 held-out prompts and as many more."""


def _story_prompts() -> list[Row]:
    return [{"prompt": text} for text in GLASSLLM_PROMPTS]


def _movie_prompts() -> list[Row]:
    return [{"prompt": rating.text} for rating in movie_part("prompts")]


def _movie_ratings() -> list[Row]:
    # Only the proxy part: the judge must not share a text with the reward model.
    return [
        {"text": rating.text, "score": rating.score, "raters": list(rating.raters)}
        for rating in movie_part("proxy")
    ]


_SOURCES: dict[str, Callable[[], list[Row]]] = {
    "builtin:glassllm-prompts": _story_prompts,
    "builtin:vader-movie-prompts": _movie_prompts,
    "builtin:vader-movie-ratings": _movie_ratings,
}


def read_source(source: str, field: str) -> list[Row]:
    """Read the rows of a built-in source, a local file or a `datasets` hub name.

    Args:
        source: as in the recipe.
        field: the option that named the source, for messages.

    Raises:
        DataError: the source is unknown, missing, empty or damaged.
    """
    if not source.startswith("builtin:"):
        return read_rows(source, field)
    if source not in _SOURCES:
        near = difflib.get_close_matches(source, list(_SOURCES), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        allowed = ", ".join(_SOURCES)
        raise DataError(f"{field}: got {source!r}; the built-in sources are {allowed}{hint}")
    return _SOURCES[source]()
