"""What decoding an answer and encoding its text again does to ids, lengths and ratios."""

import itertools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
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
from tether.study.lessons.page import Cell, Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREY, ORANGE, VERMILLION, panels, styled
from tether.types import PromptBatch

WORDS = ("a", "b", "ab", "</s>")
EOS, LENGTH = 3, 4
REAL = {"builtin:smollm2-135m": "SmolLM2-135M", "builtin:glassllm": "glassllm"}
PROMPT = "The film was"
RESPONSES, NEW_TOKENS = 48, 24
SEED = 0

TEXT = (
    "A policy samples token ids. A text is what people read of them, and many id sequences spell "
    "the same text. A tokenizer returns one of them, which need not be the one that was sampled. "
    "A trainer that keeps the text and encodes it again later scores another answer than the one "
    "that earned the reward.",
    "The first table takes a language so small that every case can be listed: tokens a, b, ab and "
    "an end token, and a byte-pair encoder with the one merge a b → ab, built on the spot. "
    "Whenever the policy says a and then b, encoding turns the two tokens into one. The ratio "
    "π/π_old must be exactly 1 before the first gradient step, since nothing has been learnt. "
    "With ids encoded again it is not, on every answer that changed, and the clip acts on an "
    "error of book-keeping. The KL is wrong too: the log-ratios of the new ids, averaged over "
    "answers that were sampled as the old ids, are neither the KL of the tokens nor that of the "
    "texts.",
    "The second table does it with real models, where their packages are installed: answers "
    "sampled at temperature 1 after one prompt, decoded, encoded again. Tokenizers are made to "
    "encode people's text, and a sampled sequence is often not the segmentation that they would "
    "choose. An answer of another length shifts every later column against rewards, values and "
    "masks.",
    "So tether samples ids, stores ids and scores ids; text is made for reward functions and for "
    "people, and no text is encoded on the way to a ratio. The first minibatch of every update "
    "checks it: a ratio that is not 1 there stops the run.",
)

FORMULA = """\
ids y ~ π      text = decode(y)      y′ = encode(text)      y′ = y ?
ratio before any gradient step:   ρ = π(y′)/π(y)      must be 1, is 1 for every y′ = y"""

REMEMBER = (
    "Keep the sampled ids; decoding is one-way.",
    "Before the first gradient step every ratio is 1. If yours are not, look for "
    "encode(decode(…)).",
    "The change is silent: the texts are identical, the losses finite, the curves plausible.",
)


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


def small() -> tuple[Again, Table]:
    """Every answer of the small language, encoded again; exact."""
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
    log_ratio = torch.tensor(new[0], dtype=torch.float64) - torch.tensor(
        new[1], dtype=torch.float64
    )
    return made, _kl_table(made, policy, reference, tree, log_ratio)


def _kl_table(
    made: Again, policy: Policy, reference: Policy, tree: Tree, log_ratio: Float[Tensor, " answers"]
) -> Table:
    """Three numbers that might be called the KL, and a few answers."""
    k1 = (made.weights * gather(policy - reference, tree).sum(dim=1)).sum().item()
    rows: list[tuple[Cell, ...]] = [
        ("KL of the sampled ids (exact)", kl(policy, reference, tree).item()),
        ("mean log-ratio of the sampled ids", k1),
        ("KL of the texts", _text_kl(policy, reference, tree)),
        ("mean log-ratio of the ids encoded again", made.share(log_ratio)),
    ]
    return Table(
        caption="The small language: four numbers, one of which a careless trainer reports",
        columns=(Column(name="number"), Column(name="nats per response", format=".4f")),
        rows=tuple(rows),
    )


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


def shares_table(made: list[Again]) -> Table:
    """What encoding again does."""
    return Table(
        caption=f"Encoded again: all answers of the small language, and {RESPONSES} sampled "
        f"answers of at most {NEW_TOKENS} tokens after '{PROMPT}' for each model that is installed",
        columns=(
            Column(name="tokenizer"), Column(name="vocabulary", format=",d"),
            Column(name="other ids", format=".1%"), Column(name="± se", format=".1%"),
            Column(name="other length", format=".1%"),
            Column(name="smallest ratio", format=".3g"), Column(name="mean ratio", format=".3f"),
            Column(name="largest ratio", format=".3g"),
        ),
        rows=tuple(
            (
                each.name, each.vocabulary, each.share(each.changed), each.error,
                each.share(each.resized), *each.ratios,
            )
            for each in made
        ),
    )  # fmt: skip


def _shares(axis: Axes, made: list[Again]) -> None:
    """Share of answers that come back different."""
    places = torch.arange(len(made), dtype=torch.float64)
    for shift, of, color, name in (
        (-0.19, "changed", VERMILLION, "other ids"),
        (0.19, "resized", ORANGE, "another length"),
    ):
        shares = [100 * each.share(getattr(each, of)) for each in made]
        bars = axis.barh((places + shift).tolist(), shares, height=0.36, color=color, label=name)
        axis.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=8.5)
    axis.set_yticks(places.tolist(), [each.name for each in made])
    axis.invert_yaxis()
    axis.set(
        title="Answers that come back different", xlabel="% of sampled answers", xlim=(0, 50),
    )  # fmt: skip
    axis.grid(visible=False, axis="y")
    axis.legend(loc="lower right")


def _ratios(axis: Axes, made: list[Again]) -> None:
    """log10 of each answer's ratio, one row a tokenizer."""
    for place, each in enumerate(made):
        logs = each.log_ratio / torch.log(torch.tensor(10.0))
        spread = torch.linspace(-0.28, 0.28, len(logs)) + place
        sizes = (18 + 400 * each.weights.clamp(max=0.1)).tolist()
        colors = [VERMILLION if c else BLUE for c in each.changed.tolist()]
        axis.scatter(logs, spread, s=sizes, c=colors, alpha=0.75, linewidths=0)
    axis.axvline(0, color=GREY, linewidth=1)
    axis.set_yticks(range(len(made)), [""] * len(made))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(
        title="Ratio of an answer before any gradient step",
        xlabel="log10 of the ratio; 0 where the ids are the sampled ones (blue)",
        ylim=(len(made) - 0.5, -0.5),
    )  # fmt: skip


@styled
def draw(made: list[Again]) -> Figure:
    """Shares that change, and the ratios that result."""
    figure, axes = panels(2, width=11, height=3.6)
    _shares(axes[0], made)
    _ratios(axes[1], made)
    return figure


def lesson() -> Lesson:
    """Encode answers again: all of a small language, samples of real models."""
    exact, kls = small()
    made = [exact, *installed()]
    return Lesson(
        name="tokens",
        title="A ratio is made of the sampled ids, never of a text that was encoded again",
        text=TEXT,
        formula=FORMULA,
        tables=(kls, shares_table(made)),
        figure=draw(made),
        figure_caption="Left: share of sampled answers that come back from decode and encode with "
        "other ids or another number of them. Right: the ratio of each answer before any gradient "
        "step; it should be 1, at the vertical line.",
        remember=REMEMBER,
    )
