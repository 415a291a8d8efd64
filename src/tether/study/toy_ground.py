"""The eight-token language's exact facts: what any policy and what any bigram can reach.

Flows in: a bigram's next-token law. Flows out: its exact reward, fluency and KL, and the least KL
that its reward needs. Sampling is here for distinct sentences and examples alone.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.exact import markov
from tether.exact.frontier import LEAST_COEF, least_kl
from tether.exact.languages import REWARDED_TOKEN, Language, eight_tokens
from tether.exact.markov import Chain
from tether.exact.optimum import Point, best_of_n, divergence
from tether.exact.stationary import StationaryOptimum, best_stationary

SENTENCES = 512
"""Sentences drawn from a policy to count the distinct ones."""
SHOWN = 2
"""Sentences of those that are shown."""
EVALUATION_SEED = 9
"""Seed of those sentences, as published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a policy stands, exactly.

    Attributes:
        reward: E[r], reward units.
        fluency: mean log π_ref of a sentence, nats; 0 is the most fluent.
        kl: KL(π‖π_ref), nats per response.
        least_kl: the smallest KL of any policy, also one that depends on the step, with at least
            this reward, nats per response.
    """

    reward: float
    fluency: float
    kl: float
    least_kl: float

    @property
    def efficiency(self) -> float:
        """Least KL over KL spent, in [0, 1]; 1 where nothing was spent."""
        return self.least_kl / self.kl if self.kl > 0 else 1.0


@dataclass(frozen=True)
class Ground:
    """The language with its reference chain.

    Attributes:
        language: the eight-token language.
    """

    language: Language

    @cached_property
    def reference(self) -> Chain:
        """log π_ref at every step."""
        return markov.read_chain(self.language.reference, length=self.language.length)

    @cached_property
    def token_rewards(self) -> Float[Tensor, " vocab"]:
        """Reward of each token."""
        rewards = torch.zeros(len(self.language.words), dtype=torch.float64)
        rewards[REWARDED_TOKEN] = 1.0
        return rewards

    @property
    def start(self) -> int:
        """The token before the first step."""
        return self.language.prompt[-1]

    def optimum(self, kl_coef: float) -> Point:
        """Reward and KL of the best policy at β."""
        return markov.optimum(
            self.reference, self.token_rewards, start=self.start, kl_coef=kl_coef
        ).point

    def best_bigram(self, kl_coef: float) -> StationaryOptimum:
        """The best policy that is a bigram at β."""
        return best_stationary(
            self.reference, self.token_rewards, start=self.start, kl_coef=kl_coef
        )

    def least_kl(self, reward: float) -> float:
        """The smallest KL with at least this expected reward, nats per response."""
        if reward <= self.standing_reward(self.reference):
            return 0.0
        most = self.optimum(LEAST_COEF)
        return most.kl if reward >= most.reward else least_kl(self.optimum, reward).kl

    def standing_reward(self, policy: Chain) -> float:
        """E[r] of a chain."""
        return markov.mean_reward(policy, self.token_rewards, start=self.start).item()

    def standing(self, law: Float[Tensor, "prev vocab"]) -> Standing:
        """Exact reward, fluency and KL of a bigram with these next-token log-probabilities."""
        policy = markov.stationary(law, length=self.language.length)
        reward = self.standing_reward(policy)
        kl = markov.kl(policy, self.reference, start=self.start).item()
        return Standing(
            reward=reward,
            fluency=-kl - markov.entropy(policy, start=self.start).item(),
            kl=kl,
            least_kl=self.least_kl(reward),
        )

    def best_of(self, n: int) -> Point:
        """Best-of-n against the reference, exactly; its β is none, written 0.

        Responses with the same reward share the reference's odds among themselves, so the rewards'
        distribution is all that counts.
        """
        levels = self.reward_levels()
        values = torch.arange(len(levels), dtype=torch.float64)
        won = best_of_n(levels.log(), values, n=n)
        return Point(
            kl_coef=0.0,
            reward=(won.exp() * values).sum().item(),
            kl=divergence(won, levels.log()).item(),
        )

    def reward_levels(self) -> Float[Tensor, " levels"]:
        """Probability under the reference of each number of rewarded tokens, by a count a step."""
        vocab, length = len(self.language.words), self.language.length
        reached = torch.zeros(vocab, length + 1, dtype=torch.float64)
        reached[self.start, 0] = 1.0
        for step in self.reference:
            reached = step.exp().T @ reached
            reached[REWARDED_TOKEN] = reached[REWARDED_TOKEN].roll(1)
        return reached.sum(dim=0)


def ground() -> Ground:
    """Fit the reference and prepare its exact facts."""
    return Ground(eight_tokens())


def draw(
    logits: Float[Tensor, "prev vocab"],
    *,
    start: int,
    length: int,
    count: int,
    generator: torch.Generator,
) -> Int[Tensor, "count length"]:
    """Sentences of a bigram, column after column by torch.multinomial, as published."""
    probs, current = logits.softmax(dim=-1), torch.full((count,), start)
    columns = []
    for _ in range(length):
        current = torch.multinomial(probs[current], 1, generator=generator)[:, 0]
        columns.append(current)
    return torch.stack(columns, dim=1)


def evaluation_sentences(
    logits: Float[Tensor, "prev vocab"], language: Language
) -> Int[Tensor, "count length"]:
    """The 512 sentences that every row is looked at with: the same random numbers for all."""
    return draw(
        logits.float(), start=language.prompt[-1], length=language.length, count=SENTENCES,
        generator=torch.Generator().manual_seed(EVALUATION_SEED),
    )  # fmt: skip


def distinct(sentences: Int[Tensor, "count length"]) -> int:
    """How many different sentences there are."""
    return len(torch.unique(sentences, dim=0))
