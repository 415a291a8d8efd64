"""Bigram languages of any length: sums run over steps and tokens instead of over responses.

A policy is one table of log-probabilities for each step, `[time, previous, vocab]`; a stationary
one repeats. Rewards are paid per token, every response has the full length. Everything is
differentiable and in the precision of the tables.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.logprobs import log_softmax
from tether.exact.optimum import Point
from tether.models.trunk import final_hidden, output_head

Chain = Float[Tensor, "time prev vocab"]
"""Log-probabilities of the next token at each step after each token, nats."""


def read_chain(lm: PreTrainedModel, *, length: int) -> Chain:
    """The chain of a bigram model: its next-token law after each token, at every step."""
    vocab = lm.config.vocab_size
    tokens = torch.arange(vocab, device=lm.device)[:, None]
    hidden = final_hidden(lm, tokens, torch.ones_like(tokens, dtype=torch.bool))[:, -1]
    return stationary(log_softmax(output_head(lm)(hidden), 1.0), length=length)


def stationary(logprobs: Float[Tensor, "prev vocab"], *, length: int) -> Chain:
    """The same law at every step."""
    return logprobs.expand(length, -1, -1)


def visits(policy: Chain, *, start: int) -> Float[Tensor, "time prev"]:
    """Probability of each token before each step; `start` comes before the first."""
    reached = [torch.nn.functional.one_hot(torch.tensor(start), policy.shape[1]).to(policy)]
    for step in policy[:-1]:
        reached.append(reached[-1] @ step.exp())
    return torch.stack(reached)


def kl(policy: Chain, reference: Chain, *, start: int) -> Float[Tensor, ""]:
    """KL(π‖π_ref), nats per response."""
    each = (policy.exp() * (policy - reference)).sum(dim=-1)
    return (visits(policy, start=start) * each).sum()


def entropy(policy: Chain, *, start: int) -> Float[Tensor, ""]:
    """Entropy of the distribution over responses, nats."""
    each = -(policy.exp() * policy).sum(dim=-1)
    return (visits(policy, start=start) * each).sum()


def mean_reward(
    policy: Chain, token_rewards: Float[Tensor, " vocab"], *, start: int
) -> Float[Tensor, ""]:
    """E[Σₜ r(aₜ)], reward units."""
    return (visits(policy, start=start) * (policy.exp() @ token_rewards)).sum()


def objective(
    policy: Chain,
    reference: Chain,
    token_rewards: Float[Tensor, " vocab"],
    *,
    start: int,
    kl_coef: float,
) -> Float[Tensor, ""]:
    """J(π) = E[r] − β KL, by values from the last step to the first instead of by visits."""
    each = token_rewards - kl_coef * (policy - reference)
    following = torch.zeros_like(token_rewards)
    for probs, gain in zip(policy.exp().flip(0), each.flip(0), strict=True):
        following = (probs * (gain + following)).sum(dim=-1)
    return following[start]


def point(
    policy: Chain,
    reference: Chain,
    token_rewards: Float[Tensor, " vocab"],
    *,
    start: int,
    kl_coef: float,
) -> Point:
    """Where a policy stands in the plane of reward and KL."""
    return Point(
        kl_coef=kl_coef,
        reward=mean_reward(policy, token_rewards, start=start).item(),
        kl=kl(policy, reference, start=start).item(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptimum:
    """The optimal policy, which may depend on the step even where the reference does not.

    Attributes:
        policy: π*.
        values: V*(t, previous token), reward still to come net of KL, reward units.
        point: its reward and KL.
    """

    policy: Chain
    values: Float[Tensor, "time prev"]
    point: Point


@torch.no_grad()
def optimum(
    reference: Chain, token_rewards: Float[Tensor, " vocab"], *, start: int, kl_coef: float
) -> ChainOptimum:
    """Solve max E[r] − β KL by soft value iteration over steps.

    V(t, s) = β log Σₐ π_ref(a|s) exp((r(a) + V(t+1, a))/β),   V(after the last) = 0
    """
    following = torch.zeros_like(token_rewards)
    policies, values = [], []
    for step in reference.flip(0):
        gain = step + (token_rewards + following) / kl_coef
        following = kl_coef * gain.logsumexp(dim=-1)
        policies.append(gain - following[:, None] / kl_coef)
        values.append(following)
    policy = torch.stack(policies[::-1])
    return ChainOptimum(
        policy=policy,
        values=torch.stack(values[::-1]),
        point=point(policy, reference, token_rewards, start=start, kl_coef=kl_coef),
    )
