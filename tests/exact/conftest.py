import pytest
import torch

from tether.exact.enumerate import read_table
from tether.exact.languages import Language, bandit, eight_tokens, letters


class Toy:
    """A language with its models read as tables."""

    def __init__(self, language: Language) -> None:
        self.language, self.tree, self.rewards = language, language.tree, language.rewards
        models = {"reference": language.reference, **language.others}
        self.tables = {
            name: read_table(lm, self.tree, prompt=language.prompt) for name, lm in models.items()
        }
        self.reference = self.tables["reference"]
        self.policy = self.tables.get("policy")
        self.old = self.tables.get("old")


@pytest.fixture(scope="session")
def toy_one() -> Toy:
    return Toy(bandit())


@pytest.fixture(scope="session")
def toy_two() -> Toy:
    return Toy(letters())


@pytest.fixture(scope="session")
def eight():
    """The eight-token language with its chain and reward per token."""
    language = eight_tokens()
    rewards = torch.zeros(8, dtype=torch.float64)
    rewards[3] = 1.0
    return language, rewards
