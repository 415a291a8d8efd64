"""Checks of gradients: where the KL enters, what the update hands to its optimiser, invariances."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from tether.core.losses import clipped_policy_loss
from tether.exact.enumerate import Table, kl, objective
from tether.exact.gradients import expected_gradient
from tether.exact.placements import PLACEMENTS
from tether.exact.selftest.bench import (
    COOL,
    KL_COEF,
    ONE_STEP,
    WARM,
    Bench,
    every_response,
    prepared,
    sampled,
    update_gradient,
)
from tether.exact.selftest.check import Check
from tether.exact.selftest.checks_values import chances, tables
from tether.exact.selftest.oracle import (
    clipped_gradient,
    known_table,
    plain_table,
    precise,
)
from tether.exact.selftest.rearranged import in_order, with_padding
from tether.types import Rollout


def apart(got: Tensor, exact: Tensor) -> float:
    """|got − exact| / |exact|."""
    exact = exact.double().cpu()
    return ((got.double().cpu() - exact).norm() / exact.norm()).item()


def placement_error(bench: Bench, name: str, *, off_policy: bool = False) -> float:
    """Relative error of a placement's expected gradient, through production functions."""
    own, ref = tables(bench, WARM)
    old = known_table("old", bench.dtype, WARM) if off_policy else None

    def single(table: Table) -> Table:
        return table.to(bench.device, torch.float32)

    got = expected_gradient(
        PLACEMENTS[name].loss, single(own), single(ref), bench.tree,
        sampler=None if old is None else single(old),
    )  # fmt: skip
    leaf = own.detach().requires_grad_()
    exact = torch.autograd.grad(kl(leaf.log_softmax(dim=-1), ref, bench.language.tree), leaf)[0]
    return apart(got, exact)


def objective_gradient(bench: Bench, temperature: float) -> tuple[float, float]:
    """Error of the gradient that the update hands to its optimiser, against that of E[r] − β KL."""
    policy, language = bench.table_policy, bench.language
    own, ref = tables(bench, temperature)
    rollout = every_response(bench, policy, temperature)
    weights = chances(bench, own).to(bench.device, torch.float32)
    data = prepared(policy, rollout, bench.scores, temperature=temperature, weights=weights)
    got, _ = update_gradient(policy, data, temperature=temperature)
    lm = precise(policy.lm)
    table = plain_table(lm, language, temperature=temperature)
    value = objective(table, ref, language.rewards, language.tree, kl_coef=KL_COEF)
    exact = torch.autograd.grad(value, [p for p in lm.parameters() if p.requires_grad])
    return apart(got, -torch.cat([g.flatten() for g in exact])), 0.0


def first_minibatch(bench: Bench, metric: str) -> tuple[float, float]:
    """A metric of the first update on fresh responses of the letters; the policy has not moved."""
    policy = bench.table_policy
    rollout = sampled(bench, policy, count=200, temperature=COOL, seed=8)
    scores = rollout.response_mask.sum(dim=1).float()
    data = prepared(policy, rollout, scores, temperature=COOL)
    _, metrics = update_gradient(policy, data, temperature=COOL)
    return metrics[metric], 0.0


def llama_gradient(
    bench: Bench, rollout: Rollout, scores: Float[Tensor, " batch"], tokens: int = 4096
) -> tuple[Float[Tensor, " parameters"], dict[str, float]]:
    """The Llama's gradient on a rollout, in micro-batches of at most so many tokens."""
    data = prepared(bench.llama, rollout, scores, temperature=COOL)
    ppo = replace(ONE_STEP, micro_batch_tokens=tokens)
    return update_gradient(bench.llama, data, temperature=COOL, ppo=ppo)


@lru_cache(maxsize=1)
def llama_plain(bench: Bench) -> tuple[Float[Tensor, " parameters"], dict[str, float]]:
    """The gradient on the rollout as it was sampled."""
    return llama_gradient(bench, bench.llama_rollout, bench.llama_scores)


def llama_ratio(bench: Bench) -> tuple[float, float]:
    """|ratio − 1| between the sampler's cached pass and the update's whole one."""
    _, metrics = llama_plain(bench)
    return metrics["policy/ratio_first_max_deviation"], 0.0


def change_by(bench: Bench, what: str) -> tuple[float, float]:
    """How far the gradient moves when the same responses are written down differently."""
    rollout, scores = bench.llama_rollout, bench.llama_scores
    plain, _ = llama_plain(bench)
    if what == "padding":
        other, _ = llama_gradient(bench, with_padding(rollout, left=3, right=2), scores)
    elif what == "order":
        order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(3))
        order = order.to(bench.device)
        other, _ = llama_gradient(bench, in_order(rollout, order), scores[order])
    else:
        width = rollout.generation.prompt_tokens.shape[1] + rollout.response_tokens.shape[1]
        other, _ = llama_gradient(bench, rollout, scores, tokens=4 * width)
    return apart(other, plain), 0.0


def clipped_slopes(bench: Bench) -> tuple[float, float]:
    """Error of the clipped loss's slopes away from the sampling policy, on random numbers."""
    mask = bench.tree.mask
    generator = torch.Generator().manual_seed(4)
    random = torch.randn(3, *mask.shape, generator=generator)
    old, advantages = (random[i].to(bench.device) for i in (0, 1))
    log_ratio = 0.3 * random[2]
    leaf = (old + log_ratio.to(bench.device)).requires_grad_()
    loss = clipped_policy_loss(
        leaf, old, advantages, mask, clip_epsilon=0.2, total_tokens=int(mask.sum())
    ).loss
    slopes = torch.autograd.grad(loss, leaf)[0]
    exact = clipped_gradient(
        (leaf - old).detach().cpu(), advantages.cpu(), bench.language.tree.mask, clip_epsilon=0.2
    )
    return apart(slopes, exact), 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """A placement of the KL whose gradient's relative error is known.

    Attributes:
        name: in `tether.exact.placements`.
        error: relative error against the gradient of the sequence KL.
        off_policy: with responses of another policy.
    """

    name: str
    error: float
    off_policy: bool = False

    def check(self) -> Check:
        """The row as a check: right where it must be right, wrong by what it must be wrong."""
        sampled_by = "another policy" if self.off_policy else "the policy"
        exact = self.error == 0
        return Check(
            name=f"gradient: {self.name}{', off-policy' if self.off_policy else ''}",
            proves=f"{self.name}, responses of {sampled_by}: "
            + ("the gradient of the sequence KL." if exact else "as wrong as theory says."),
            measure=lambda b: (
                placement_error(b, self.name, off_policy=self.off_policy),
                self.error,
            ),
            float32=1e-5 if exact else 6e-4,
            bfloat16=1e-5 if exact else 1e-2,
        )


ROWS = (
    KnownRow(name="k1 in reward", error=0.0),
    KnownRow(name="full KL in loss, later in reward", error=0.0),
    KnownRow(name="k2 in loss, response", error=0.0),
    KnownRow(name="k2 in loss", error=0.134),
    KnownRow(name="k3 in loss", error=0.177),
    KnownRow(name="k1 in loss", error=1.0),
    KnownRow(name="k3 in reward", error=0.986),
    KnownRow(name="full KL in reward", error=0.891),
    KnownRow(name="live k1, response ratio", error=0.0, off_policy=True),
    KnownRow(name="k1 in reward", error=0.690, off_policy=True),
    KnownRow(name="ratio k3", error=0.166, off_policy=True),
)
"""Rows of theory's table for the letters; the refused placements show that the oracle sees them."""

GRADIENTS = (
    *(row.check() for row in ROWS),
    Check(
        name="gradient of the update",
        proves="What the optimiser is given is the gradient of E[score] − β KL on whole responses.",
        measure=lambda bench: objective_gradient(bench, WARM), float32=1e-5, bfloat16=1e-2,
    ),
    Check(
        name="gradient of the update at temperature 0.7",
        proves="So it is where both sides' logits are divided by a temperature.",
        measure=lambda bench: objective_gradient(bench, COOL), float32=1e-5, bfloat16=1e-2,
    ),
    Check(
        name="|ratio − 1|, first minibatch",
        proves="Before the first step the ratio is exactly 1: sampler and update agree bit by bit.",
        measure=lambda bench: first_minibatch(bench, "policy/ratio_first_max_deviation"),
        float32=0.0, bfloat16=0.0,
    ),
    Check(
        name="clip fraction, first minibatch",
        proves="So nothing is clipped.",
        measure=lambda bench: first_minibatch(bench, "policy/clip_fraction"),
        float32=0.0, bfloat16=0.0,
    ),
    Check(
        name="|ratio − 1| of the Llama",
        proves="With a cache, an adapter and padding the ratio is 1 up to rounding.",
        measure=llama_ratio, float32=2e-5, bfloat16=0.15,
    ),
    Check(
        name="change of gradient by padding",
        proves="More padding on either side, whatever stands in it, changes nothing.",
        measure=lambda bench: change_by(bench, "padding"), float32=1e-4, bfloat16=0.1,
    ),
    Check(
        name="change of gradient by order",
        proves="The order of the responses changes nothing.",
        measure=lambda bench: change_by(bench, "order"), float32=1e-4, bfloat16=0.1,
    ),
    Check(
        name="change of gradient by micro-batches",
        proves="Nor does the split into micro-batches.",
        measure=lambda bench: change_by(bench, "micro-batches"), float32=1e-4, bfloat16=0.1,
    ),
    Check(
        name="clipped loss, slopes",
        proves="Away from the sampling policy each token is clipped on its own, by the sign of A.",
        measure=clipped_slopes, float32=1e-5, bfloat16=1e-5,
    ),
)  # fmt: skip
"""In the order in which they are shown."""
