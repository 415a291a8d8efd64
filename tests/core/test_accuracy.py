"""Pair accuracy: ties, and intervals that stay honest for few pairs."""

import math

import pytest
import torch

from tether.core.accuracy import pair_accuracy


def chain(count: int, wrong: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Disjoint pairs of texts, all but some ordered rightly."""
    scores = torch.tensor([1.0, 0.0] * (count - wrong) + [0.0, 1.0] * wrong)
    return scores, torch.arange(2 * count).reshape(-1, 2)


def test_ties_count_half():
    pairs = torch.tensor([[0, 1], [1, 2], [2, 0]])
    found = pair_accuracy(torch.tensor([2.0, 1.0, 1.0]), pairs, clusters=torch.arange(3))
    assert found.accuracy == 0.5
    assert found.pairs == 3


@pytest.mark.parametrize("count", [1, 2, 3, 10, 19, 20, 300])
@pytest.mark.parametrize("wrong", [0, 1])
def test_the_interval_is_finite_and_covers_the_rate(count, wrong):
    scores, pairs = chain(count, wrong)
    found = pair_accuracy(scores, pairs, clusters=torch.arange(2 * count))
    low, high = found.interval
    assert 0 <= low <= found.accuracy <= high <= 1


def test_few_pairs_have_wilsons_interval_and_never_one_without_width():
    """3 right of 3: from 1 / (1 + 1.96²/3) to 1."""
    scores, pairs = chain(3)
    found = pair_accuracy(scores, pairs, clusters=torch.arange(6))
    assert math.isclose(found.interval[0], 1 / (1 + 1.96**2 / 3), rel_tol=1e-9)
    assert found.interval[1] == 1
    triangle = torch.tensor([[0, 1], [0, 2], [1, 2]])
    shared = pair_accuracy(torch.tensor([2.0, 1.0, 0.0]), triangle, clusters=torch.arange(3))
    assert shared.interval[0] < found.interval[0]  # three texts say less than six


def test_pairs_that_share_one_text_count_as_two():
    pairs = torch.stack([torch.zeros(500, dtype=torch.long), torch.arange(1, 501)], dim=1)
    scores = torch.cat([torch.ones(1), torch.zeros(500)])
    found = pair_accuracy(scores, pairs, clusters=torch.arange(501))
    assert found.interval[0] < 0.4


def test_pairs_of_one_prompt_count_as_one():
    scores, pairs = chain(40)
    one = pair_accuracy(scores, pairs, clusters=torch.zeros(80, dtype=torch.long))
    assert math.isclose(one.interval[0], 1 / (1 + 1.96**2), rel_tol=1e-9)
    apart = pair_accuracy(scores, pairs, clusters=torch.arange(40).repeat_interleave(2))
    assert apart.interval[0] > one.interval[0]


def test_many_pairs_all_alike_still_have_a_width():
    scores, pairs = chain(300)
    low, high = pair_accuracy(scores, pairs, clusters=torch.arange(600)).interval
    assert 0.98 < low < 0.99
    assert high == 1


def test_many_pairs_are_resampled():
    """The bootstrap of 100 disjoint pairs, 30 of them wrong, is near the binomial's interval."""
    scores, pairs = chain(100, 30)
    low, high = pair_accuracy(scores, pairs, clusters=torch.arange(200)).interval
    assert 0.45 < low < 0.65
    assert 0.75 < high < 0.92
