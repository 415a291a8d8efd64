"""KL(π‖π_ref): estimators from samples, and the exact full-vocabulary value.

Argument order is always policy first, reference second, and functions are named by their
arguments. This is what the literature calls the reverse KL. All values are nats at a position;
their sum along a response is the sequence KL. Where each estimator may be used:

| estimator | as a value | as a detached reward | differentiated in the loss |
|---|---|---|---|
| k1 | unbiased, can be negative | exact gradient of sequence KL | gradient 0: refused |
| k2 | biased | wrong: refused | token-level KL only |
| k3 | unbiased, heavy tail | wrong: refused | gradient of KL(π_ref‖π) |
| full | exact, least variance | wrong alone: refused | token-level KL only |
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.core.logprobs import CHUNK_POSITIONS, Head, log_softmax


def k1(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k1 = l with l = log π − log π_ref on a token sampled from π.

    Source:
        Schulman 2020, "Approximating KL divergence".
    """
    return log_ratio


def k2(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k2 = l²/2; biased as a value, its gradient is that of the token-level KL (same source)."""
    return log_ratio**2 / 2


def k3(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k3 = exp(−l) − 1 + l, never negative, unbiased (same source).

    Evaluated in float64: float32 overflows where π_ref finds a token e⁸⁹ times likelier.
    """
    precise = log_ratio.double()
    return torch.expm1(-precise) + precise


def full_kl(
    policy_logits: Float[Tensor, "*batch vocab"],
    ref_logits: Float[Tensor, "*batch vocab"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "*batch"]:
    """Exact KL(π‖π_ref) of two next-token distributions.

        KL = Σₐ π(a) (log π(a) − log π_ref(a)),   π = softmax(logits / temperature)

    Summed along a response sampled from π this is an unbiased estimate of the sequence KL with
    less variance than k1 and no negative term.

    Source:
        Amini, Vieira and Cotterell 2025, arXiv:2504.10637 (Rao-Blackwellised estimator).
    """
    policy = log_softmax(policy_logits, temperature)
    reference = log_softmax(ref_logits, temperature)
    return (policy.exp() * (policy - reference)).sum(dim=-1)


def kl_lower_bound(
    policy_logits: Float[Tensor, "*batch vocab"],
    ref_logits: Float[Tensor, "*batch vocab"],
    *,
    top: int,
    temperature: float = 1.0,
) -> Float[Tensor, "*batch"]:
    """Lower bound on KL(π‖π_ref) from the policy's `top` likeliest tokens and one tail bucket.

        Σ_{a∈top} π(a) log π(a)/π_ref(a)  +  (1−P) log (1−P)/(1−Q),   P, Q = mass of top

    Merging tokens into a bucket can only lose KL, so the value lies in [0, KL]; the sum over the
    top alone is not a KL and can exceed it or be negative.
    """
    policy = log_softmax(policy_logits, temperature)
    reference = log_softmax(ref_logits, temperature)
    top_policy, index = policy.topk(top, dim=-1)
    top_reference = reference.gather(-1, index)
    head = (top_policy.exp() * (top_policy - top_reference)).sum(dim=-1)
    return head + _bucket_kl(policy, reference, index)


def _bucket_kl(policy: Tensor, reference: Tensor, index: Tensor) -> Tensor:
    """(1−P) log (1−P)/(1−Q), each tail mass summed from its own tokens to stay exact near 0."""
    tail = torch.ones_like(policy, dtype=torch.bool).scatter(-1, index, value=False)
    log_p = policy.masked_fill(~tail, -torch.inf).logsumexp(dim=-1)
    log_q = reference.masked_fill(~tail, -torch.inf).logsumexp(dim=-1)
    empty = ~tail.any(dim=-1) | (log_p == -torch.inf)
    return torch.where(empty, 0.0, log_p.exp() * (log_p - log_q).masked_fill(empty, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two next-token distributions compared at each position, nats.

    Attributes:
        kl: exact KL(π‖π_ref).
        entropy: entropy of π.
        ref_logprobs: log π_ref of the sampled token.
    """

    kl: Float[Tensor, " positions"]
    entropy: Float[Tensor, " positions"]
    ref_logprobs: Float[Tensor, " positions"]


@torch.no_grad()
def compare(
    policy_hidden: Float[Tensor, "positions hidden"],
    ref_hidden: Float[Tensor, "positions hidden"],
    tokens: Int[Tensor, " positions"],
    *,
    head: Head,
    ref_head: Head,
    temperature: float,
    chunk: int = CHUNK_POSITIONS,
) -> Comparison:
    """Exact KL, policy entropy and reference log-probabilities in one pass over the vocabulary.

    Args:
        policy_hidden: the policy's final states that predicted the tokens.
        ref_hidden: the reference's final states at the same positions.
        tokens: the sampled tokens.
        head: the policy's hidden-to-logits map.
        ref_head: the reference's.
        temperature: divides both sides' logits.
        chunk: positions whose logits exist at once; peak memory is flat in batch and length.

    Returns:
        One value of each per position.
    """
    kl, entropy, ref_logprobs = [], [], []
    for start in range(0, tokens.shape[0], chunk):
        part = slice(start, start + chunk)
        policy = log_softmax(head(policy_hidden[part]), temperature)
        reference = log_softmax(ref_head(ref_hidden[part]), temperature)
        probs = policy.exp()
        kl.append((probs * (policy - reference)).sum(dim=-1))
        entropy.append(-(probs * policy).sum(dim=-1))
        ref_logprobs.append(reference.gather(-1, tokens[part, None]).squeeze(-1))
    return Comparison(
        kl=torch.cat(kl), entropy=torch.cat(entropy), ref_logprobs=torch.cat(ref_logprobs)
    )
