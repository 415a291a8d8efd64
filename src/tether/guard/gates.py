"""Checks before the first update: the policy is the reference, and the sampler is the trainer."""

from dataclasses import dataclass

import torch

from tether.core.masking import masked_row_sum
from tether.errors import TrainingDiverged
from tether.models.load import Policy
from tether.rollout import trainer_logprobs
from tether.types import Drift, Rollout
from tether.update import RATIO_FLOOR

KL_FLOOR = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest sequence KL, nats, that one set of weights shows to itself along two paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCheck:
    """Whether the sampler's log-probs may serve as old log-probs."""

    deviation: float
    matches: bool


@torch.no_grad()
def check_reference(policy: Policy, rollout: Rollout, drift: Drift) -> float:
    """KL gate: an untrained policy is its reference; returns the largest KL seen, nats.

    Raises:
        TrainingDiverged: it is not, with the likely causes.
    """
    largest = masked_row_sum(drift.kl, rollout.response_mask).abs().max().item()
    floor = KL_FLOOR[policy.lm.dtype]
    if not largest <= floor:
        raise TrainingDiverged(
            f"KL gate: before any update KL(π‖π_ref) is {largest:.3g} nats, the floor {floor:g}; "
            "likely causes: the adapter does not start at 0, the model applies dropout, or its "
            "layers cannot be shared (set model.lora_first_layer to 0)"
        )
    return largest


@torch.no_grad()
def check_sampler(
    policy: Policy, rollout: Rollout, *, temperature: float, memory_gib: float
) -> SamplerCheck:
    """Compare the sampler's log-probs with the trainer's pass over the same ids.

    Within the precision's floor they serve as old log-probs and no pass is spent on them;
    otherwise one pass a step recomputes them.
    """
    trainer = trainer_logprobs(
        policy, rollout.generation, temperature=temperature, memory_gib=memory_gib
    )
    gap = (trainer - rollout.generation.sampler_logprobs)[rollout.response_mask]
    deviation = gap.exp().sub(1).abs().max().item()
    return SamplerCheck(deviation=deviation, matches=deviation <= RATIO_FLOOR[policy.lm.dtype] / 2)
