"""The policy update: epochs of minibatches over a rollout, gradients summed over micro-batches."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.config import CriticConfig, PPOConfig
from tether.core.logprobs import chunk_positions, chunked_token_logprobs
from tether.core.losses import clipped_policy_loss, value_loss
from tether.core.masking import token_sum_over
from tether.errors import TrainingDiverged
from tether.generation.sequences import response_states, sequence
from tether.models.load import Policy, policy_parameters
from tether.models.trunk import final_hidden, output_head
from tether.types import AdvantageEstimate, LossOutput, Rollout

RATIO_FLOOR = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest |ratio − 1| that the same weights give along two numerical paths, by precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """What the update reads: a rollout with whitened advantages and value targets."""

    rollout: Rollout
    advantages: Float[Tensor, "batch response"]
    returns: Float[Tensor, "batch response"]


def training_data(
    rollout: Rollout, estimate: AdvantageEstimate, whitened: Float[Tensor, "batch response"]
) -> TrainingData:
    """Put whitened advantages beside the unwhitened value targets."""
    return TrainingData(rollout=rollout, advantages=whitened, returns=estimate.returns)


def make_optimizer(policy: Policy, ppo: PPOConfig, critic: CriticConfig) -> torch.optim.AdamW:
    """AdamW with one group for the policy and one for the value head.

    β₂ is 0.99 instead of 0.999: a run has tens of steps, and the KL must answer to β within a few.
    """
    groups = [
        {"params": list(policy_parameters(policy).values()), "lr": ppo.learning_rate},
        {"params": list(policy.value_head.parameters()), "lr": critic.learning_rate},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)


def rate_factor(final_fraction: float, *, step: int, steps: int) -> float:
    """Share of the learning rate: 1 at step 1, falling linearly to its fraction at the last step.

    1 − (1 − final_fraction) (step − 1)/(steps − 1),    1 where step 1 is the only one
    """
    return 1 - (1 - final_fraction) * (step - 1) / max(1, steps - 1)


def set_learning_rates(
    optimizer: torch.optim.AdamW, ppo: PPOConfig, critic: CriticConfig, *, step: int, steps: int
) -> None:
    """Set both rates to their share at a step."""
    factor = rate_factor(ppo.final_learning_rate_fraction, step=step, steps=steps)
    rates = (ppo.learning_rate, critic.learning_rate)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor


def update_policy(
    policy: Policy,
    optimizer: torch.optim.AdamW,
    data: TrainingData,
    *,
    ppo: PPOConfig,
    critic: CriticConfig,
    temperature: float,
    seed: int,
) -> dict[str, float]:
    """Run the epochs; a minibatch beyond `ppo.max_approx_kl_old` is not applied and ends its own.

    Args:
        policy: the model being trained.
        optimizer: from `make_optimizer`.
        data: rollout, whitened advantages, value targets.
        ppo: clipping, minibatches, limits.
        critic: value loss.
        temperature: divides logits, as in sampling.
        seed: of the minibatch order.

    Returns:
        Metrics of the step: means over the applied minibatches; approx_kl_old over all it tried.

    Raises:
        TrainingDiverged: the first minibatch's ratio is not 1, or a loss is not finite.
    """
    sums: dict[str, list[float]] = defaultdict(list)
    first_deviation, skipped = None, 0
    for minibatches in _epochs(data, ppo, seed):
        for i, rows in enumerate(minibatches):
            optimizer.zero_grad(set_to_none=True)
            stats = _accumulate(policy, data, rows, ppo=ppo, critic=critic, temperature=temperature)
            deviation = stats.pop("deviation")
            if first_deviation is None:
                first_deviation = check_first_ratio(deviation, policy.lm.dtype)
            sums["policy/approx_kl_old"].append(stats.pop("policy/approx_kl_old"))
            if sums["policy/approx_kl_old"][-1] > ppo.max_approx_kl_old:
                skipped += len(minibatches) - i
                break
            stats["policy/gradient_norm"] = _step(policy, optimizer, ppo.max_gradient_norm)
            for name, value in stats.items():
                sums[name].append(value)
    optimizer.zero_grad(set_to_none=True)
    return {name: sum(values) / len(values) for name, values in sums.items()} | {
        "policy/approx_kl_old_max": max(sums["policy/approx_kl_old"]),
        "policy/minibatches_skipped": skipped,
        "policy/ratio_first_max_deviation": first_deviation,
        "policy/learning_rate": optimizer.param_groups[0]["lr"],
    }


def _epochs(
    data: TrainingData, ppo: PPOConfig, seed: int
) -> Iterator[Sequence[Int[Tensor, " rows"]]]:
    """The minibatches of each epoch, as rows of the batch; reshuffled every epoch."""
    generator = torch.Generator().manual_seed(seed)
    count = len(data.advantages)
    for _ in range(ppo.epochs):
        order = torch.randperm(count, generator=generator).to(data.advantages.device)
        yield order.tensor_split(ppo.minibatches)


def _accumulate(
    policy: Policy,
    data: TrainingData,
    rows: Int[Tensor, " rows"],
    *,
    ppo: PPOConfig,
    critic: CriticConfig,
    temperature: float,
) -> dict[str, float]:
    """Sum the minibatch's gradient over micro-batches; every part is divided by the same total."""
    mask = data.rollout.response_mask
    total = int(mask[rows].sum())
    width = data.rollout.generation.prompt_tokens.shape[1] + mask.shape[1]
    stats: dict[str, float] = defaultdict(float)
    for part in rows.split(max(1, ppo.micro_batch_tokens // width)):
        logprobs, values = forward(
            policy, data.rollout, part, temperature=temperature, train_trunk=critic.train_trunk
        )
        old = data.rollout.old_logprobs[part]
        surrogate = clipped_policy_loss(
            logprobs, old, data.advantages[part], mask[part],
            clip_epsilon=ppo.clip_epsilon, total_tokens=total,
        )  # fmt: skip
        value = value_loss(
            values, data.rollout.values[part], data.returns[part], mask[part],
            value_clip=critic.value_clip, total_tokens=total,
        )  # fmt: skip
        _backward(surrogate, value, critic.coef)
        for name, number in (surrogate.stats | value.stats).items():
            stats[name] += number.item()
        gap = torch.where(mask[part], logprobs.detach() - old, 0.0)
        stats["deviation"] = max(stats["deviation"], gap.exp().sub(1).abs().max().item())
        value_mean = token_sum_over(values.detach(), mask[part], total)
        stats["value/mean"] += value_mean.item()
    return dict(stats)


def _backward(surrogate: LossOutput, value: LossOutput, coef: float) -> None:
    """Back-propagate both losses at once; refuse numbers that are not finite."""
    loss = surrogate.loss + coef * value.loss
    if not bool(torch.isfinite(loss)):
        raise TrainingDiverged(
            f"the loss is {loss.item()} (policy {surrogate.loss.item():.3g}, value "
            f"{value.loss.item():.3g}); the step was not applied; lower ppo.learning_rate"
        )
    loss.backward()


def forward(
    policy: Policy,
    rollout: Rollout,
    rows: Int[Tensor, " rows"],
    *,
    temperature: float,
    train_trunk: bool,
) -> tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"]]:
    """Differentiable log-probs and values of some rows, starting above the shared layers."""
    generation = rollout.generation
    tokens, mask = sequence(generation)
    above = policy.shared_layers
    entering = generation.layer_hidden[above][rows] if above else None
    hidden = final_hidden(policy.lm, tokens[rows], mask[rows], above=above, entering=entering)
    states = response_states(hidden, generation)
    real = generation.response_mask[rows]
    selected = chunked_token_logprobs(
        states[real],
        generation.response_tokens[rows][real],
        output_head(policy.lm),
        temperature=temperature,
        head_is_frozen=policy.head_is_frozen,
        chunk=chunk_positions(policy.lm.config.get_text_config().vocab_size),
    )
    blank = torch.zeros(real.shape, dtype=selected.dtype, device=selected.device)
    logprobs = blank.masked_scatter(real, selected)
    return logprobs, policy.value_head(states if train_trunk else states.detach())


def _step(policy: Policy, optimizer: torch.optim.AdamW, max_norm: float) -> float:
    """Clip the policy's and the value head's gradients apart and take the step."""
    parameters = list(policy_parameters(policy).values())
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
    torch.nn.utils.clip_grad_norm_(policy.value_head.parameters(), max_norm)
    if not math.isfinite(norm):
        raise TrainingDiverged(f"the policy's gradient norm is {norm}; the step was not applied")
    optimizer.step()
    return norm


def check_first_ratio(deviation: float, dtype: torch.dtype) -> float:
    """The ratio gate: before any step the policy is the one that sampled, so ratio = 1.

    Returns:
        The deviation that passed.

    Raises:
        TrainingDiverged: it is not, within the precision's floor.
    """
    if not deviation <= RATIO_FLOOR[dtype]:
        raise TrainingDiverged(
            f"ratio gate: |ratio − 1| is {deviation:.3g} at the first minibatch, the floor of "
            f"{dtype} is {RATIO_FLOOR[dtype]:g}; likely causes: dropout is on, sampling and "
            "training use other weights or another temperature, responses were re-tokenised, "
            "or padding moves positions"
        )
    return deviation
