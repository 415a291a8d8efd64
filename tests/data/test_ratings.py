"""Ratings are read from either column name, and pairs are exactly those at the gap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.data.ratings import Rating, load_ratings, rating_pairs
from tether.errors import DataError

SCORES = st.lists(st.integers(-8, 8).map(lambda n: n / 2), max_size=12)


def test_scores_and_raters_are_read_under_both_names():
    expected = [Rating(text="a", score=1.5, raters=(1.0, 2.0))]
    assert load_ratings([{"text": "a", "score": "1.5", "raters": [1, 2]}], "f") == expected
    assert load_ratings([{"text": "a", "rating": 1.5, "ratings": [1, 2]}], "f") == expected
    assert load_ratings([{"text": "a", "score": 1}], "f") == [Rating(text="a", score=1.0)]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"txt": "a", "score": 1}, r"no column 'text'.*'txt'"),
        ({"text": "a", "points": 1}, "no column 'score'"),
        ({"text": " ", "score": 1}, "row 2, 'text' is empty"),
        ({"text": 3, "score": 1}, "row 2, 'text': got int"),
        ({"text": "a", "score": "good"}, "row 2, 'score': got 'good'"),
        ({"text": "a", "score": float("nan")}, "row 2, 'score': got nan"),
        ({"text": "a", "score": 1e300}, r"row 2, 'score': got 1e\+300; .* within ±1e\+06"),
        ({"text": "a", "score": -2e6}, r"row 2, 'score': got -2000000\.0"),
        ({"text": "a", "score": 1, "raters": [1, 1e7]}, "row 2, 'raters': got 1"),
        ({"text": "a", "score": True}, "row 2, 'score': got True"),
        ({"text": "a", "score": 1, "raters": [1, None]}, "row 2, 'raters': got None"),
        ({"text": "a", "score": 1, "raters": "1 2"}, "row 2, 'raters': got str"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row, part):
    with pytest.raises(DataError, match=part):
        load_ratings([{"text": "ok", "score": 1}, row], "reward.fit")


@given(scores=SCORES, gap=st.sampled_from([0.5, 1.0, 2.5]))
def test_pairs_are_all_that_lie_at_least_the_gap_apart(scores, gap):
    expected = [
        (i, j)
        for i, better in enumerate(scores)
        for j, worse in enumerate(scores)
        if better - worse >= gap
    ]
    assert rating_pairs(scores, gap) == expected


def test_pairs_do_not_depend_on_the_block_size(monkeypatch):
    scores = [float(n % 7) for n in range(50)]
    whole = rating_pairs(scores, 2.0)
    monkeypatch.setattr("tether.data.ratings._BLOCK", 8)
    assert rating_pairs(scores, 2.0) == whole


def test_a_gap_of_zero_is_refused():
    with pytest.raises(DataError, match=r"gap: got 0\.0"):
        rating_pairs([1.0, 2.0], 0.0)
