"""The zero-variance certificate: at the optimum no response earns more than any other.

With π* and V* every shaped return is β log Z and every advantage is 0, whatever λ. One number
tests reward shaping, the end of the response, masks, GAE and the optimum together.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.core.advantages import gae
from tether.core.shaping import shape_rewards
from tether.exact.enumerate import Table
from tether.exact.optimum import Optimum
from tether.exact.tree import Tree, gather, gather_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Largest deviations over all responses, reward units; rounding apart both are 0.

    Attributes:
        value: β log Z.
        shaped_return: of a response's shaped rewards from β log Z.
        advantage: of any token's advantage from 0.
    """

    value: float
    shaped_return: float
    advantage: float


def certificate(
    best: Optimum,
    reference: Table,
    rewards: Float[Tensor, " sequences"],
    tree: Tree,
    *,
    gae_lambda: float,
    padding: int = 0,
    junk: float = 0.0,
) -> Certificate:
    """Run production shaping and GAE over all responses at the optimum.

    Args:
        best: π* and V* for `kl_coef` of its point.
        reference: the reference.
        rewards: of each response.
        tree: the language.
        gae_lambda: λ; any.
        padding: further columns on the right.
        junk: what stands in padding; it must not matter.
    """

    def laid_out(values: Tensor) -> Tensor:
        filled = torch.where(tree.mask, values, junk)
        return torch.nn.functional.pad(filled, (0, padding), value=junk)

    mask = torch.nn.functional.pad(tree.mask, (0, padding))
    shaped = shape_rewards(
        rewards, laid_out(gather(best.policy, tree)), laid_out(gather(reference, tree)), mask,
        kl_coef=best.point.kl_coef,
    )  # fmt: skip
    values = laid_out(gather_states(best.values, tree))
    advantages = gae(shaped, values, mask, gamma=1.0, gae_lambda=gae_lambda).advantages
    start = best.values[0]
    return Certificate(
        value=start.item(),
        shaped_return=(shaped.sum(dim=1) - start).abs().max().item(),
        advantage=advantages.abs().max().item(),
    )
