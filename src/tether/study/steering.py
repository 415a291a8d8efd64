"""β in the two-letter language: controllers, the price of a nat, bounded updates."""

from collections.abc import Callable
from dataclasses import dataclass

from tether.config import KLConfig
from tether.core.controllers import ControllerState, step_fixed, step_target, step_ziegler
from tether.exact.enumerate import Table as Policy
from tether.exact.enumerate import kl
from tether.exact.optimum import Optimum, optimum
from tether.study.ascent import Task, moved, natural_direction, natural_step

TARGET = 1.0
"""Nats per response."""
STEPS, RATE = 150, 0.2
NEAR = 0.05
"""A run has settled when its KL stays within this share of the target."""
SHIPPED = KLConfig()
BATCH, HORIZON = 512, 10_000
DIFFERENCE = 1e-4
"""Relative change of β in the central differences."""
REGION, UPDATES = 0.05, 60
"""Nats that one trust-region update may move, and how many are made."""
HALVINGS = 20

Step = Callable[[ControllerState, float], ControllerState]


def ziegler(state: ControllerState, measured_kl: float) -> ControllerState:
    """The adaptive rule of 2019 with its published constants: at most 1 % an update."""
    return step_ziegler(state, measured_kl, kl_target=TARGET, horizon=HORIZON, responses=BATCH)


def target(state: ControllerState, measured_kl: float) -> ControllerState:
    """The controller that tether ships, with its default rate and bounds."""
    return step_target(
        state,
        measured_kl,
        kl_target=TARGET,
        rate=SHIPPED.rate,
        coef_min=SHIPPED.coef_min,
        coef_max=SHIPPED.coef_max,
    )


CONTROLLERS: dict[str, Step] = {"fixed": step_fixed, "adaptive": ziegler, "target": target}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """KL after each step and the β that it was made with."""

    kl: list[float]
    kl_coef: list[float]

    @property
    def settled(self) -> int | None:
        """First step from which the KL stays near the target; None if it never does."""
        away = [i for i, value in enumerate(self.kl) if abs(value / TARGET - 1) > NEAR]
        first = away[-1] + 1 if away else 0
        return first + 1 if first < len(self.kl) else None


def run(task: Task, controller: Step, start: float) -> Run:
    """Train from the reference with exact gradients while a controller moves β."""
    state, policy, found = ControllerState(multiplier=start), task.reference, Run(kl=[], kl_coef=[])
    for _ in range(STEPS):
        found.kl_coef.append(state.kl_coef)
        policy = natural_step(policy, task, kl_coef=state.kl_coef, rate=RATE)
        found.kl.append(task.kl(policy))
        state = controller(state, found.kl[-1])
    return found


def solve(task: Task, kl_coef: float) -> Optimum:
    """The best policy at this β."""
    return optimum(task.reference, task.scores, task.tree, kl_coef=kl_coef)


def reward_variance(task: Task, policy: Policy) -> float:
    """Var(r) over the policy's responses, reward units squared."""
    return task.mean((task.scores - task.reward(policy)) ** 2, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The multiplier at one β, by central differences and by formula.

    Attributes:
        kl_coef: β.
        kl: of the optimum, nats.
        reward_per_nat: dR*/dKL by differences along the frontier.
        kl_per_coef: dKL/dβ by differences.
        formula: −Var(r)/β³ at the optimum.
    """

    kl_coef: float
    kl: float
    reward_per_nat: float
    kl_per_coef: float
    formula: float


def price(task: Task, kl_coef: float) -> Price:
    """What one more nat buys."""
    step = DIFFERENCE * kl_coef
    up, here, down = (solve(task, kl_coef + shift) for shift in (step, 0.0, -step))
    more_kl = down.point.kl - up.point.kl
    return Price(
        kl_coef=kl_coef,
        kl=here.point.kl,
        reward_per_nat=(down.point.reward - up.point.reward) / more_kl,
        kl_per_coef=-more_kl / (2 * step),
        formula=-reward_variance(task, here.policy) / kl_coef**3,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """Trust-region updates: KL(π_old‖π_new) of each, and KL(π‖π_ref) after it."""

    per_update: list[float]
    from_reference: list[float]


def bounded_update(policy: Policy, task: Task, kl_coef: float) -> Policy:
    """The natural step at twice the rate, shortened until KL(π_old‖π_new) is in the region."""
    direction = natural_direction(policy, task, kl_coef=kl_coef)

    def within(rate: float) -> bool:
        return kl(policy, moved(policy, direction, rate), task.tree).item() <= REGION

    low, high = 0.0, 2 * RATE
    if within(high):
        return moved(policy, direction, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return moved(policy, direction, low)


def bounded_run(task: Task, kl_coef: float) -> Bounded:
    """Many bounded updates."""
    policy, found = task.reference, Bounded(per_update=[], from_reference=[])
    for _ in range(UPDATES):
        new = bounded_update(policy, task, kl_coef)
        found.per_update.append(kl(policy, new, task.tree).item())
        found.from_reference.append(task.kl(new))
        policy = new
    return found
