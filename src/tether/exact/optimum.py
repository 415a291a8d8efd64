"""The best a policy can do: max E[r] − β KL(π‖π_ref) on all responses, solved exactly.

    V(s) = β log Σₐ π_ref(a|s) exp(V(s′)/β),   V(whole response) = r
    π*(a|s) = π_ref(a|s) exp((V(s′) − V(s))/β),   J* = V(start) = β log Z

and what follows from it: best-of-n, implicit rewards, realignment without training.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.exact.enumerate import Table, expectation, kl_by_states, sequence_logprobs
from tether.exact.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the reward-against-KL plane.

    Attributes:
        kl_coef: β that it is optimal for, reward per nat.
        reward: E[r], reward units.
        kl: KL(π‖π_ref), nats per response.
    """

    kl_coef: float
    reward: float
    kl: float

    @property
    def objective(self) -> float:
        """J = E[r] − β KL, reward units."""
        return self.reward - self.kl_coef * self.kl


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The optimal policy of a tree language.

    Attributes:
        policy: π* as a table.
        values: V*(s) before the next token, reward units.
        point: its reward and KL.
    """

    policy: Table
    values: Float[Tensor, " prefixes"]
    point: Point


@torch.no_grad()
def optimum(
    reference: Table, rewards: Float[Tensor, " sequences"], tree: Tree, *, kl_coef: float
) -> Optimum:
    """Solve by soft value iteration, from the last token to the first.

    Args:
        reference: log π_ref at each prefix.
        rewards: r of each response, reward units.
        tree: the language.
        kl_coef: β > 0, reward per nat.
    """
    values = torch.zeros_like(reference[:, 0])
    after = torch.zeros_like(reference)
    for span in reversed(tree.spans):
        ends = tree.ends[span]
        after[span] = torch.where(ends >= 0, rewards[ends], values[tree.next_prefix[span]])
        values[span] = kl_coef * (reference[span] + after[span] / kl_coef).logsumexp(dim=-1)
    policy = reference + (after - values[:, None]) / kl_coef
    point = Point(
        kl_coef=kl_coef,
        reward=expectation(rewards, policy, tree).item(),
        kl=kl_by_states(policy, reference, tree).item(),
    )
    return Optimum(policy=policy, values=values, point=point)


def gibbs(
    reference: Float[Tensor, " sequences"], rewards: Float[Tensor, " sequences"], *, kl_coef: float
) -> Float[Tensor, " sequences"]:
    """log π*(y) = log π_ref(y) + r(y)/β − log Z: the same optimum by brute force."""
    return (reference + rewards / kl_coef).log_softmax(dim=0)


def divergence(
    first: Float[Tensor, " sequences"], second: Float[Tensor, " sequences"]
) -> Float[Tensor, ""]:
    """KL(first‖second) of two distributions given as log-probabilities of all responses."""
    return torch.where(first > -math.inf, first.exp() * (first - second), 0.0).sum()


def implicit_rewards(
    policy: Table, reference: Table, tree: Tree, *, kl_coef: float
) -> Float[Tensor, " sequences"]:
    """β log π(y)/π_ref(y): at the optimum r(y) − β log Z, so its differences are r's.

    Source:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 5.
    """
    return kl_coef * (sequence_logprobs(policy, tree) - sequence_logprobs(reference, tree))


def realigned(policy: Table, reference: Table, *, scale: float) -> Table:
    """Mix next-token log-probabilities: π_λ(a|s) ∝ π_ref(a|s)^(1−λ) π(a|s)^λ.

    Exact for responses of one token; for longer ones an approximation of the optimum at β/λ.

    Source:
        Liu et al. 2024, arXiv:2402.02992.
    """
    return torch.lerp(reference, policy, scale).log_softmax(dim=-1)


def realigned_sequences(
    policy: Float[Tensor, " sequences"], reference: Float[Tensor, " sequences"], *, scale: float
) -> Float[Tensor, " sequences"]:
    """Mix log-probabilities of whole responses: exactly the optimum at β/λ (same source)."""
    return torch.lerp(reference, policy, scale).log_softmax(dim=0)


def best_of_n(
    reference: Float[Tensor, " sequences"], rewards: Float[Tensor, " sequences"], *, n: int
) -> Float[Tensor, " sequences"]:
    """log-probability that each response is the best of n drawn from π_ref, ties drawn by lot.

    P(y) = π_ref(y)/q(r) · (F(r)ⁿ − F(r−)ⁿ),   q(r), F(r): mass at, and up to, the reward of y
    """
    levels, level = torch.unique(rewards, return_inverse=True)
    mass = reference.new_zeros(len(levels)).index_add(0, level, reference.exp())
    up_to = mass.cumsum(dim=0) / mass.sum()
    below = torch.cat([up_to.new_zeros(1), up_to[:-1]])
    won = (up_to**n - below**n).log()
    return reference - mass.log()[level] + won[level]


def best_of_n_bound(n: int) -> float:
    """log n − (n−1)/n: an upper bound on best-of-n's KL, reached where no response is likely.

    Source:
        Beirami et al. 2024, arXiv:2401.01879, theorem 3.1.
    """
    return math.log(n) - (n - 1) / n
