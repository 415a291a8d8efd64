"""A judge that differs in kind from a language model: a linear score of the words in a text.

It reads words, word pairs and word beginnings, and shares neither weights nor features with the
policy or the reward model, so what fools a neural reward is unlikely to fool it the same way.
Fitted on ratings (ridge regression) or on preference pairs (Bradley-Terry). Hidden states and
prompts are deliberately absent.

    score(x) = bias + Σ_f w_f v_f(x),    v(x) = idf over the features in x, scaled to length 1
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tether.errors import CheckpointError, DataError

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_BEGINNINGS = (4, 5, 6)  # letters; a cheap stem: "disappoint" and "disappointing" share them
_FORMAT = "tether-word-judge-1"
_FILE = "judge.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Features:
    """A sparse matrix [text, feature] as three flat lists; each row has length 1 or is empty."""

    rows: Int[Tensor, " entries"]
    columns: Int[Tensor, " entries"]
    values: Float[Tensor, " entries"]
    texts: int

    def times(self, weights: Float[Tensor, " features"]) -> Float[Tensor, " texts"]:
        """Each text's weighted sum."""
        zero = torch.zeros(self.texts, dtype=weights.dtype)
        return zero.index_add(0, self.rows, self.values * weights[self.columns])

    def transposed_times(
        self, scores: Float[Tensor, " texts"], *, features: int
    ) -> Float[Tensor, " features"]:
        """Each feature's sum over texts."""
        zero = torch.zeros(features, dtype=scores.dtype)
        return zero.index_add(0, self.columns, self.values * scores[self.rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WordJudge:
    """A fitted judge.

    Attributes:
        index: column of each feature.
        idf: inverse document frequency of each column, no unit.
        weights: weight of each column, score units.
        bias: the score of a text in which no feature is known, score units.
    """

    index: Mapping[str, int]
    idf: Float[Tensor, " features"]
    weights: Float[Tensor, " features"]
    bias: float

    def score(self, texts: Sequence[str]) -> list[float]:
        """One number per text, higher is better; it does not depend on the other texts."""
        features = _vectorise(texts, self.index, self.idf)
        return (features.times(self.weights) + self.bias).tolist()


def save_word_judge(judge: WordJudge, folder: Path) -> None:
    """Write one file; features and bias are JSON in its header, so one rename makes it whole."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {"format": _FORMAT, "bias": judge.bias, "features": list(judge.index)}
    tensors = {"idf": judge.idf, "weights": judge.weights}
    aside = folder / f"{_FILE}.writing"
    save_file(tensors, aside, metadata={"judge": json.dumps(header)})
    aside.replace(folder / _FILE)


def load_word_judge(folder: Path) -> WordJudge:
    """Read what `save_word_judge` wrote; the scores are the same numbers.

    Raises:
        CheckpointError: the file is missing, damaged or holds something else.
    """
    path = folder / _FILE
    if not path.is_file():
        raise CheckpointError(f"word judge: got {str(folder)!r}; it holds no {_FILE}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("judge", "{}"))
            if header.get("format") != _FORMAT:
                raise CheckpointError(f"word judge: {str(path)!r} holds something else; fit again")
            idf, weights = file.get_tensor("idf"), file.get_tensor("weights")
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"word judge: {str(path)!r} is damaged ({error})") from error
    index = {feature: column for column, feature in enumerate(header["features"])}
    return WordJudge(index=index, idf=idf, weights=weights, bias=header["bias"])


def fit_word_judge(
    texts: Sequence[str], scores: Sequence[float], *, ridge: float = 1.0
) -> WordJudge:
    """Fit to rated texts by ridge regression on the scores' deviation from their mean.

        w = argmin ‖V w − (s − s̄)‖² + ridge ‖w‖²

    The score of each text stays the target, not pairs: both order unseen texts equally well and
    this one has the ratings' unit.

    Args:
        texts: rated texts.
        scores: one finite rating per text; its unit becomes the judge's.
        ridge: penalty, above 0.

    Raises:
        DataError: lengths differ, or the scores are all the same or not finite.
    """
    target = torch.tensor(scores, dtype=torch.float64)
    if len(texts) != len(scores) or not bool(target.isfinite().all()):
        raise DataError(f"word judge: got {len(texts)} texts; each needs one finite score")
    if len(texts) < 2 or bool((target == target[0]).all()):
        raise DataError("word judge: all scores are the same; give texts that differ in score")
    index, idf = _count_features(texts)
    features = _vectorise(texts, index, idf)
    weights = _solve_ridge(features, target - target.mean(), features=len(index), ridge=ridge)
    return WordJudge(index=index, idf=idf, weights=weights, bias=float(target.mean()))


def fit_word_judge_pairs(
    chosen: Sequence[str], rejected: Sequence[str], *, ridge: float = 1.0
) -> WordJudge:
    """Fit to preference pairs by the Bradley-Terry likelihood.

        w = argmin Σ −log σ(score(chosen) − score(rejected)) + ridge/2 ‖w‖²

    Args:
        chosen: the preferred text of each pair.
        rejected: the other text of each pair.
        ridge: penalty, above 0.

    Returns:
        A judge whose score differences are log-odds of being preferred; its bias is 0.

    Raises:
        DataError: lengths differ or there is no pair.
    """
    if len(chosen) != len(rejected) or not chosen:
        got = f"{len(chosen)} chosen and {len(rejected)} rejected"
        raise DataError(f"word judge: got {got} texts; it needs one of each per pair")
    index, idf = _count_features([*chosen, *rejected])
    better, worse = _vectorise(chosen, index, idf), _vectorise(rejected, index, idf)
    weights = torch.zeros(len(index), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=100, history_size=10, line_search_fn="strong_wolfe"
    )

    def loss() -> Float[Tensor, ""]:
        optimizer.zero_grad()
        margin = better.times(weights) - worse.times(weights)
        total = torch.nn.functional.softplus(-margin).sum() + ridge / 2 * weights @ weights
        total.backward()
        return total

    optimizer.step(loss)
    return WordJudge(index=index, idf=idf, weights=weights.detach(), bias=0.0)


def _features_of(text: str) -> set[str]:
    """Words, pairs "a b" and beginnings "4:disa"; a space or colon never occurs in a word."""
    words = _WORD.findall(text.lower())
    pairs = {f"{first} {second}" for first, second in pairwise(words)}
    begins = {f"{n}:{word[:n]}" for word in words for n in _BEGINNINGS if len(word) > n}
    return set(words) | pairs | begins


def _count_features(texts: Sequence[str]) -> tuple[dict[str, int], Float[Tensor, " features"]]:
    """The features' columns and their idf, log((1 + texts)/(1 + texts with f)) + 1."""
    counts = Counter(feature for text in texts for feature in _features_of(text))
    if not counts:
        raise DataError("word judge: the texts hold no word; it can only be fitted on words")
    index = {feature: column for column, feature in enumerate(sorted(counts))}
    idf = [math.log((1 + len(texts)) / (1 + counts[feature])) + 1 for feature in index]
    return index, torch.tensor(idf, dtype=torch.float64)


def _vectorise(
    texts: Sequence[str], index: Mapping[str, int], idf: Float[Tensor, " features"]
) -> _Features:
    """The idf of each text's known features, scaled to Euclidean length 1 per text."""
    rows: list[int] = []
    columns: list[int] = []
    for row, text in enumerate(texts):
        # Sorted: a sum in one fixed order gives the same last bit in every process.
        known = sorted(index[feature] for feature in _features_of(text) if feature in index)
        rows += [row] * len(known)
        columns += known
    at_row = torch.tensor(rows, dtype=torch.long)
    at_column = torch.tensor(columns, dtype=torch.long)
    values = idf[at_column]
    squares = torch.zeros(len(texts), dtype=idf.dtype).index_add(0, at_row, values.square())
    return _Features(
        rows=at_row, columns=at_column, values=values / squares.sqrt()[at_row], texts=len(texts)
    )


def _solve_ridge(
    matrix: _Features, target: Float[Tensor, " texts"], *, features: int, ridge: float
) -> Float[Tensor, " features"]:
    """Solve (VᵀV + ridge I) w = Vᵀs by conjugate gradients, to a residual of 1e-8 of the start."""
    weights = torch.zeros(features, dtype=target.dtype)
    residual = matrix.transposed_times(target, features=features)
    direction = residual
    square = start = residual @ residual
    for _ in range(1000):
        if bool(square <= 1e-16 * start):
            return weights
        image = matrix.transposed_times(matrix.times(direction), features=features)
        image = image + ridge * direction
        length = square / (direction @ image)
        weights = weights + length * direction
        residual = residual - length * image
        square, before = residual @ residual, square
        direction = residual + square / before * direction
    raise DataError(f"word judge: the fit with ridge {ridge} did not converge; raise ridge")
