"""Reward against KL along the exact optima: budgets become β, and β is the frontier's slope.

KL and reward of the optimum fall as β rises, so bisection in log β finds any of them. What is
solved is a function of β alone, so tree and Markov languages share this page.
"""

import math
from collections.abc import Callable, Iterable

from tether.errors import ConfigError
from tether.exact.optimum import Point

Solve = Callable[[float], Point]
"""β to the optimum's point."""

LEAST_COEF, MOST_COEF = 1e-4, 1e6
"""Between these β is searched, reward per nat."""
HALVINGS = 80
"""Steps of bisection: log β to 23 / 2⁸⁰, which is float64's last digit."""


def frontier(solve: Solve, kl_coefs: Iterable[float]) -> list[Point]:
    """The optima at these β."""
    return [solve(kl_coef) for kl_coef in kl_coefs]


def most_reward(solve: Solve, kl: float) -> Point:
    """The best reward within a budget of `kl` nats per response; its β is the price of a nat.

    Raises:
        ConfigError: the budget is 0 or below, or more than any optimum uses.
    """
    return _search(solve, kl, lambda point: point.kl, "nats per response")


def least_kl(solve: Solve, reward: float) -> Point:
    """The smallest KL that reaches an expected reward.

    Raises:
        ConfigError: the reference has it without any KL, or no policy reaches it.
    """
    return _search(solve, reward, lambda point: point.reward, "reward units")


def _search(solve: Solve, wanted: float, of: Callable[[Point], float], unit: str) -> Point:
    """Bisect log β until the point has the wanted number, which falls as β rises."""
    low, high = math.log(LEAST_COEF), math.log(MOST_COEF)
    least, most = of(solve(MOST_COEF)), of(solve(LEAST_COEF))
    if not least < wanted < most:
        raise ConfigError(
            f"the frontier reaches from {least:.6g} to {most:.6g} {unit}, got {wanted:g}"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if of(solve(math.exp(middle))) > wanted:
            low = middle
        else:
            high = middle
    return solve(math.exp((low + high) / 2))
