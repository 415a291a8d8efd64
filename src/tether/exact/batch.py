"""All responses of a small language as one batch of the production stages, with their weights.

Expectations come out of the production functions themselves: every response is in the batch, and
its probability multiplies its advantage or its penalty.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.core.kl import full_kl
from tether.core.logprobs import log_softmax
from tether.exact.enumerate import Table
from tether.exact.tree import Tree, gather, gather_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Every response once; columns are response tokens.

    Attributes:
        logprobs: log π of each token, differentiable in the policy's logits, nats.
        old_logprobs: log π_old, of the policy that sampled; constant.
        ref_logprobs: log π_ref; constant.
        kl: full-vocabulary KL(π‖π_ref) at each position, differentiable.
        mask: True on real tokens.
        weights: probability of each response under the sampling policy; constant.
        scores: reward of each response; zeros where the KL alone is looked at.
        kl_coef: β, reward per nat.
    """

    logprobs: Float[Tensor, "sequences response"]
    old_logprobs: Float[Tensor, "sequences response"]
    ref_logprobs: Float[Tensor, "sequences response"]
    kl: Float[Tensor, "sequences response"]
    mask: Bool[Tensor, "sequences response"]
    weights: Float[Tensor, " sequences"]
    scores: Float[Tensor, " sequences"]
    kl_coef: float

    @property
    def log_ratio(self) -> Float[Tensor, "sequences response"]:
        """l = log π − log π_ref of each token, differentiable."""
        return self.logprobs - self.ref_logprobs

    @property
    def importance(self) -> Float[Tensor, "sequences response"]:
        """π/π_old of each token, differentiable; its value is 1 where π sampled."""
        return (self.logprobs - self.old_logprobs).exp()

    def only(self, row: int) -> "Batch":
        """The same batch as if response `row` alone had been sampled."""
        return replace(
            self, weights=torch.zeros_like(self.weights).index_fill(0, torch.tensor([row]), 1.0)
        )


def every_response(
    logits: Float[Tensor, "prefixes vocab"],
    sampler: Table,
    reference: Table,
    tree: Tree,
    *,
    scores: Float[Tensor, " sequences"] | None = None,
    kl_coef: float = 1.0,
) -> Batch:
    """Lay out all responses.

    Args:
        logits: of the policy, at each prefix; what gradients are taken in.
        sampler: the policy that sampled; the policy itself when on-policy.
        reference: the reference.
        tree: the language.
        scores: reward of each response; None for zeros.
        kl_coef: β, reward per nat.
    """
    policy = log_softmax(logits, 1.0)
    old = gather(sampler.detach(), tree)
    return Batch(
        logprobs=gather(policy, tree),
        old_logprobs=old,
        ref_logprobs=gather(reference, tree),
        kl=gather_states(full_kl(logits, reference), tree),
        mask=tree.mask,
        weights=old.sum(dim=1).exp(),
        scores=torch.zeros_like(old[:, 0]) if scores is None else scores,
        kl_coef=kl_coef,
    )
