"""Which gradient a placement of the KL has, and where training with it ends, exactly.

The production functions run on all responses at once, each weighted by its exact probability; the
result stands beside the gradient of the exact sequence KL.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.exact.batch import every_response
from tether.exact.enumerate import Table, visits
from tether.exact.enumerate import kl as sequence_kl
from tether.exact.placements import Loss, Placement
from tether.exact.tree import Tree

LEAST_LOGPROB = -60.0
"""Where a collapsing choice is held, so that its ratios stay finite."""
LONGEST_STEP = 5.0
"""Largest change of a logit in one step, so that a collapse stays finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The gradient that a placement has, beside the exact gradient of the sequence KL.

    Attributes:
        name: of the placement.
        gradient: expected gradient in the policy's logits.
        relative_error: |gradient − exact| / |exact|.
        cosine: with the exact gradient; 0 where the gradient is 0.
        variance: trace of the covariance of a single response's gradient.
    """

    name: str
    gradient: Float[Tensor, "prefixes vocab"]
    relative_error: float
    cosine: float
    variance: float


def exact_gradient(
    logits: Float[Tensor, "prefixes vocab"], reference: Table, tree: Tree
) -> Float[Tensor, "prefixes vocab"]:
    """∇KL(π‖π_ref) by autograd through the sum over responses."""
    leaf = logits.detach().requires_grad_()
    value = sequence_kl(leaf.log_softmax(dim=-1), reference, tree)
    return torch.autograd.grad(value, leaf)[0]


def expected_gradient(
    loss: Loss,
    logits: Float[Tensor, "prefixes vocab"],
    reference: Table,
    tree: Tree,
    *,
    sampler: Table | None = None,
    scores: Float[Tensor, " sequences"] | None = None,
    kl_coef: float = 1.0,
    row: int | None = None,
) -> Float[Tensor, "prefixes vocab"]:
    """Expected gradient of a loss in the policy's logits.

    Args:
        loss: of a batch.
        logits: the policy.
        reference: the reference.
        tree: the language.
        sampler: the policy that sampled; None for the policy itself.
        scores: reward of each response; None for the gradient of the KL alone.
        kl_coef: β, reward per nat.
        row: one response's gradient instead of the expectation.
    """
    leaf = logits.detach().requires_grad_()
    old = logits.log_softmax(dim=-1) if sampler is None else sampler
    batch = every_response(leaf, old, reference, tree, scores=scores, kl_coef=kl_coef)
    value = loss(batch if row is None else batch.only(row))
    return torch.autograd.grad(value, leaf)[0]


def gradient_row(
    placement: Placement,
    logits: Float[Tensor, "prefixes vocab"],
    reference: Table,
    tree: Tree,
    *,
    sampler: Table | None = None,
) -> Row:
    """Measure one placement, on-policy or with responses of another policy."""
    leaf = logits.detach().requires_grad_()
    old = logits.log_softmax(dim=-1) if sampler is None else sampler
    batch = every_response(leaf, old, reference, tree)
    weights = batch.weights.requires_grad_()  # a loss is linear in them
    (mean,) = torch.autograd.grad(placement.loss(batch), leaf, create_graph=True)
    each = _slopes(mean.flatten(), weights)
    mean, exact = mean.detach(), exact_gradient(logits, reference, tree)
    spread = ((each - mean.flatten()[:, None]) ** 2).sum(dim=0)
    product = mean.norm() * exact.norm()
    return Row(
        name=placement.name,
        gradient=mean,
        relative_error=((mean - exact).norm() / exact.norm()).item(),
        cosine=((mean * exact).sum() / product).item() if product > 1e-12 else 0.0,
        variance=(weights * spread).sum().item(),
    )


def _slopes(
    gradient: Float[Tensor, " entries"], weights: Float[Tensor, " sequences"]
) -> Float[Tensor, "entries sequences"]:
    """Each response's own gradient: how the expected one changes with the response's weight."""
    each = torch.eye(len(gradient), dtype=gradient.dtype)
    return torch.autograd.grad(gradient, weights, each, is_grads_batched=True)[0]


def fixed_point(
    loss: Loss,
    reference: Table,
    scores: Float[Tensor, " sequences"],
    tree: Tree,
    *,
    kl_coef: float,
    steps: int = 300,
    rate: float = 0.3,
) -> Table:
    """Where training from the reference ends when every gradient is its expectation.

    Steps are natural-gradient steps, θ ← θ − rate · gradient / (P(s) π(a|s)): they change how fast
    a fixed point is reached, not where it is.

    Args:
        loss: of a batch, reward and KL together.
        reference: start and reference.
        scores: reward of each response.
        tree: the language.
        kl_coef: β, reward per nat.
        steps: of gradient descent.
        rate: of the steps; small enough for the stiffest placement at usual β.
    """
    logits = reference.clone()
    for _ in range(steps):
        slope = expected_gradient(loss, logits, reference, tree, scores=scores, kl_coef=kl_coef)
        policy = logits.log_softmax(dim=-1)
        chance = visits(policy, tree)[:, None] * policy.exp()
        step = (rate * slope / chance).clamp(-LONGEST_STEP, LONGEST_STEP)
        logits = (policy - step).log_softmax(dim=-1).clamp(min=LEAST_LOGPROB)
    return logits.log_softmax(dim=-1)
