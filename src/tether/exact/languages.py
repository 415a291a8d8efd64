"""Small languages whose every quantity is known: a reference model, a reward, a length.

`bandit` is one choice among four; `letters` is two letters and EOS in at most four tokens;
`eight_tokens` is a bigram language of six tokens fitted to sentences of a grammar; `hackable` pays
a language's reward plus a bonus for something rare, so that the reward and its worth can part.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tether.config import ModelConfig
from tether.exact.table_lm import TableLM, state_numbers, table_lm
from tether.exact.tree import Tree, grow_tree
from tether.models.load import Base, Policy, make_policy
from tether.types import PromptBatch

Reward = Callable[
    [Int[Tensor, "batch response"], Bool[Tensor, "batch response"]], Float[Tensor, " batch"]
]
"""Sampled ids and their mask to one exact score each."""

VALUE_UNITS = 16
"""Width of the value head of a toy policy."""


@dataclass(frozen=True, kw_only=True)
class Language:
    """A small language.

    Attributes:
        name: for reports.
        words: one per token id.
        prompt: ids before every response.
        length: limit of a response, tokens.
        eos: id that ends a response, or None where all have the full length.
        reference: the reference model, float64.
        reward: what is trained on.
        gold: what the reward stands for; the reward itself unless it can be hacked.
        others: further models on the same language, by name.
    """

    name: str
    words: tuple[str, ...]
    prompt: tuple[int, ...]
    length: int
    eos: int | None
    reference: TableLM
    reward: Reward
    gold: Reward
    others: dict[str, TableLM] = field(default_factory=dict)

    @cached_property
    def tree(self) -> Tree:
        """All responses."""
        return grow_tree(vocab_size=len(self.words), length=self.length, eos=self.eos)

    @cached_property
    def rewards(self) -> Float[Tensor, " sequences"]:
        """The reward of every response."""
        return self.reward(self.tree.tokens, self.tree.mask)

    def prompts(self, count: int = 1) -> PromptBatch:
        """The prompt, `count` times, as the production sampler takes it."""
        tokens = torch.tensor(self.prompt).repeat(count, 1)
        text = " ".join(self.words[i] for i in self.prompt)
        return PromptBatch(
            prompt_tokens=tokens,
            prompt_mask=torch.ones_like(tokens, dtype=torch.bool),
            texts=(text,) * count,
        )

    def base(self, lm: TableLM) -> Base:
        """A model of this language as the production code takes it."""
        ends = [] if self.eos is None else [self.eos]
        return Base(
            lm=lm,
            tokenizer=word_tokenizer(self.words, self.eos),
            eos_tokens=torch.tensor(ends, dtype=torch.long),
            pad_token=0 if self.eos is None else self.eos,
            name=self.name,
        )

    def policy(self) -> Policy:
        """A trainable policy that starts at the reference; every logit of the table is trained."""
        config = ModelConfig(name=self.name, trainable="full")
        return make_policy(
            self.base(copy.deepcopy(self.reference)), config, value_units=VALUE_UNITS
        )


def word_tokenizer(words: tuple[str, ...], eos: int | None) -> PreTrainedTokenizerFast:
    """One word a token."""
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    special = {} if eos is None else {"eos_token": words[eos], "pad_token": words[eos]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def from_logits(
    logits: Float[Tensor, "prefixes vocab"], tree: Tree, *, prompt: tuple[int, ...], order: int
) -> TableLM:
    """The model with these logits at the prefixes of a tree, in the tree's numbering."""
    states = [
        state_numbers(
            torch.cat([torch.tensor(prompt).expand(len(level), -1), level], dim=1) + 1,
            vocab_size=tree.vocab_size,
            order=order,
        )[:, -1]
        for level in tree.levels
    ]
    return table_lm(logits, torch.cat(states), order=order, eos=tree.eos)


def bandit() -> Language:
    """One choice among four: theory page, first toy."""
    tree = grow_tree(vocab_size=4, length=1, eos=None)
    worth = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64)

    def lm(*logits: float) -> TableLM:
        row = torch.tensor([logits], dtype=torch.float64)
        return from_logits(row, tree, prompt=(0,), order=1)

    def reward(tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, worth[tokens], 0.0).sum(dim=1)

    return Language(
        name="bandit",
        words=("w0", "w1", "w2", "w3"),
        prompt=(0,),
        length=1,
        eos=None,
        reference=lm(0.0, 0.5, -0.5, 1.0),
        reward=reward,
        gold=reward,
        others={"policy": lm(0.3, -0.2, 0.8, 0.1), "old": lm(0.1, 0.1, 0.4, 0.4)},
    )


def letters() -> Language:
    """Two letters and EOS, at most four tokens: 15 prefixes, 31 responses, nothing in common.

    The prompt is EOS, as in models whose end token also begins a text; the last three tokens tell
    all 15 prefixes apart.
    """
    tree, prompt = grow_tree(vocab_size=3, length=4, eos=2), (2,)
    i = torch.arange(len(tree.next_prefix), dtype=torch.float64)[:, None]
    a = torch.arange(3, dtype=torch.float64)
    ref = torch.sin(1.7 * i + 0.9 * a) + torch.tensor([0.6, 0.3, 0.0], dtype=torch.float64)
    wave = torch.cos(2.3 * i - 1.1 * a)
    old = ref + 0.4 * wave + 0.3 * torch.sin(0.7 * i + 1.9 * a)
    lm = {
        name: from_logits(logits, tree, prompt=prompt, order=3)
        for name, logits in (("reference", ref), ("policy", ref + 0.7 * wave), ("old", old))
    }
    reward = _letters_reward(tree)
    return Language(
        name="letters",
        words=("a", "b", "</s>"),
        prompt=prompt,
        length=4,
        eos=2,
        reference=lm.pop("reference"),
        reward=reward,
        gold=reward,
        others=lm,
    )


def _letters_reward(tree: Tree) -> Reward:
    """+1 per a, −½ per b, +¼ for EOS, and 0.3 sin(3n) for the n-th response of the tree."""
    worth = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)

    def code(tokens: Tensor, mask: Tensor) -> Tensor:
        powers = 4 ** torch.arange(tokens.shape[1], device=tokens.device)
        return (torch.where(mask, tokens + 1, 0) * powers).sum(dim=1)

    number = torch.zeros(4**tree.length, dtype=torch.float64)
    number[code(tree.tokens, tree.mask)] = torch.arange(len(tree.tokens), dtype=torch.float64)

    def reward(tokens: Tensor, mask: Tensor) -> Tensor:
        plain = torch.where(mask, worth[tokens], 0.0).sum(dim=1)
        return plain + 0.3 * torch.sin(3 * number[code(tokens, mask)])

    return reward


REWARDED_TOKEN = 3
"""The eight-token language pays 1 for each of these."""


def eight_tokens() -> Language:
    """Eight tokens, six of them a response, no EOS; the reference is a fitted bigram model."""
    logits = fit_bigram(grammar_sentences(4000))
    words = tuple(f"w{i}" for i in range(8))

    def reward(tokens: Tensor, mask: Tensor) -> Tensor:
        return ((tokens == REWARDED_TOKEN) & mask).sum(dim=1).double()

    return Language(
        name="eight tokens",
        words=words,
        prompt=(0,),
        length=6,
        eos=None,
        reference=table_lm(logits, torch.arange(1, 9), order=1, eos=None),
        reward=reward,
        gold=reward,
    )


def grammar() -> Float[Tensor, "prev vocab"]:
    """Next-token probabilities: 0.70 one up (modulo 8), 0.16 two up, 0.02 elsewhere; normalised."""
    row = torch.full((8,), 0.02, dtype=torch.float64)
    row[1], row[2] = 0.70, 0.16
    return torch.stack([row.roll(i) for i in range(8)]) / row.sum()


def grammar_sentences(count: int, *, seed: int = 0) -> Int[Tensor, "sentences time"]:
    """Draw sentences of the grammar: token 0 and six more."""
    uniform = torch.from_numpy(np.random.default_rng(seed).random((count, 6)))
    cumulative = grammar().cumsum(dim=1)
    columns = [torch.zeros(count, dtype=torch.long)]
    for t in range(6):
        below = cumulative[columns[-1]] / cumulative[columns[-1], -1:] <= uniform[:, t, None]
        columns.append(below.sum(dim=1))
    return torch.stack(columns, dim=1)


def fit_bigram(
    sentences: Int[Tensor, "sentences time"], *, steps: int = 400, learning_rate: float = 0.1
) -> Float[Tensor, "prev vocab"]:
    """Logits of a bigram model fitted by Adam on all sentences at once, from the uniform one."""
    pairs = sentences[:, :-1] * 8 + sentences[:, 1:]
    counts = torch.bincount(pairs.flatten(), minlength=64).reshape(8, 8).double()
    logits = torch.zeros(8, 8, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(logits, counts).backward()
        optimizer.step()
    return logits.detach()


def cross_entropy(
    logits: Float[Tensor, "prev vocab"], counts: Float[Tensor, "prev vocab"]
) -> Float[Tensor, ""]:
    """Mean −log p over counted pairs, nats per token."""
    return -(counts * logits.log_softmax(dim=-1)).sum() / counts.sum()


def hackable(language: Language, *, rare: tuple[int, ...], bonus: float) -> Language:
    """The same language with a reward that can be hacked: `bonus` where `rare` occurs.

    Args:
        language: its reward becomes the gold.
        rare: neighbouring tokens that a response must contain.
        bonus: c, reward units.
    """
    wanted = torch.tensor(rare)

    def reward(tokens: Tensor, mask: Tensor) -> Tensor:
        windows = torch.where(mask, tokens, -1).unfold(1, len(rare), 1)
        found = (windows == wanted).all(dim=-1).any(dim=-1)
        return language.gold(tokens, mask) + bonus * found

    return replace(language, name=f"{language.name}, hackable", reward=reward)
