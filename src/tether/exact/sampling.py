"""A sampler that is not the policy: what it costs, and which tests see it.

A *law* is the table that responses are drawn from; the policy is the table that scores them. They
differ by temperature, by a cut support, by anything. Expectations are exact.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.core.kl import k3
from tether.exact.enumerate import Table, mean_length
from tether.exact.optimum import divergence
from tether.exact.tree import Tree, gather


def tempered(policy: Table, temperature: float) -> Table:
    """The policy at another temperature."""
    return (policy / temperature).log_softmax(dim=-1)


def top_k(policy: Table, k: int) -> Table:
    """The k likeliest tokens at each prefix, renormalised."""
    best, index = policy.topk(k, dim=-1)
    cut = torch.full_like(policy, -math.inf).scatter(-1, index, best)
    return cut.log_softmax(dim=-1)


def top_p(policy: Table, p: float) -> Table:
    """The fewest likeliest tokens that hold p of the mass at each prefix, renormalised."""
    ordered, index = policy.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    kept = ordered.masked_fill(before >= p, -math.inf)
    return torch.full_like(policy, -math.inf).scatter(-1, index, kept).log_softmax(dim=-1)


def law_logprobs(law: Table, tree: Tree) -> Float[Tensor, " sequences"]:
    """log-probability of each response, −∞ where the law cannot draw it."""
    return gather(law, tree).sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """What a run would see and what is true.

    Attributes:
        reported: E[Σ k1] as scored by the policy, nats per response.
        kl: KL(law‖π_ref), what the drawn responses really are away, nats per response.
        surprisal_gap: mean over tokens of −log π(a) − H(π); 0 for tokens from π, seen even at
            π = π_ref.
        probe_ratio: mean over tokens of q(a)/π(a), q = softmax(0.8 · logits); 1 from π, seen
            at π = π_ref too.
        ratio_gap: mean over tokens of k3 − k1 = π_ref/π − 1; 0 from π, blind at π = π_ref.
    """

    reported: float
    kl: float
    surprisal_gap: float
    probe_ratio: float
    ratio_gap: float


def mismatch(law: Table, policy: Table, reference: Table, tree: Tree) -> Mismatch:
    """Score responses of a law with the policy, exactly.

    Args:
        law: what responses are drawn from.
        policy: what they are scored with.
        reference: the reference.
        tree: the language.
    """
    drawn = law_logprobs(law, tree)
    weights = drawn.exp()
    tokens = mean_length(law, tree)

    def token_mean(values: Table) -> float:
        return ((weights @ gather(values, tree)).sum() / tokens).item()

    entropy = -(policy.exp() * policy).sum(dim=-1, keepdim=True)
    log_ratio = policy - reference
    probe = tempered(policy, 1 / 0.8)
    return Mismatch(
        reported=(weights @ gather(log_ratio, tree)).sum().item(),
        kl=divergence(drawn, gather(reference, tree).sum(dim=1)).item(),
        surprisal_gap=token_mean(-policy - entropy),
        probe_ratio=token_mean((probe - policy).exp()),
        ratio_gap=token_mean(k3(log_ratio) - log_ratio),
    )
