"""Training without noise: every gradient is the production loss's expectation over all responses.

A run of this kind shows what an objective asks for; what sampling adds to it is left out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.exact.enumerate import Table, expectation, kl, read_table, visits
from tether.exact.gradients import expected_gradient
from tether.exact.languages import Language
from tether.exact.placements import shipped
from tether.exact.tree import Tree

LEAST_CHANCE = 1e-200
"""A choice less likely than this is not moved any more."""
LEAST_LOGPROB = -200.0
"""Log-probabilities stay above this, so that a collapse stays finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained: a language and the reward on it.

    Attributes:
        reference: where training starts, and what holds it.
        scores: reward of each response, reward units.
        tree: the language.
    """

    reference: Table
    scores: Float[Tensor, " sequences"]
    tree: Tree

    def mean(self, values: Float[Tensor, " sequences"], policy: Table) -> float:
        """E over responses of the policy."""
        return expectation(values, policy, self.tree).item()

    def reward(self, policy: Table) -> float:
        """E[r], reward units."""
        return self.mean(self.scores, policy)

    def kl(self, policy: Table) -> float:
        """KL(π‖π_ref), nats per response."""
        return kl(policy, self.reference, self.tree).item()


def task_of(language: Language) -> Task:
    """The language's own reference and reward."""
    reference = read_table(language.reference, language.tree, prompt=language.prompt)
    return Task(reference=reference, scores=language.rewards, tree=language.tree)


def natural_direction(policy: Table, task: Task, *, kl_coef: float) -> Table:
    """The natural gradient of the shipped loss, k1 in the reward and γ = 1: the exact advantage.

        −E[∇loss] / (P(s) π(a|s))

    Args:
        policy: log π at each prefix.
        task: the language and its reward.
        kl_coef: β, reward per nat.
    """
    slope = expected_gradient(
        shipped(), policy, task.reference, task.tree, scores=task.scores, kl_coef=kl_coef
    )
    chance = visits(policy, task.tree)[:, None] * policy.exp()
    return torch.where(chance > LEAST_CHANCE, -slope / chance, 0.0)


def moved(policy: Table, direction: Table, rate: float) -> Table:
    """The policy after a step of this size."""
    logits = (policy + rate * direction).log_softmax(dim=-1)
    return logits.clamp(min=LEAST_LOGPROB).log_softmax(dim=-1)


def natural_step(policy: Table, task: Task, *, kl_coef: float, rate: float) -> Table:
    """One natural-gradient step; `rate` is the change of a logit per unit of advantage."""
    return moved(policy, natural_direction(policy, task, kl_coef=kl_coef), rate)


def ascend(task: Task, *, kl_coef: float, rate: float, steps: int) -> list[Table]:
    """The reference and the policy after each step."""
    path = [task.reference]
    for _ in range(steps):
        path.append(natural_step(path[-1], task, kl_coef=kl_coef, rate=rate))
    return path
