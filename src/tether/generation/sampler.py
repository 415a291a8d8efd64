"""Our sampler over transformers with a KV cache; full support, so sampling law = scoring law.

The pass that samples a token also yields its log-probability, the hidden state for the value
function and the kept layers' states; none of them is computed again. Rows that end leave the
batch. Absent on purpose: top-p, top-k and every other cut of the support.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tether.core.logprobs import log_softmax
from tether.core.masking import length_mask, position_ids
from tether.models.load import Base
from tether.models.trunk import keeping, output_head
from tether.types import Generation, PromptBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """What one batch of rows collects, filled column by column; rows keep their place."""

    tokens: Int[Tensor, "batch response"]
    logprobs: Float[Tensor, "batch response"]
    policy_hidden: Float[Tensor, "batch response hidden"]
    layer_hidden: dict[int, Float[Tensor, "batch time hidden"]]
    lengths: Int[Tensor, " batch"]


def inverse_cdf(
    logprobs: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """Draw one token a row from a uniform number: the first whose cumulative mass exceeds it.

    The sum runs in float64, so that no token's chance is rounded away; a token of probability 0
    adds nothing to the sum and is never drawn. Sixty times cheaper than torch.multinomial on a
    vocabulary of 49,152.
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def rows_within(lm: PreTrainedModel, width: int, memory_gib: float) -> int:
    """Sequences of `width` tokens whose KV cache and logits fit into a memory limit, at least 1."""
    config = lm.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    size = lm.dtype.itemsize
    cache = 2 * config.num_hidden_layers * heads * head_size * width * size
    # log-probabilities in float32, their exponentials and cumulative sum in float64
    sampling = config.vocab_size * (4 + 4 + 8 + 8)
    kept = 4 * config.hidden_size * width * 4
    return max(1, int(memory_gib * 2**30 // (cache + sampling + kept)))


@torch.no_grad()
def sample(
    base: Base,
    prompts: PromptBatch,
    *,
    responses_per_prompt: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    keep: Sequence[int] = (),
    memory_gib: float = 2.0,
) -> Generation:
    """Sample responses from `softmax(logits / temperature)`.

    Every row has its own random numbers, so the result depends on the seed alone, not on how
    rows are split into batches or when others end.

    Args:
        base: the policy's model (adapter on) or the reference (adapter off).
        prompts: left-padded prompts.
        responses_per_prompt: responses for each prompt, next to each other.
        max_new_tokens: length limit, EOS included.
        temperature: divides the logits.
        seed: of this call's random numbers.
        keep: depths whose hidden states are returned (after that many layers).
        memory_gib: larger batches are split to stay within it.

    Returns:
        Sampled ids with log-probabilities and hidden states from the same pass.
    """
    count = prompts.prompt_tokens.shape[0] * responses_per_prompt
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, max_new_tokens, generator=generator, dtype=torch.float64)
    width = prompts.prompt_tokens.shape[1] + max_new_tokens
    rows = rows_within(base.lm, width, memory_gib)
    # whole prompts where they fit, so that each is read once; else parts of one prompt's responses
    copies = min(responses_per_prompt, rows)
    each = max(1, rows // copies)
    parts = []
    for i in range(0, len(prompts.texts), each):
        chosen = slice(i, i + each)
        draws = uniform[i * responses_per_prompt : (i + each) * responses_per_prompt]
        parts += [
            _sample_rows(
                base, prompts.prompt_tokens[chosen], prompts.prompt_mask[chosen],
                part.to(base.device), temperature=temperature, keep=keep,
            )
            for part in draws.split(copies * each)
        ]  # fmt: skip
    return _join(parts, prompts, responses_per_prompt, keep)


def _join(
    parts: Sequence[_Columns], prompts: PromptBatch, copies: int, keep: Sequence[int]
) -> Generation:
    """Put the batches' columns together, cut to the longest response."""
    lengths = torch.cat([part.lengths for part in parts])
    width = int(lengths.max())
    end = prompts.prompt_tokens.shape[1] + width
    return Generation(
        prompt_tokens=prompts.prompt_tokens.repeat_interleave(copies, dim=0),
        prompt_mask=prompts.prompt_mask.repeat_interleave(copies, dim=0),
        prompt_texts=tuple(text for text in prompts.texts for _ in range(copies)),
        response_tokens=torch.cat([part.tokens for part in parts])[:, :width],
        response_mask=length_mask(lengths, width),
        sampler_logprobs=torch.cat([part.logprobs for part in parts])[:, :width],
        policy_hidden=torch.cat([part.policy_hidden for part in parts])[:, :width],
        layer_hidden={
            depth: torch.cat([part.layer_hidden[depth] for part in parts])[:, :end]
            for depth in keep
        },
    )


def _empty_columns(
    base: Base, batch: int, prompt: int, limit: int, keep: Sequence[int]
) -> _Columns:
    """Allocate the columns; padding holds the pad id and zeros."""
    options = {"device": base.device, "dtype": base.lm.dtype}
    precise = torch.promote_types(base.lm.dtype, torch.float32)  # as core.logprobs computes them
    return _Columns(
        tokens=torch.full((batch, limit), base.pad_token, device=base.device),
        logprobs=torch.zeros(batch, limit, device=base.device, dtype=precise),
        policy_hidden=torch.zeros(batch, limit, base.hidden_size, **options),
        layer_hidden={
            d: torch.zeros(batch, prompt + limit, base.hidden_size, **options) for d in keep
        },
        lengths=torch.full((batch,), limit, device=base.device),
    )


def _sample_rows(
    base: Base,
    prompt_tokens: Int[Tensor, "prompts prompt"],
    prompt_mask: Bool[Tensor, "prompts prompt"],
    uniform: Float[Tensor, "batch limit"],
    *,
    temperature: float,
    keep: Sequence[int],
) -> _Columns:
    """Sample one batch of rows to its end; ended rows leave the cache and the batch.

    Each prompt is read once and its cache repeated for its batch / prompts responses.
    """
    prompt = prompt_tokens.shape[1]
    batch, limit = uniform.shape
    copies = batch // prompt_tokens.shape[0]
    head, cache = output_head(base.lm), DynamicCache(config=base.lm.config)
    columns = _empty_columns(base, batch, prompt, limit, keep)
    rows = torch.arange(batch, device=base.device)  # the rows still in the batch
    inputs, mask = prompt_tokens, prompt_mask
    for t in range(limit):
        with keeping(base.lm, keep) as kept:
            states = _forward(base.lm, inputs, mask, cache)
        if t == 0 and copies > 1:
            states, mask = (x.repeat_interleave(copies, dim=0) for x in (states, mask))
            kept = {d: x.repeat_interleave(copies, dim=0) for d, x in kept.items()}
            cache.batch_repeat_interleave(copies)
        _store(columns, rows, kept, end=prompt + t)
        hidden = states[:, -1]
        logprobs = log_softmax(head(hidden), temperature)
        drawn = inverse_cdf(logprobs, uniform[rows, t])
        columns.tokens[rows, t] = drawn
        columns.logprobs[rows, t] = logprobs.gather(-1, drawn[:, None]).squeeze(-1)
        columns.policy_hidden[rows, t] = hidden
        going = ~torch.isin(drawn, base.eos_tokens)
        columns.lengths[rows[~going]] = t + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        if not bool(going.all()):
            rows, drawn, mask = rows[going], drawn[going], mask[going]
            if len(rows) == 0:
                return columns
            cache.batch_select_indices(going.nonzero().squeeze(-1))
        inputs = drawn[:, None]
    if keep:  # the last token of an unfinished response was sampled but not read yet
        with keeping(base.lm, keep) as kept:
            _forward(base.lm, inputs, mask, cache)
        _store(columns, rows, kept, end=prompt + limit)
    return columns


def _forward(lm: PreTrainedModel, inputs: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Read new tokens after those in the cache; final hidden states of the new ones."""
    positions = position_ids(mask)[:, -inputs.shape[1] :]
    return lm.base_model(
        input_ids=inputs,
        attention_mask=mask.long(),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state


def _store(columns: _Columns, rows: Tensor, kept: dict[int, Tensor], *, end: int) -> None:
    """Write kept layers' states of the tokens just read, which end before column `end`."""
    for depth, states in kept.items():
        columns.layer_hidden[depth][rows, end - states.shape[1] : end] = states
