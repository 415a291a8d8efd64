"""The small languages with their models read as tables, made once for all tests."""

from functools import cache

import torch

from tether.exact.enumerate import read_table
from tether.exact.languages import Language, bandit, eight_tokens, letters


class Toy:
    def __init__(self, language: Language) -> None:
        self.language, self.tree, self.rewards = language, language.tree, language.rewards
        models = {"reference": language.reference, **language.others}
        self.tables = {
            name: read_table(lm, self.tree, prompt=language.prompt) for name, lm in models.items()
        }
        self.reference, self.policy, self.old = (
            self.tables[name] for name in ("reference", "policy", "old")
        )


@cache
def toy_one() -> Toy:
    return Toy(bandit())


@cache
def toy_two() -> Toy:
    return Toy(letters())


@cache
def eight() -> Language:
    return eight_tokens()


def eight_rewards() -> torch.Tensor:
    """Reward per token of the eight-token language."""
    rewards = torch.zeros(8, dtype=torch.float64)
    rewards[3] = 1.0
    return rewards
