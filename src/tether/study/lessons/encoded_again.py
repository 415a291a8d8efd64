"""Answers decoded and encoded again: all of a small language, and samples of real models."""

import itertools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer, models
from torch import Tensor

from tether.config import ModelConfig
from tether.core.logprobs import predicting_positions, token_logprobs
from tether.core.masking import length_mask
from tether.errors import ConfigError
from tether.exact.enumerate import Table as Policy
from tether.exact.enumerate import kl, sequence_logprobs
from tether.exact.optimum import divergence
from tether.exact.tree import Tree, gather, grow_tree
from tether.generation.sampler import sample
from tether.models.load import Base, load_base
from tether.types import PromptBatch

WORDS = ("a", "b", "ab", "</s>")
EOS, LENGTH = 3, 4
REAL = {"builtin:smollm2-135m": "SmolLM2-135M", "builtin:glassllm": "glassllm"}
PROMPT = "The film was"
RESPONSES, NEW_TOKENS = 48, 24
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Answers sampled and encoded again.

    Attributes:
        name: of the language or tokenizer.
        vocabulary: its size.
        weights: probability of each answer, or 1/count; sums to 1.
        sampled: False where all answers are there.
        changed: 1.0 where the ids differ.
        resized: 1.0 where their number differs.
        log_ratio: log π(new ids) − log π(sampled ids), nats.
    """

    name: str
    vocabulary: int
    weights: Float[Tensor, " answers"]
    sampled: bool
    changed: Float[Tensor, " answers"]
    resized: Float[Tensor, " answers"]
    log_ratio: Float[Tensor, " answers"]

    def share(self, values: Float[Tensor, " answers"]) -> float:
        """Mean over answers."""
        return (self.weights * values).sum().item()

    @property
    def error(self) -> float:
        """Standard error of the share of changed answers."""
        share, count = self.share(self.changed), len(self.weights)
        return math.sqrt(share * (1 - share) / count) if self.sampled else 0.0

    @property
    def ratios(self) -> tuple[float, float, float]:
        """Smallest, mean and largest ratio of an answer."""
        ratio = self.log_ratio.exp()
        return ratio.min().item(), self.share(ratio), ratio.max().item()


def small_encoder() -> Tokenizer:
    """A byte-pair encoder of two letters with one merge."""
    vocabulary = {word: i for i, word in enumerate(WORDS[:EOS])}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))


def small_tables(tree: Tree) -> tuple[Policy, Policy]:
    """A policy and a reference on the small language."""
    i = torch.arange(len(tree.next_prefix), dtype=torch.float64)[:, None]
    token = torch.arange(len(WORDS), dtype=torch.float64)
    reference = torch.sin(1.7 * i + 0.9 * token) - torch.tensor([0.0, 0.0, 0.5, 0.7]).double()
    policy = reference + 0.9 * torch.cos(2.3 * i - 1.1 * token)
    return policy.log_softmax(dim=-1), reference.log_softmax(dim=-1)


def answers(tree: Tree) -> list[list[int]]:
    """The ids of every answer, without the end token."""
    rows = [row[mask].tolist() for row, mask in zip(tree.tokens, tree.mask, strict=True)]
    return [[token for token in row if token != EOS] for row in rows]


def spelt(ids: list[int]) -> str:
    """The text of ids of the small language."""
    return "".join(WORDS[token] for token in ids)


def score(table: Policy, tree: Tree, ids: list[int], *, ended: bool) -> float:
    """log π of ids, with the end token where the answer had one, in a tree's table."""
    prefix, total = 0, 0.0
    for token in ids + [EOS] * ended:
        total += table[prefix, token].item()
        prefix = int(tree.next_prefix[prefix, token])
    return total


def small() -> tuple[Again, dict[str, float]]:
    """Every answer of the small language, encoded again; and what might be called its KL, nats."""
    tree = grow_tree(vocab_size=len(WORDS), length=LENGTH, eos=EOS)
    policy, reference = small_tables(tree)
    encoder, sampled = small_encoder(), answers(tree)
    again = [encoder.encode(spelt(ids)).ids for ids in sampled]
    ended = (tree.tokens == EOS).any(dim=1).tolist()
    new = [
        [score(table, tree, ids, ended=end) for ids, end in zip(again, ended, strict=True)]
        for table in (policy, reference)
    ]
    chance = sequence_logprobs(policy, tree)
    pairs = list(zip(sampled, again, strict=True))
    made = Again(
        name="a, b, ab: exact",
        vocabulary=len(WORDS),
        weights=chance.exp(),
        sampled=False,
        changed=torch.tensor([float(old != ids) for old, ids in pairs]).double(),
        resized=torch.tensor([float(len(old) != len(ids)) for old, ids in pairs]).double(),
        log_ratio=torch.tensor(new[0], dtype=torch.float64) - chance,
    )
    scores = torch.tensor(new, dtype=torch.float64)
    return made, {
        "KL of the sampled ids (exact)": kl(policy, reference, tree).item(),
        "mean log-ratio of the sampled ids": made.share(
            gather(policy - reference, tree).sum(dim=1)
        ),
        "KL of the texts": _text_kl(policy, reference, tree),
        "mean log-ratio of the ids encoded again": made.share(scores[0] - scores[1]),
    }


def _text_kl(policy: Policy, reference: Policy, tree: Tree) -> float:
    """KL of the distributions over texts: ids that spell the same text are one outcome."""
    ended = (tree.tokens == EOS).any(dim=1).tolist()
    texts = [(spelt(ids), end) for ids, end in zip(answers(tree), ended, strict=True)]
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    index = torch.tensor([number[text] for text in texts])
    mass = [
        torch.zeros(len(number), dtype=torch.float64).index_add(
            0, index, sequence_logprobs(table, tree).exp()
        )
        for table in (policy, reference)
    ]
    return divergence(mass[0].log(), mass[1].log()).item()


def installed() -> list[Again]:
    """The real models whose packages are there."""
    found = []
    for name, label in REAL.items():
        try:
            base = load_base(ModelConfig(name=name, dtype="float32"), device=torch.device("cpu"))
        except ConfigError:
            continue
        found.append(real(base, label))
    return found


@torch.no_grad()
def real(base: Base, label: str) -> Again:
    """Sample from a model, decode, encode again, and score both with the same weights."""
    prompt = torch.tensor([base.tokenizer(PROMPT, add_special_tokens=False)["input_ids"]])
    batch = PromptBatch(
        prompt_tokens=prompt, prompt_mask=torch.ones_like(prompt, dtype=torch.bool), texts=(PROMPT,)
    )
    drawn = sample(
        base, batch, responses_per_prompt=RESPONSES, max_new_tokens=NEW_TOKENS, temperature=1.0,
        seed=SEED,
    )  # fmt: skip
    old, new = [], []
    for row, mask in zip(drawn.response_tokens, drawn.response_mask, strict=True):
        ids = [t for t in row[mask].tolist() if t not in base.eos_tokens.tolist()]
        if ids:
            text = str(base.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            old.append(ids)
            new.append(base.tokenizer(text, add_special_tokens=False)["input_ids"])
    differ = [i for i in range(len(old)) if old[i] != new[i]]
    changed = torch.tensor([float(a != b) for a, b in zip(old, new, strict=True)]).double()
    log_ratio = torch.zeros_like(changed)  # equal ids under equal weights: exactly 0
    if differ:
        sides = [_scored(base, prompt[0], [rows[i] for i in differ]) for rows in (new, old)]
        log_ratio[differ] = sides[0] - sides[1]
    resized = [float(len(a) != len(b)) for a, b in zip(old, new, strict=True)]
    return Again(
        name=label,
        vocabulary=len(base.tokenizer),
        weights=torch.full((len(old),), 1 / len(old), dtype=torch.float64),
        sampled=True,
        changed=changed,
        resized=torch.tensor(resized).double(),
        log_ratio=log_ratio,
    )


def _scored(
    base: Base, prompt: Int[Tensor, " prompt"], rows: list[list[int]]
) -> Float[Tensor, " answers"]:
    """log π of each row of ids after the prompt, nats."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = list(itertools.zip_longest(*rows, fillvalue=base.pad_token))
    tokens = torch.tensor(padded).T.contiguous()
    mask = length_mask(lengths, tokens.shape[1])
    both = torch.cat([prompt.expand(len(rows), -1), tokens], dim=1)
    logits = predicting_positions(
        base.lm(input_ids=both).logits,
        prompt_width=len(prompt), response_width=tokens.shape[1],
    )  # fmt: skip
    return torch.where(mask, token_logprobs(logits, tokens, 1.0), 0.0).double().sum(dim=1)
