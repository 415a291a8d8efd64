"""The word judge solves its equations, orders unseen texts, and is saved without loss."""

import math

import pytest
import torch
from safetensors.torch import save_file

from tether.errors import CheckpointError, DataError
from tether.models.word_judge import (
    _features_of,
    fit_word_judge,
    fit_word_judge_pairs,
    load_word_judge,
    save_word_judge,
)

GOOD, BAD = ("great", "lovely", "brilliant"), ("dull", "awful", "boring")
THINGS = ("plot", "cast", "music", "ending", "scene")
TEXTS = [f"a {word} {thing}" for word in (*GOOD, *BAD) for thing in THINGS]
SCORES = [2.0 + 0.1 * n for n in range(15)] + [-2.0 - 0.1 * n for n in range(15)]


def test_words_pairs_and_beginnings_are_the_features():
    expected = {"a", "really", "day", "a really", "really day", "4:real", "5:reall"}
    assert _features_of("A really -- DAY!") == expected


def dense(judge, texts):
    """The matrix of scaled idf, by loops over the definition."""
    matrix = torch.zeros(len(texts), len(judge.index), dtype=torch.float64)
    for row, text in enumerate(texts):
        for feature in _features_of(text):
            holders = sum(feature in _features_of(other) for other in texts)
            matrix[row, judge.index[feature]] = math.log((1 + len(texts)) / (1 + holders)) + 1
        matrix[row] /= matrix[row].norm()
    return matrix


def test_the_ridge_fit_is_the_solution_of_the_normal_equations():
    judge = fit_word_judge(TEXTS, SCORES, ridge=0.5)
    matrix = dense(judge, TEXTS)
    target = torch.tensor(SCORES, dtype=torch.float64)
    target = target - target.mean()
    square = matrix.T @ matrix + 0.5 * torch.eye(matrix.shape[1], dtype=torch.float64)
    expected = torch.linalg.solve(square, matrix.T @ target)
    torch.testing.assert_close(judge.weights, expected, rtol=1e-6, atol=1e-8)
    scores = torch.tensor(judge.score(TEXTS), dtype=torch.float64)
    by_hand = matrix @ expected + sum(SCORES) / len(SCORES)
    torch.testing.assert_close(scores, by_hand, rtol=1e-6, atol=1e-8)


def test_the_pair_fit_has_no_gradient_left():
    chosen, rejected = TEXTS[:15], TEXTS[15:]
    judge = fit_word_judge_pairs(chosen, rejected, ridge=0.5)
    matrix = dense(judge, [*chosen, *rejected])
    difference = matrix[:15] - matrix[15:]
    margin = difference @ judge.weights
    gradient = -(difference.T @ torch.sigmoid(-margin)) + 0.5 * judge.weights
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)
    gaps = torch.tensor(judge.score(chosen)) - torch.tensor(judge.score(rejected))
    assert bool((gaps > 0).all())


def test_unseen_texts_are_ordered_by_their_known_words():
    rated = fit_word_judge(TEXTS, SCORES)
    paired = fit_word_judge_pairs(TEXTS[:15], TEXTS[15:])
    for judge in (rated, paired):
        good, bad, inflected = judge.score(["great script", "an awful script", "boringly long"])
        assert good > bad
        assert good > inflected


def test_a_score_does_not_depend_on_the_other_texts_and_unknown_words_give_the_bias():
    judge = fit_word_judge(TEXTS, SCORES)
    alone = [judge.score([text])[0] for text in TEXTS]
    assert judge.score(TEXTS) == alone
    assert judge.score(["", "zzz", "?!"]) == [judge.bias] * 3
    assert judge.score([]) == []


def test_loaded_scores_equal_the_saved_ones_exactly(tmp_path):
    judge = fit_word_judge(TEXTS, SCORES)
    save_word_judge(judge, tmp_path / "run" / "judge")
    loaded = load_word_judge(tmp_path / "run" / "judge")
    probe = [*TEXTS, "great but dull ending", ""]
    assert loaded.score(probe) == judge.score(probe)
    files = [file.name for file in (tmp_path / "run" / "judge").iterdir()]
    assert files == ["judge.safetensors"]


def test_a_folder_without_a_whole_judge_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no judge\.safetensors"):
        load_word_judge(tmp_path)
    path = tmp_path / "judge.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        load_word_judge(tmp_path)
    save_file({"weights": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="holds something else"):
        load_word_judge(tmp_path)


@pytest.mark.parametrize(
    ("texts", "scores", "part"),
    [
        (["a", "b"], [1.0], "each needs one finite score"),
        (["a", "b"], [1.0, math.nan], "each needs one finite score"),
        (["a", "b"], [1.0, 1.0], "all scores are the same"),
        (["?", "!"], [1.0, 2.0], "hold no word"),
    ],
)
def test_ratings_that_cannot_be_fitted_are_refused(texts, scores, part):
    with pytest.raises(DataError, match=part):
        fit_word_judge(texts, scores)


def test_pairs_that_cannot_be_fitted_are_refused():
    for chosen, rejected in (([], []), (["a"], [])):
        with pytest.raises(DataError, match="one of each per pair"):
            fit_word_judge_pairs(chosen, rejected)
