"""Each estimator's values and each placement's gradient and end, on the two-letter language."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.core.kl import k1, k2, k3
from tether.exact.enumerate import Table as Policy
from tether.exact.enumerate import expectation, objective, rao_blackwell, read_table
from tether.exact.enumerate import kl as sequence_kl
from tether.exact.gradients import fixed_point, gradient_row
from tether.exact.languages import letters
from tether.exact.optimum import Point
from tether.exact.placements import PENALTIES, PLACEMENTS, Placement
from tether.exact.tree import Tree, gather

KL_COEF = 0.5
STEPS = 150
"""Of training; what is left of the way falls by 15 % a step."""

Values = Float[Tensor, " sequences"]
Estimate = Callable[[Float[Tensor, "*batch"]], Float[Tensor, "*batch"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a placement does.

    Attributes:
        placement: estimator and place.
        error: |E[gradient] − ∇KL| / |∇KL|.
        cosine: with ∇KL; 0 where there is no gradient.
        variance: of one answer's gradient.
        point: where training ends.
        lost: J* − J there, reward units.
    """

    placement: Placement
    error: float
    cosine: float
    variance: float
    point: Point
    lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The language as tables."""

    tree: Tree
    rewards: Values
    reference: Policy
    policy: Policy


def setting() -> Setting:
    """The two-letter language with its reference and a policy beside it."""
    language = letters()
    tree = language.tree
    tables = [
        read_table(lm, tree, prompt=language.prompt)
        for lm in (language.reference, language.others["policy"])
    ]
    return Setting(tree=tree, rewards=language.rewards, reference=tables[0], policy=tables[1])


def estimates(given: Setting) -> dict[str, Values]:
    """What each estimator says of each answer, nats."""
    tree = given.tree
    tokens = gather(given.policy - given.reference, tree)
    whole = tokens.sum(dim=1)

    def summed(estimate: Estimate) -> Values:
        return torch.where(tree.mask, estimate(tokens), 0.0).sum(dim=1)

    return {
        "k1, summed over tokens": summed(k1),
        "k2, summed over tokens": summed(k2),
        "k3, summed over tokens": summed(k3),
        "k2 of the answer's log-ratio": k2(whole),
        "k3 of the answer's log-ratio": k3(whole),
        "full KL, summed over tokens": rao_blackwell(given.policy, given.reference, tree),
    }


def moments(values: Values, given: Setting) -> tuple[float, float]:
    """Exact mean and standard deviation over answers of the policy."""
    mean = expectation(values, given.policy, given.tree)
    return mean.item(), expectation((values - mean) ** 2, given.policy, given.tree).sqrt().item()


def outcome(name: str, given: Setting, best: float) -> Outcome:
    """Gradient and end of one placement."""
    placement = PLACEMENTS[name]
    penalty = Placement(name=name, loss=PENALTIES.get(name, placement.loss))
    row = gradient_row(penalty, given.policy, given.reference, given.tree)
    end = fixed_point(
        placement.loss, given.reference, given.rewards, given.tree, kl_coef=KL_COEF, steps=STEPS
    )
    reached = objective(end, given.reference, given.rewards, given.tree, kl_coef=KL_COEF).item()
    return Outcome(
        placement=placement,
        error=row.relative_error,
        cosine=row.cosine,
        variance=row.variance,
        point=Point(
            kl_coef=KL_COEF,
            reward=expectation(given.rewards, end, given.tree).item(),
            kl=sequence_kl(end, given.reference, given.tree).item(),
        ),
        lost=best - reached,
    )
