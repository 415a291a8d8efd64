"""Checks around the first updates: policy, reference and sampler agree before, and differ after.

Before any update the policy is its reference and the sampler is the trainer; after the first ones
the policy has left its reference, or nothing will ever be learned.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.masking import masked_row_sum
from tether.errors import TrainingDiverged
from tether.generation.sequences import response_states, sequence
from tether.models.load import Policy, policy_parameters, reference_of
from tether.models.trunk import final_hidden, output_head
from tether.rollout import trainer_logprobs
from tether.types import Drift, Rollout
from tether.update import RATIO_FLOOR

KL_FLOOR = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest sequence KL, nats, that one set of weights shows to itself along two paths."""

ALIVE_BY = {torch.float64: 2, torch.float32: 2, torch.bfloat16: 10}
"""Step after whose update the policy must differ from its reference, by precision."""

DEAD_NATS = 1e-10
"""KL of a few responses that counts as none: growing with the square of the steps as it does at
first, it would be one nat after a hundred thousand of them."""

PROBED_RESPONSES = 8
PROBED_TOKENS = 64
EQUAL_SCORES = 512
"""Responses, all with the same score, after which an untouched policy is given up."""


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


@torch.no_grad()
def check_alive(
    policy: Policy,
    rollout: Rollout,
    scores: Float[Tensor, " batch"],
    *,
    step: int,
    temperature: float,
) -> None:
    """Life gate, after an update: the trained weights have moved, and the policy with them.

    A step whose scores are all equal (a rare reward that nobody met) teaches nothing and proves
    nothing; it is passed over.

    Raises:
        TrainingDiverged: they have not, with the likely causes.
    """
    if not has_moved(policy):
        if bool(scores.max() > scores.min()):
            raise _dead(step, "no trained weight has moved")
        if step * len(scores) >= EQUAL_SCORES:
            raise _dead(step, f"all {len(scores)} scores are {scores[0].item():g}, as before")
        return
    if step == ALIVE_BY[policy.lm.dtype]:
        nats = probed_kl(policy, rollout, temperature=temperature)
        if nats <= DEAD_NATS:
            raise _dead(step, f"KL(π‖π_ref) of its responses is {nats:.1g} nats")


def _dead(step: int, evidence: str) -> TrainingDiverged:
    return TrainingDiverged(
        f"life gate: after the update of step {step} {evidence}; the policy is its reference "
        "still; likely causes: generation.temperature is so low or high that one token is certain "
        "or all are alike, ppo.learning_rate is too small for model.dtype, all rewards are equal, "
        "or the model's output does not depend on what is trained"
    )


def has_moved(policy: Policy) -> bool:
    """True where a trained weight differs from what training began with."""
    trained = policy_parameters(policy)
    if policy.frozen_copy is None:  # an adapter begins with its second factor at 0
        return any(bool(p.any()) for name, p in trained.items() if "lora_B" in name)
    began = dict(policy.frozen_copy.named_parameters())
    return any(not torch.equal(p, began[name]) for name, p in trained.items())


@torch.no_grad()
def probed_kl(policy: Policy, rollout: Rollout, *, temperature: float) -> float:
    """KL(π‖π_ref) summed over the first sampled tokens, nats, free of two paths' rounding.

    Both sides run one and the same pass, and the softmax is float64: equal models give 0.
    """
    generation = rollout.generation
    tokens, mask = (x[:PROBED_RESPONSES] for x in sequence(generation))
    real = generation.response_mask[:PROBED_RESPONSES]
    above = policy.shared_layers
    entering = generation.layer_hidden[above][:PROBED_RESPONSES] if above else None

    def logprobs(lm: PreTrainedModel) -> Float[Tensor, "tokens vocab"]:
        hidden = final_hidden(lm, tokens, mask, above=above, entering=entering)
        states = response_states(hidden, generation)[real][:PROBED_TOKENS]
        return (output_head(lm)(states).double() / temperature).log_softmax(dim=-1)

    own = logprobs(policy.lm)
    with reference_of(policy) as reference:
        ref = logprobs(reference)
    # an impossible token adds nothing: exp(-inf) times anything is 0
    return torch.where(own.exp() > 0, own.exp() * (own - ref), 0.0).sum().item()
