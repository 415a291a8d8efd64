"""Diversity on hand-counted texts and against slow loops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.errors import ConfigError
from tether.guard.diversity import distinct_n, top_ngram, words

TEXTS = st.lists(st.lists(st.sampled_from("abc"), max_size=8).map(" ".join), max_size=6)


def test_words_are_lower_case_without_punctuation():
    assert words("Don’t stop -- the Café's 2nd_act, 'really'!") == [
        "don’t", "stop", "the", "café's", "2nd", "act", "really",
    ]  # fmt: skip


def test_distinct_counts_across_texts_and_never_over_their_border():
    assert distinct_n(["a b a b", "b c"], 2) == pytest.approx(3 / 4, rel=0, abs=1e-12)
    assert distinct_n(["a b", "c d"], 1) == 1.0


def test_the_commonest_ngram_counts_texts_not_repetitions():
    assert top_ngram(["so so so so so", "a b c", "x a b c"]) == ("a b c", 2)
    assert top_ngram(["b c d", "a c d"]) == ("a c d", 1)


def test_texts_without_words_have_defined_values():
    for texts in ([], [""], ["?!"], ["one"]):
        assert distinct_n(texts, 2) == 0.0
        assert top_ngram(texts, 2) == ("", 0)


def test_zero_words_are_refused():
    with pytest.raises(ConfigError, match="n: got 0"):
        distinct_n(["a"], 0)


@given(texts=TEXTS, n=st.integers(1, 3))
def test_both_agree_with_a_slow_count(texts, n):
    seen, total, holders = [], 0, {}
    for number, text in enumerate(texts):
        found = text.split()
        for start in range(len(found) - n + 1):
            gram = " ".join(found[start : start + n])
            total += 1
            if gram not in seen:
                seen.append(gram)
            holders.setdefault(gram, set()).add(number)
    expected = len(seen) / total if total else 0.0
    assert distinct_n(texts, n) == pytest.approx(expected, rel=0, abs=1e-12)
    gram, count = top_ngram(texts, n)
    assert count == max(map(len, holders.values()), default=0)
    assert not holders or len(holders[gram]) == count


@given(texts=TEXTS, n=st.integers(1, 3))
def test_the_order_of_texts_does_not_matter_and_repeating_them_halves_it(texts, n):
    once = distinct_n(texts, n)
    assert 0.0 <= once <= 1.0
    assert distinct_n(texts[::-1], n) == once
    assert distinct_n(texts * 2, n) == pytest.approx(once / 2, rel=0, abs=1e-12)
