"""What decoding an answer and encoding its text again does to ids, lengths and ratios."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tether.study.lessons.encoded_again import (
    NEW_TOKENS,
    PROMPT,
    RESPONSES,
    Again,
    installed,
    small,
)
from tether.study.lessons.page import Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREY, ORANGE, VERMILLION, panels, styled

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


def kl_table(numbers: dict[str, float]) -> Table:
    """Four numbers that might be called the KL."""
    return Table(
        caption="The small language: four numbers, one of which a careless trainer reports",
        columns=(Column(name="number"), Column(name="nats per response", format=".4f")),
        rows=tuple(numbers.items()),
    )


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
    exact, numbers = small()
    made = [exact, *installed()]
    return Lesson(
        name="tokens",
        title="A ratio is made of the sampled ids, never of a text that was encoded again",
        text=TEXT,
        formula=FORMULA,
        tables=(kl_table(numbers), shares_table(made)),
        figure=draw(made),
        figure_caption="Left: share of sampled answers that come back from decode and encode with "
        "other ids or another number of them. Right: the ratio of each answer before any gradient "
        "step; it should be 1, at the vertical line.",
        remember=REMEMBER,
    )
