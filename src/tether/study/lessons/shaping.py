"""The shaped reward of every token, by hand and by the production function, and its advantages."""

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tether.core.advantages import gae
from tether.core.shaping import shape_rewards
from tether.exact.enumerate import read_table, sequence_logprobs
from tether.exact.languages import letters
from tether.exact.optimum import optimum
from tether.exact.tree import gather
from tether.study.lessons.page import Cell, Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREEN, GREY, ORANGE, VERMILLION, panels, styled

LOGPROBS = (-0.8, -1.6, -0.6, -1.8, -0.7, -1.5)
REF_LOGPROBS = (-1.5, -0.9, -1.8, -0.9, -1.9, -0.8)
SCORE, KL_COEF = 0.8, 0.5
LAMBDAS = (1.0, 0.95, 0.0)
RESPONSES = 6
"""Responses of the letters language in the second table."""

Row = Float[Tensor, " response"]

TEXT = (
    "A reward model reads a whole answer and gives one number. The policy, however, chooses token "
    "by token, and the KL penalty belongs to the tokens that caused it. So the two are joined in "
    "one reward per token: every token pays β times its own log-ratio, and the last token also "
    "receives the score.",
    "The first table works one answer of six tokens through. A token that the policy finds "
    "likelier than the reference does (t = 1, 3, 5) has a positive log-ratio and pays. A token "
    "that it finds less likely (t = 2, 4, 6) has a negative one and is paid back. A single "
    "log-ratio is therefore no distance and may have any sign; only its mean over answers "
    "sampled from the policy is KL(π‖π_ref), which cannot be negative. Clamping it at 0 would "
    "charge for every deviation and refund none, which is another objective.",
    "An advantage is not the reward of one token but what follows from choosing it. With no value "
    "function and λ = 1 it is the sum of this and all later rewards: the token at t = 1 gets the "
    "whole shaped return. At λ = 0 it would get its own reward alone and never hear of the score, "
    "which is paid at the end. That is why a discount below 1 is refused while the KL is in the "
    "reward: it makes the nats spent late cheaper than those spent early.",
    "When is training over? The second table takes a language so small that its optimum is known: "
    "π* is proportional to π_ref·exp(r/β). There every answer has the same shaped return, β·log Z, "
    "whatever its score: good answers have spent exactly the nats that their score is worth. With "
    "the right values, every advantage is 0 and nothing is left to learn.",
)

FORMULA = """\
r̃ₜ = −β (log π(aₜ|sₜ) − log π_ref(aₜ|sₜ)) + [t is the last token] · score
δₜ = r̃ₜ + γ V(sₜ₊₁) − V(sₜ)        Âₜ = δₜ + γλ Âₜ₊₁        γ = 1

at π*:  Σₜ r̃ₜ = r(y) − β log π*(y)/π_ref(y) = β log Z   for every answer y"""

REMEMBER = (
    "The score arrives once, at the last real token; the KL is charged where it arises, per token.",
    "The charge is the signed log-ratio, unclamped, with γ = 1: its mean is the KL per response.",
    "At the optimum every answer has the same shaped return, β·log Z: no advantage is left.",
)


def worked() -> tuple[Row, Row, Row]:
    """Log-ratio, score per token and shaped reward of the worked example, in production."""
    old, ref = (torch.tensor([row], dtype=torch.float64) for row in (LOGPROBS, REF_LOGPROBS))
    mask, score = torch.ones_like(old, dtype=torch.bool), torch.tensor([SCORE], dtype=old.dtype)
    shaped = shape_rewards(score, old, ref, mask, kl_coef=KL_COEF)
    sparse = shape_rewards(score, old, ref, mask, kl_coef=0.0)
    return (old - ref)[0], sparse[0], shaped[0]


def advantages(shaped: Row, gae_lambda: float) -> Row:
    """Production GAE without a value function."""
    rewards = shaped[None]
    mask = torch.ones_like(rewards, dtype=torch.bool)
    blank = torch.zeros_like(rewards)
    return gae(rewards, blank, mask, gamma=1.0, gae_lambda=gae_lambda).advantages[0]


def by_hand(log_ratio: Row, sparse: Row, shaped: Row) -> Table:
    """The worked example token by token, with its totals."""
    gained = [advantages(shaped, each) for each in LAMBDAS]
    columns = (log_ratio, -KL_COEF * log_ratio, sparse, shaped)
    rows: list[tuple[Cell, ...]] = [
        (
            f"{t + 1}", LOGPROBS[t], REF_LOGPROBS[t],
            *(c[t].item() for c in columns), *(a[t].item() for a in gained),
        )
        for t in range(len(LOGPROBS))
    ]  # fmt: skip
    total = ("sum", "", "", *(c.sum().item() for c in columns), *("" for _ in gained))
    return Table(
        caption=f"One answer of six tokens, score {SCORE}, β = {KL_COEF} reward per nat",
        columns=(
            Column(name="t"), Column(name="log π", format=".2f"),
            Column(name="log π_ref", format=".2f"), Column(name="log-ratio, nats", format="+.2f"),
            Column(name="−β·log-ratio", format="+.2f"), Column(name="score", format=".2f"),
            Column(name="shaped r̃ₜ", format="+.2f"),
            *(Column(name=f"Âₜ at λ = {each:g}", format="+.3f") for each in LAMBDAS),
        ),
        rows=(*rows, total),
    )  # fmt: skip


def at_the_optimum() -> Table:
    """Shaped returns of answers of the letters language under the reference and under π*."""
    language = letters()
    tree, rewards = language.tree, language.rewards
    reference = read_table(language.reference, tree, prompt=language.prompt)
    best = optimum(reference, rewards, tree, kl_coef=KL_COEF).policy
    shaped = shape_rewards(
        rewards, gather(best, tree), gather(reference, tree), tree.mask, kl_coef=KL_COEF
    ).sum(dim=1)
    chances = [sequence_logprobs(table, tree).exp() for table in (reference, best)]
    chosen = rewards.argsort(descending=True)[:: len(rewards) // (RESPONSES - 1)].tolist()
    rows = []
    for i in chosen:
        tokens = tree.tokens[i][tree.mask[i]].tolist()
        words = " ".join(language.words[a] for a in tokens)
        numbers = (chances[0][i], chances[1][i], rewards[i], (chances[1] / chances[0]).log()[i])
        rows.append((f"`{words}`", *(n.item() for n in numbers), shaped[i].item()))
    return Table(
        caption=f"Answers of the two-letter language at its optimum, β = {KL_COEF}: every shaped "
        "return is β·log Z",
        columns=(
            Column(name="answer"), Column(name="π_ref(y)", format=".5f"),
            Column(name="π*(y)", format=".5f"), Column(name="score r(y)", format="+.4f"),
            Column(name="log π*/π_ref, nats", format="+.4f"),
            Column(name="shaped return", format=".6f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _bars(axis: Axes, values: Row, title: str, color: str) -> None:
    """One number over each token."""
    steps = range(1, len(values) + 1)
    axis.bar(steps, values.tolist(), color=color, width=0.7)
    axis.axhline(0, color=GREY, linewidth=0.9)
    for t, value in zip(steps, values.tolist(), strict=True):
        if value:
            up = value > 0
            axis.annotate(
                f"{value:+.2f}".replace("-", "−"), (t, value), xytext=(0, 3 if up else -3),
                textcoords="offset points", ha="center", va="bottom" if up else "top", fontsize=7.5,
            )  # fmt: skip
    axis.set(title=title, xlabel="token t", xticks=list(steps))
    axis.grid(visible=False, axis="x")


@styled
def draw(log_ratio: Row, sparse: Row, shaped: Row) -> Figure:
    """Score, KL charge and their sum, token by token; then the advantages."""
    figure, axes = panels(4, width=11.5, height=3.3)
    _bars(axes[0], sparse, "The score …", BLUE)
    _bars(axes[1], -KL_COEF * log_ratio, "… the KL charge …", VERMILLION)
    _bars(axes[2], shaped, "… and their sum", GREEN)
    for axis in axes:
        axis.set(ylim=(-0.85, 1.45), yticks=(-0.5, 0, 0.5, 1))
    axes[0].set_ylabel("reward units")
    dashes = ("-", "--", ":")
    for each, dash, color in zip(LAMBDAS, dashes, (BLUE, ORANGE, VERMILLION), strict=True):
        gained = advantages(shaped, each).tolist()
        axes[3].plot(range(1, 7), gained, dash, marker="o", color=color, label=f"λ = {each:g}")
    axes[3].axhline(0, color=GREY, linewidth=0.9)
    axes[3].set(title="Advantage of each token", xlabel="token t")
    axes[3].set_xticks(range(1, 7))
    axes[3].legend(loc="upper left", ncols=3, columnspacing=0.9, handlelength=1.6, fontsize=8)
    return figure


def lesson() -> Lesson:
    """Work the example through and solve the small language."""
    example = worked()
    return Lesson(
        name="shaping",
        title="One score and a charge per token make one reward per token",
        text=TEXT,
        formula=FORMULA,
        tables=(by_hand(*example), at_the_optimum()),
        figure=draw(*example),
        figure_caption="The worked example: the score at the last token, the charge −β·log-ratio "
        "on every token, the shaped reward, and the advantages that GAE makes of it without a "
        "value function, in reward units.",
        remember=REMEMBER,
    )
