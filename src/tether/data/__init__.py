"""Where texts enter: prompts, ratings and preferences, from files, the hub or built-in sources.

In flows a source name from the recipe, out flow frozen rows (`Prompt`, `Rating`, `Preference`).
Every row is checked here once, and a bad one is named; nothing is repaired or dropped unsaid.
Scores and models are deliberately absent: this room knows texts and tokens only.
"""

from tether.data.builtin import read_source
from tether.data.cache import cache_dir
from tether.data.preferences import Preference, load_preferences
from tether.data.prompts import (
    Prompt,
    PromptSet,
    load_prompts,
    prompt_batch,
    render_messages,
    step_prompts,
)
from tether.data.ratings import Rating, load_ratings, rating_pairs
from tether.data.readers import read_rows
from tether.data.vader import movie_part

__all__ = [
    "Preference",
    "Prompt",
    "PromptSet",
    "Rating",
    "cache_dir",
    "load_preferences",
    "load_prompts",
    "load_ratings",
    "movie_part",
    "prompt_batch",
    "rating_pairs",
    "read_rows",
    "read_source",
    "render_messages",
    "step_prompts",
]
