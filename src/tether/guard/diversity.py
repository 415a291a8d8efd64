"""How varied a set of texts is: different word n-grams, and the commonest one.

Collapse shows here before it shows in the reward. Pure Python on texts; models are absent.
"""

import re
from collections import Counter

from tether.checks import require

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def words(text: str) -> list[str]:
    """Lower-cased runs of letters and digits; an apostrophe inside a word belongs to it."""
    return _WORD.findall(text.lower())


def distinct_n(texts: list[str], n: int) -> float:
    """Different n-grams over all n-grams, counted across all texts together, in [0, 1].

    An n-gram never spans two texts. Where no text has n words the value is 0: a policy that has
    fallen silent is not varied.

    Source:
        Li et al. 2016, arXiv:1510.03055, section 5.2 (distinct-1 and distinct-2).
    """
    grams = [gram for text in texts for gram in _ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def top_ngram(texts: list[str], n: int = 3) -> tuple[str, int]:
    """The n-gram found in most texts and how many texts hold it; ("", 0) where there is none.

    A text counts once however often it repeats the n-gram. Among equals the first in
    alphabetical order is returned.
    """
    counts = Counter(gram for text in texts for gram in set(_ngrams(text, n)))
    if not counts:
        return "", 0
    gram, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return " ".join(gram), count


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    require(n >= 1, "n", n, "1 or more words")
    found = words(text)
    return [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]
