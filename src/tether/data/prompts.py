"""Prompts: from a source to token ids, a training and a held-out set, and the batch of a step.

Which prompt comes when is a pure function of (seed, step), so a resumed run needs no data state.
Sampling answers is deliberately absent.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tether.checks import require
from tether.config import PromptsConfig
from tether.data.builtin import read_source
from tether.data.preferences import Messages, require_messages
from tether.data.readers import require_column, require_text
from tether.data.splits import derived_seed
from tether.errors import DataError
from tether.types import PromptBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as text (chat template applied) and as the ids that the model reads."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Different prompts, none of them in both sets; the order follows from seed and texts."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]


def load_prompts(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PromptSet:
    """Read, encode and divide the prompts of a recipe.

    Repeated prompts count once. The held-out ones are those whose hash of (seed, text) is
    smallest, so neither the order of the rows nor a repeated row changes the division.

    Raises:
        DataError: a row cannot be used, a prompt is too long, or too few prompts are left.
    """
    rows = read_source(config.source, "prompts.source")
    require_column(rows, config.column, "prompts.column")
    prompts: dict[str, Prompt] = {}
    short = 0
    for number, row in enumerate(rows, 1):
        prompt = _encode(row[config.column], number, config, tokenizer)
        if prompt is None:
            short += 1
        else:
            prompts.setdefault(prompt.text, prompt)
    repeated = len(rows) - short - len(prompts)
    logger.info(
        "%s: %d rows, %d prompts; left out: %d repeated, %d shorter than first_words + 1",
        config.source, len(rows), len(prompts), repeated, short,
    )  # fmt: skip
    if len(prompts) <= config.heldout:
        raise DataError(
            f"prompts.heldout: got {config.heldout}, but {config.source!r} has only "
            f"{len(prompts)} different prompts; lower it or give more prompts"
        )
    ordered = sorted(prompts.values(), key=lambda prompt: _digest(seed, prompt.text))
    return PromptSet(
        train=tuple(ordered[config.heldout :]), heldout=tuple(ordered[: config.heldout])
    )


def render_messages(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """Put messages in words by the tokenizer's chat template, up to where the answer begins.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "prompts: got messages, but the tokenizer has no chat template; give the prompts as "
            "text or use a chat model"
        )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def prompt_batch(prompts: Sequence[Prompt], pad_token: int) -> PromptBatch:
    """Pad prompts on the left to the longest of them; the mask comes from the lengths."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    tokens = torch.full((len(prompts), longest), pad_token, dtype=torch.long)
    mask = torch.zeros((len(prompts), longest), dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt.tokens)
        tokens[row, start:] = torch.tensor(prompt.tokens, dtype=torch.long)
        mask[row, start:] = True
    texts = tuple(prompt.text for prompt in prompts)
    return PromptBatch(prompt_tokens=tokens, prompt_mask=mask, texts=texts)


def step_prompts(train: Sequence[Prompt], *, step: int, per_step: int, seed: int) -> list[Prompt]:
    """The prompts of one step: a pure function of (seed, step).

    Every epoch is one permutation of all prompts; batches run on across its border, so within an
    epoch no prompt is skipped or doubled.

    Args:
        train: the training prompts, not empty.
        step: training step, counted from 1.
        per_step: prompts per step.
        seed: seed of the recipe.
    """
    require(step >= 1, "step", step, "1 or more, steps are counted from 1")
    first = (step - 1) * per_step
    orders: dict[int, list[int]] = {}
    batch = []
    for place in range(first, first + per_step):
        epoch, offset = divmod(place, len(train))
        if epoch not in orders:
            orders[epoch] = _permutation(len(train), seed=seed, epoch=epoch)
        batch.append(train[orders[epoch][offset]])
    return batch


def _permutation(count: int, *, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(derived_seed(seed, "epoch", epoch))
    return torch.randperm(count, generator=generator).tolist()


def _digest(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}\n{text}".encode()).digest()


def _encode(
    value: Any, row: int, config: PromptsConfig, tokenizer: PreTrainedTokenizerBase
) -> Prompt | None:
    """One prompt, or None where the text has too few words for `first_words`."""
    if isinstance(value, str):
        text = require_text(value, row, config.column, "prompts.column")
        if config.first_words:
            words = text.split()
            if len(words) <= config.first_words:
                return None
            text = " ".join(words[: config.first_words])
        tokens = _text_tokens(text, tokenizer)
    else:
        text, tokens = _chat(value, row, config, tokenizer)
    if not tokens:
        raise DataError(f"prompts.column: row {row}: {text[:60]!r} has no token; remove the row")
    if len(tokens) > config.max_tokens:
        raise DataError(
            f"prompts.max_tokens: got {config.max_tokens}, but row {row} has {len(tokens)} tokens "
            f"({text[:60]!r}); raise it, shorten the prompt or set prompts.first_words"
        )
    return Prompt(text=text, tokens=tokens)


def _text_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    tokens = list(tokenizer(text, add_special_tokens=True)["input_ids"])
    # An EOS that the tokenizer adds would tell the model that the text is over.
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ends = tokenizer.eos_token_id
    if tokens and tokens[-1] == ends and (not plain or plain[-1] != ends):
        tokens.pop()
    return tuple(tokens)


def _chat(
    value: Any, row: int, config: PromptsConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, tuple[int, ...]]:
    messages = require_messages(value, row, config.column, "prompts.column")
    if config.first_words:
        allowed = "0 for prompts that are messages; a conversation cannot be cut"
        raise DataError(f"prompts.first_words: got {config.first_words}; it must be {allowed}")
    try:
        text = render_messages(tokenizer, messages)
    except DataError:
        raise
    except Exception as error:  # a chat template may refuse roles with any exception
        reason = " ".join(str(error).split())
        place = f"prompts.column: row {row}"
        raise DataError(f"{place}: the chat template refuses the prompt: {reason}") from error
    # The template has written the special tokens already.
    return text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
