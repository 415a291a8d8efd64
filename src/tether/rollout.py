"""Prompts to rollout: sample once, read once under the reference, measure the exact KL."""

import torch
from jaxtyping import Float
from torch import Tensor

from tether.core.kl import compare
from tether.core.logprobs import chunk_positions, chunked_token_logprobs
from tether.generation.sampler import rows_within, sample
from tether.generation.sequences import last_tokens, response_states, sequence
from tether.models.load import Policy, merged, reference_of
from tether.models.trunk import final_hidden, keeping, output_head
from tether.types import Drift, Generation, PromptBatch, ReferenceStates, Rollout


@torch.no_grad()
def collect_rollout(
    policy: Policy,
    prompts: PromptBatch,
    *,
    responses_per_prompt: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    reward_layer: int | None,
    recompute_logprobs: bool,
    memory_gib: float,
) -> Rollout:
    """Sample responses; log-probabilities, values and shared layers come from the same pass.

    Args:
        policy: the model being trained.
        prompts: left-padded prompts.
        responses_per_prompt: responses for each prompt.
        max_new_tokens: length limit, tokens.
        temperature: divides logits.
        seed: of this step's sampling.
        reward_layer: depth whose hidden states the reward model reads; None if it reads none.
        recompute_logprobs: take old log-probs from a pass of their own, because the sampler's
            are not within the trainer's floor.
        memory_gib: memory that one batch may take.

    Returns:
        A rollout, all of it constant.
    """
    shared = sorted(
        {d for d in (policy.shared_layers, reward_layer or 0) if 0 < d <= policy.shared_layers}
    )
    with merged(policy):
        generation = sample(
            policy.base, prompts, responses_per_prompt=responses_per_prompt,
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, keep=shared,
            memory_gib=memory_gib,
        )  # fmt: skip
    old_logprobs = (
        trainer_logprobs(policy, generation, temperature=temperature, memory_gib=memory_gib)
        if recompute_logprobs
        else generation.sampler_logprobs
    )
    return Rollout(
        generation=generation,
        texts=decode(policy, generation),
        finished=torch.isin(last_tokens(generation), policy.base.eos_tokens),
        old_logprobs=old_logprobs,
        values=policy.value_head(generation.policy_hidden),
    )


def decode(policy: Policy, generation: Generation) -> tuple[str, ...]:
    """Responses as text for people and reward functions; these texts are never encoded again."""
    lengths = generation.response_mask.sum(dim=1).tolist()
    return tuple(
        str(policy.base.tokenizer.decode(row[:length], skip_special_tokens=True))
        for row, length in zip(generation.response_tokens.tolist(), lengths, strict=True)
    )


def batch_slices(policy: Policy, generation: Generation, memory_gib: float) -> list[slice]:
    """Rows that one scoring pass may take."""
    width = generation.prompt_tokens.shape[1] + generation.response_tokens.shape[1]
    rows = rows_within(policy.lm, width, memory_gib)
    count = len(generation.response_tokens)
    return [slice(i, min(i + rows, count)) for i in range(0, count, rows)]


@torch.no_grad()
def read_reference(
    policy: Policy, rollout: Rollout, *, reward_layer: int | None, memory_gib: float
) -> ReferenceStates:
    """Read the sampled sequences under the reference, once, from the shared layers upward.

    Args:
        policy: holds the reference.
        rollout: sampled responses.
        reward_layer: depth that a reward model on the frozen trunk reads; None if none does.
        memory_gib: memory that one pass may take.

    Returns:
        The reference's final states where response tokens are predicted, and the reward's layer.
    """
    generation, above = rollout.generation, policy.shared_layers
    tokens, mask = sequence(generation)
    missing = [d for d in [reward_layer] if d is not None and d not in generation.layer_hidden]
    hidden_parts, kept_parts = [], []
    for part in batch_slices(policy, generation, memory_gib):
        entering = generation.layer_hidden[above][part] if above else None
        with reference_of(policy) as reference, keeping(reference, missing) as kept:
            hidden = final_hidden(
                reference, tokens[part], mask[part], above=above, entering=entering
            )
        hidden_parts.append(response_states(hidden, generation))
        kept_parts.append(kept)
    deeper = {depth: torch.cat([kept[depth] for kept in kept_parts]) for depth in missing}
    return ReferenceStates(
        ref_hidden=torch.cat(hidden_parts), layer_hidden=generation.layer_hidden | deeper
    )


@torch.no_grad()
def trainer_logprobs(
    policy: Policy, generation: Generation, *, temperature: float, memory_gib: float
) -> Float[Tensor, "batch response"]:
    """log π of the sampled tokens from the pass that the update will use, nats; 0 on padding."""
    tokens, mask = sequence(generation)
    above = policy.shared_layers
    result = torch.zeros_like(generation.sampler_logprobs)
    for part in batch_slices(policy, generation, memory_gib):
        entering = generation.layer_hidden[above][part] if above else None
        hidden = final_hidden(policy.lm, tokens[part], mask[part], above=above, entering=entering)
        real = generation.response_mask[part]
        result[part] = result[part].masked_scatter(
            real,
            chunked_token_logprobs(
                response_states(hidden, generation)[real],
                generation.response_tokens[part][real],
                output_head(policy.lm),
                temperature=temperature,
                head_is_frozen=policy.head_is_frozen,
            ),
        )
    return result


@torch.no_grad()
def measure_kl(
    policy: Policy, rollout: Rollout, reference: ReferenceStates, *, temperature: float
) -> Drift:
    """Exact KL(π‖π_ref) at every sampled position, from hidden states already at hand.

    One head application for each side over the response tokens, a chunk of positions at a time.
    """
    mask = rollout.response_mask
    with reference_of(policy) as ref_lm:
        ref_head = output_head(ref_lm)
    comparison = compare(
        rollout.generation.policy_hidden[mask],
        reference.ref_hidden[mask],
        rollout.response_tokens[mask],
        head=output_head(policy.lm),
        ref_head=ref_head,
        temperature=temperature,
        chunk=chunk_positions(policy.lm.config.get_text_config().vocab_size),
    )
    blank = torch.zeros_like(rollout.old_logprobs)
    return Drift(
        kl=blank.masked_scatter(mask, comparison.kl.to(blank.dtype)),
        ref_logprobs=blank.masked_scatter(mask, comparison.ref_logprobs.to(blank.dtype)),
        entropy=blank.masked_scatter(mask, comparison.entropy.to(blank.dtype)),
    )
