"""Whether a model can do what a run asks of it; refused at load, not at the first step.

Trunk, layers, cache and head must give the model's own logits, the tokenizer must stay within the
vocabulary, and prompts with their responses within the model's context.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from tether.core.masking import position_ids
from tether.errors import ConfigError
from tether.models.trunk import decoder_layers, final_hidden, keeping, output_head

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""What the configuration must state: memory and layers are computed from them."""


@torch.no_grad()
def check_parts(lm: PreTrainedModel) -> None:
    """Prove on a few tokens that trunk, replayed layers, cache and head give the model's logits.

    Raises:
        ConfigError: the architecture does more to its logits or layers than we reproduce.
    """
    for size in SIZES:
        value = getattr(lm.config.get_text_config(), size, None)
        if not isinstance(value, int) or value < 1:
            raise _unsupported(lm, f"its configuration has {size} {value!r}")
    try:
        gaps = _part_gaps(lm)
    except ConfigError:
        raise
    except Exception as error:  # an unknown architecture fails in any way
        reason = " ".join(str(error).split())[:200]
        raise _unsupported(lm, f"{type(error).__name__}: {reason}") from error
    floor = 1e-3 if lm.dtype == torch.float32 else 0.25
    for name, gap in gaps.items():
        if not gap <= floor:
            raise _unsupported(lm, f"with its {name} alone the logits differ by {gap:.2g}")


def _unsupported(lm: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"model.name: {type(lm).__name__} cannot be run in parts ({reason}); this architecture is "
        "not supported yet, use a decoder such as Llama, Qwen, Gemma or GPT-2"
    )


def _part_gaps(lm: PreTrainedModel) -> dict[str, float]:
    """Largest difference between the model's own logits and those of each way we run it."""
    tokens = torch.arange(12, device=lm.device) * 7 % lm.config.get_text_config().vocab_size
    tokens = tokens.reshape(2, 6)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    expected = lm(input_ids=tokens, attention_mask=mask.long()).logits.float()
    middle = len(decoder_layers(lm)) // 2
    with keeping(lm, [middle] if middle else []) as kept:
        whole = final_hidden(lm, tokens, mask)
    ways = {
        "output layer": whole,
        "layers": final_hidden(lm, tokens, mask, above=middle, entering=kept.get(middle)),
        "cache": _with_cache(lm, tokens),
    }
    head = output_head(lm)
    return {
        name: (head(states).float() - expected).abs().max().item() for name, states in ways.items()
    }


def _with_cache(
    lm: PreTrainedModel, tokens: Int[Tensor, "batch time"]
) -> Float[Tensor, "batch time hidden"]:
    """Final states read as the sampler does: left-padded, the last tokens one at a time."""
    padding = tokens[:, :2]
    tokens = torch.cat([padding, tokens], dim=1)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, : padding.shape[1]] = False
    cache, states, end = DynamicCache(config=lm.config), [], 0
    for step in (tokens.shape[1] - 2, 1, 1):
        end += step
        read = lm.base_model(
            input_ids=tokens[:, end - step : end],
            attention_mask=mask[:, :end].long(),
            position_ids=position_ids(mask)[:, end - step : end],
            past_key_values=cache,
            use_cache=True,
        )
        states.append(read.last_hidden_state)
    return torch.cat(states, dim=1)[:, padding.shape[1] :]


def check_vocabulary(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_tokens: Int[Tensor, " eos"]
) -> None:
    """Insist that the model has an embedding for every id that the tokenizer may give it.

    Raises:
        ConfigError: naming the largest id that the model lacks.
    """
    size = lm.config.get_text_config().vocab_size
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= size:
        raise ConfigError(
            f"model.name: the tokenizer gives ids up to {largest} ({token!r}), the model knows "
            f"{size} tokens (0 to {size - 1}); use the tokenizer that belongs to the model, or "
            "resize the model's embeddings and train them first"
        )
    if int(eos_tokens.max()) >= size:
        raise ConfigError(
            f"model.name: generation_config.json names EOS {int(eos_tokens.max())}, the model "
            f"knows {size} tokens (0 to {size - 1}); correct it"
        )


def context_limit(lm: PreTrainedModel) -> int | None:
    """Most tokens that the model reads at once; None where its configuration sets no limit."""
    limit = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_context(lm: PreTrainedModel, *, longest_prompt: int, max_new_tokens: int) -> None:
    """Insist that the longest prompt and its response fit into the model's context.

    Raises:
        ConfigError: they do not; says what would fit.
    """
    limit = context_limit(lm)
    if limit is None or longest_prompt + max_new_tokens <= limit:
        return
    room = limit - longest_prompt
    hint = f"use at most {room}, or shorter prompts" if room > 0 else "use shorter prompts"
    raise ConfigError(
        f"generation.max_new_tokens: got {max_new_tokens}; with the longest prompt of "
        f"{longest_prompt} tokens it exceeds the {limit} tokens that the model reads "
        f"(max_position_embeddings); {hint}"
    )
