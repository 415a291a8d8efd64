"""Every place the KL can take in training, as a loss of a batch of all responses.

Rewards go through production shaping, GAE and clipped loss; penalties in the loss through the
production estimators. The placements that tether refuses are made here only, to show what they do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.core.advantages import gae
from tether.core.kl import k1, k2, k3
from tether.core.losses import clipped_policy_loss
from tether.core.masking import masked_time_mean, token_sum_over
from tether.core.shaping import shape_rewards
from tether.exact.batch import Batch

NO_CLIP = 1e9
"""A clip range that never binds."""

Loss = Callable[[Batch], Float[Tensor, ""]]
Estimator = Callable[[Float[Tensor, "*batch"]], Float[Tensor, "*batch"]]
Tokens = Float[Tensor, "sequences response"]


def to_go(values: Tokens, batch: Batch, *, gamma: float = 1.0) -> Tokens:
    """Discounted sum of this and later columns, by production GAE without a value function."""
    blank = torch.zeros_like(values)
    return gae(values, blank, batch.mask, gamma=gamma, gae_lambda=1.0).advantages


def weighted_sum(values: Tokens, batch: Batch) -> Float[Tensor, ""]:
    """Expected sum over real tokens, through the production reduction."""
    return token_sum_over(values * batch.weights[:, None], batch.mask, 1)


def surrogate(
    batch: Batch, advantages: Tokens, *, clip_epsilon: float = NO_CLIP
) -> Float[Tensor, ""]:
    """The production policy loss; min and clip are linear in a positive weight."""
    weighted = advantages.detach() * batch.weights[:, None]
    return clipped_policy_loss(
        batch.logprobs, batch.old_logprobs, weighted, batch.mask,
        clip_epsilon=clip_epsilon, total_tokens=1,
    ).loss  # fmt: skip


def shaped(batch: Batch, logprobs: Tokens, kl_coef: float) -> Tokens:
    """Production rewards, the KL charged at these log-probabilities."""
    return shape_rewards(
        batch.scores, logprobs.detach(), batch.ref_logprobs, batch.mask, kl_coef=kl_coef
    )


def shipped(*, gamma: float = 1.0, clip_epsilon: float = NO_CLIP) -> Loss:
    """What tether trains with: k1 of the sampling policy in the reward, shaped in production."""

    def loss(batch: Batch) -> Float[Tensor, ""]:
        rewards = shaped(batch, batch.old_logprobs, batch.kl_coef)
        return surrogate(batch, to_go(rewards, batch, gamma=gamma), clip_epsilon=clip_epsilon)

    return loss


def whole_response(batch: Batch) -> Float[Tensor, ""]:
    """The whole response's reward and k1 on each of its tokens, as in RLOO."""
    total = shaped(batch, batch.old_logprobs, batch.kl_coef).sum(dim=1, keepdim=True)
    return surrogate(batch, total.expand_as(batch.logprobs))


def divided_by_length(batch: Batch) -> Float[Tensor, ""]:
    """k1 in the reward; the loss of a response is the mean over its tokens, not the sum."""
    advantages = to_go(shaped(batch, batch.old_logprobs, batch.kl_coef), batch)
    means = masked_time_mean((advantages * batch.importance)[..., None], batch.mask)
    return -(batch.weights * means[:, 0]).sum()


def divided_by_length_centred(batch: Batch) -> Float[Tensor, ""]:
    """The same with the mean return subtracted: with 1/length a baseline is not neutral."""
    advantages = to_go(shaped(batch, batch.old_logprobs, batch.kl_coef), batch)
    centred = advantages - (batch.weights * advantages[:, 0]).sum()
    means = masked_time_mean((centred * batch.importance)[..., None], batch.mask)
    return -(batch.weights * means[:, 0]).sum()


def in_reward(estimator: Estimator) -> Loss:
    """A detached estimator charged per token, as reward to go."""

    def loss(batch: Batch) -> Float[Tensor, ""]:
        charge = estimator(batch.old_logprobs - batch.ref_logprobs)
        return surrogate(batch, -to_go(charge, batch))

    return loss


def in_loss(estimator: Estimator) -> Loss:
    """An estimator differentiated, token by token."""
    return lambda batch: weighted_sum(estimator(batch.log_ratio), batch)


def in_loss_of_responses(estimator: Estimator) -> Loss:
    """An estimator of the response's log-ratio, differentiated."""

    def loss(batch: Batch) -> Float[Tensor, ""]:
        log_ratio = torch.where(batch.mask, batch.log_ratio, 0.0).sum(dim=1)
        return (batch.weights * estimator(log_ratio)).sum()

    return loss


def ratio_times(estimator: Estimator) -> Loss:
    """π/π_old, differentiated, times the differentiated estimator; DeepSeek-V3.2 with k3."""
    return lambda batch: weighted_sum(batch.importance * estimator(batch.log_ratio), batch)


def constant_ratio_times(estimator: Estimator) -> Loss:
    """π/π_old as a constant weight on the differentiated estimator."""
    return lambda batch: weighted_sum(batch.importance.detach() * estimator(batch.log_ratio), batch)


def full_in_loss(batch: Batch) -> Float[Tensor, ""]:
    """Full-vocabulary KL at the sampled states, differentiated."""
    return weighted_sum(batch.kl, batch)


def full_in_loss_reweighted(batch: Batch) -> Float[Tensor, ""]:
    """The same, each state weighted by π/π_old of the tokens before it."""
    return weighted_sum(_before(batch).detach() * batch.kl, batch)


def _later(batch: Batch) -> Tokens:
    """Σ_{u>t} KL_u, constant."""
    kl = batch.kl.detach()
    return to_go(kl, batch) - kl


def full_in_reward(batch: Batch) -> Float[Tensor, ""]:
    """Full-vocabulary KL as a reward without its direct term: a baseline for its own token."""
    return surrogate(batch, -to_go(batch.kl.detach(), batch))


def full_and_later(batch: Batch) -> Float[Tensor, ""]:
    """`kl.placement: exact`: KLₜ differentiated, later KL as a charge."""
    return full_in_loss(batch) + surrogate(batch, -_later(batch))


def full_and_whole(batch: Batch) -> Float[Tensor, ""]:
    """KLₜ differentiated, and the whole response's KL as a charge on each token."""
    whole = batch.kl.detach().sum(dim=1, keepdim=True).expand_as(batch.kl)
    return full_in_loss(batch) + surrogate(batch, -whole)


def own_log_ratio_later_full(batch: Batch) -> Float[Tensor, ""]:
    """lₜ + Σ_{u>t} KL_u as a charge, nothing differentiated but the score."""
    return surrogate(batch, -(batch.log_ratio.detach() + _later(batch)))


def _before(batch: Batch) -> Tokens:
    """π/π_old of all tokens before each one."""
    gap = torch.where(batch.mask, batch.logprobs - batch.old_logprobs, 0.0)
    return (gap.cumsum(dim=1) - gap).exp()


def live(weight: Callable[[Batch], Tokens]) -> Loss:
    """k1 of the current policy to go, times a constant weight, times the score."""

    def loss(batch: Batch) -> Float[Tensor, ""]:
        charge = -to_go(shaped(batch, batch.logprobs, 1.0), batch)
        return weighted_sum(weight(batch).detach() * charge * batch.logprobs, batch)

    return loss


def response_weight(batch: Batch) -> Tokens:
    """π/π_old of the whole response."""
    last = (_before(batch) * batch.importance)[:, -1:]
    return last.expand_as(batch.logprobs)


def per_decision(batch: Batch) -> Float[Tensor, ""]:
    """Each charge l_u weighted by π/π_old of the tokens up to it, to go, times the score."""
    up_to = (_before(batch) * batch.importance).detach()
    charge = -to_go(up_to * shaped(batch, batch.logprobs, 1.0), batch)
    return weighted_sum(charge * batch.logprobs, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One way to put the KL into training.

    Attributes:
        name: estimator and place.
        loss: what is minimised on a batch: reward and KL together.
        trains: `kl.placement` of the recipe that does this; empty where tether refuses it.
    """

    name: str
    loss: Loss
    trains: str = ""


def beside_reward(penalty: Loss) -> Loss:
    """The scores through the policy loss without KL, and β times a penalty."""

    def loss(batch: Batch) -> Float[Tensor, ""]:
        paid = surrogate(batch, to_go(shaped(batch, batch.old_logprobs, 0.0), batch))
        return paid + batch.kl_coef * penalty(batch)

    return loss


SHAPED = (
    Placement(name="k1 in reward", loss=shipped(), trains="reward"),
    Placement(name="k1 in reward, whole response", loss=whole_response),
    Placement(name="k1 in reward, gamma 0.95", loss=shipped(gamma=0.95)),
    Placement(name="k1 in reward, gamma 0.5", loss=shipped(gamma=0.5)),
    Placement(name="k1 in reward, gamma 0", loss=shipped(gamma=0.0)),
    Placement(name="k1 in reward, 1/length", loss=divided_by_length),
    Placement(name="k1 in reward, 1/length, centred", loss=divided_by_length_centred),
)
"""Reward and KL are shaped together, in production."""

PENALTIES: dict[str, Loss] = {
    "k2 in reward": in_reward(k2),
    "k3 in reward": in_reward(k3),
    "|k1| in reward": in_reward(torch.abs),
    "full KL in reward": full_in_reward,
    "k1 in loss": in_loss(k1),
    "k2 in loss": in_loss(k2),
    "k3 in loss": in_loss(k3),
    "k2 in loss, response": in_loss_of_responses(k2),
    "k3 in loss, response": in_loss_of_responses(k3),
    "full KL in loss": full_in_loss,
    "full KL in loss, prefix ratio": full_in_loss_reweighted,
    "ratio k1": ratio_times(k1),
    "ratio k2": ratio_times(k2),
    "ratio k3": ratio_times(k3),
    "constant ratio k2": constant_ratio_times(k2),
    "constant ratio k3": constant_ratio_times(k3),
    "full KL in loss, later in reward": full_and_later,
    "full KL in loss, whole in reward": full_and_whole,
    "k1 and later full KL in reward": own_log_ratio_later_full,
    "live k1, response ratio": live(response_weight),
    "live k1, ratio per decision": per_decision,
    "live k1, token ratio": live(lambda batch: batch.importance),
    "live k1, token ratio at most 1": live(lambda batch: batch.importance.clamp(max=1)),
}
"""Penalties beside the reward, by name."""

TRAINED = {"full KL in loss, later in reward": "exact", "k2 in loss": "token_loss"}
"""The penalties that a recipe can ask for, with its word for them."""

PLACEMENTS = {
    placement.name: placement
    for placement in (
        *SHAPED,
        *(
            Placement(name=name, loss=beside_reward(penalty), trains=TRAINED.get(name, ""))
            for name, penalty in PENALTIES.items()
        ),
    )
}
"""Every placement by name."""
