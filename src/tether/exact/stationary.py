"""The best stationary bigram policy: what a bigram model trained by RL can reach at most.

The optimum may change its law from step to step; a bigram model cannot. No formula gives its best
law, so J is maximised by exact gradients from several starts and the best end is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.exact import markov
from tether.exact.markov import Chain
from tether.exact.optimum import Point

FALLBACK = 1e-12
"""Weight of a state that is never visited, so that averaging its laws is defined."""
BOUND = 60.0
"""Logits live within this of 0; beyond it a token's probability is 0 in every digit that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StationaryOptimum:
    """The best stationary policy found.

    Attributes:
        policy: next-token log-probabilities after each token.
        point: its reward and KL.
        gap: J* − J, what being stationary costs, reward units; β KL(π‖π*), never negative.
    """

    policy: Float[Tensor, "prev vocab"]
    point: Point
    gap: float


def best_stationary(
    reference: Chain, token_rewards: Float[Tensor, " vocab"], *, start: int, kl_coef: float
) -> StationaryOptimum:
    """Maximise E[r] − β KL over stationary policies.

    Quasi-Newton steps from the reference alone can stop at a worse local maximum, so the laws of
    the unrestricted optimum, averaged over steps and as it is at the first, are starts too.

    Args:
        reference: the reference chain.
        token_rewards: reward of each token.
        start: the token before the first step.
        kl_coef: β, reward per nat.
    """
    best = markov.optimum(reference, token_rewards, start=start, kl_coef=kl_coef)
    length = len(reference)
    ends = []
    for first in _starts(reference, best.policy, start):
        law = _climb(first, reference, token_rewards, start=start, kl_coef=kl_coef)
        chain = markov.stationary(law, length=length)
        point = markov.point(chain, reference, token_rewards, start=start, kl_coef=kl_coef)
        ends.append((point.objective, law, point))
    objective, law, point = max(ends, key=lambda end: end[0])
    return StationaryOptimum(policy=law, point=point, gap=best.point.objective - objective)


def _starts(reference: Chain, best: Chain, start: int) -> Iterator[Float[Tensor, "prev vocab"]]:
    """The reference, the optimum averaged over its visits, and the optimum's first law."""
    yield reference[0]
    reached = markov.visits(best, start=start) + FALLBACK
    yield torch.einsum("ts,tsv->sv", reached / reached.sum(dim=0), best.exp()).log()
    yield best[0]


def _climb(
    first: Float[Tensor, "prev vocab"],
    reference: Chain,
    token_rewards: Float[Tensor, " vocab"],
    *,
    start: int,
    kl_coef: float,
) -> Float[Tensor, "prev vocab"]:
    """Exact gradient ascent by L-BFGS from one law to a local maximum."""
    logits = first.clamp(-BOUND).clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=200, history_size=30, tolerance_grad=1e-9, tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Float[Tensor, ""]:
        optimizer.zero_grad()
        chain = markov.stationary(logits.log_softmax(dim=-1), length=len(reference))
        lost = -markov.objective(chain, reference, token_rewards, start=start, kl_coef=kl_coef)
        lost.backward()
        return lost

    optimizer.step(loss)  # type: ignore[arg-type]
    return logits.detach().log_softmax(dim=-1)
