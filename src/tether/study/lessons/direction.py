"""KL(π‖π_ref) and KL(π_ref‖π) on the same pairs: what each forbids, finds and costs to measure."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tether.core.kl import full_kl
from tether.exact.enumerate import expectation, read_table, sequence_logprobs
from tether.exact.languages import letters
from tether.exact.optimum import divergence, optimum
from tether.study.lessons.page import Cell, Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREY, VERMILLION, panels, styled

POINTS, REACH = 321, 8.0
PEAKS = ((0.6, -2.0, 0.7), (0.4, 2.5, 0.7))
"""Weight, place and width of the reference's peaks."""
VALLEY = (-0.5, 1.0)
KL_COEFS = (2.0, 1.0, 0.5, 0.25)
PRECISION = 0.1

Law = Float[Tensor, " points"]
Divergence = Callable[[Law, Law], Float[Tensor, ""]]

TEXT = (
    "KL is not a distance: its two arguments play different roles. KL(π‖π_ref) averages the "
    "log-ratio over what the policy says, KL(π_ref‖π) over what the reference says. The first asks "
    "'does the policy say things that the reference would not?', the second 'does the policy still "
    "say everything that the reference would?'.",
    "The first table shows it with three words. A policy that drops a word costs a finite "
    "KL(π‖π_ref) and an infinite KL(π_ref‖π); a policy that invents a word, the other way round. "
    "A penalty on KL(π‖π_ref) therefore lets a policy concentrate and never lets it leave the "
    "reference's vocabulary of behaviour. That is what one wants of RLHF: to choose among the "
    "things that the reference can do.",
    "Fitted to a reference with two peaks, a policy that can have one peak only shows the same at "
    "a glance (second table, figure). Minimising KL(π‖π_ref) takes one peak and leaves the other: "
    "mode-seeking. Minimising KL(π_ref‖π) covers both, and puts a quarter of its mass into the "
    "valley, where the reference has less than two per cent: mass-covering. Supervised "
    "fine-tuning and distillation on the teacher's samples minimise the second.",
    "The third table is about cost. A training run has answers of π at hand. On them the mean "
    "log-ratio is KL(π‖π_ref). The other order needs each answer weighted by π_ref/π, and the "
    "weights run away as the policy moves: at β = 0.5 it takes more than a thousand times as many "
    "answers to know KL(π_ref‖π) as well as KL(π‖π_ref), at β = 0.25 hundreds of millions of "
    "times.",
    "Names: most of the RLHF literature calls KL(π‖π_ref) the reverse KL, others exclusive, "
    "mode-seeking, or I-projection; KL(π_ref‖π) is called forward, inclusive, mass-covering, or "
    "M-projection. Some texts swap forward and reverse. tether names the arguments, policy first, "
    "and so does this page.",
)

FORMULA = """\
KL(π‖π_ref) = Σ_y π(y) log π(y)/π_ref(y)          ∞ where π(y) > 0 = π_ref(y)
KL(π_ref‖π) = Σ_y π_ref(y) log π_ref(y)/π(y)      ∞ where π_ref(y) > 0 = π(y)
with y ~ π and w = π_ref(y)/π(y):   KL(π‖π_ref) = E[−log w]      KL(π_ref‖π) = E[w log w]"""

REMEMBER = (
    "KL(π‖π_ref) forbids saying what the reference would not; it allows saying less.",
    "So diversity can go under a small KL: watch entropy and distinct answers beside it.",
    "Samples of the policy give KL(π‖π_ref) for nothing; the other order costs importance weights.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A bell curve fitted to the two peaks.

    Attributes:
        name: which divergence was minimised.
        mean: of the curve.
        deviation: of the curve.
        logits: log-probabilities on the grid, up to a constant.
    """

    name: str
    mean: float
    deviation: float
    logits: Law


def three_words() -> Table:
    """Both orders where one of two distributions lacks a word."""
    pairs = {
        "π drops a word": ((0.6, 0.4, 0.0), (0.5, 0.3, 0.2)),
        "π invents a word": ((0.5, 0.3, 0.2), (0.6, 0.4, 0.0)),
        "π makes a word rare": ((0.6, 0.399, 0.001), (0.5, 0.3, 0.2)),
        "π makes a rare word usual": ((0.5, 0.3, 0.2), (0.6, 0.399, 0.001)),
    }
    rows: list[tuple[Cell, ...]] = []
    for name, laws in pairs.items():
        policy, reference = (torch.tensor(law, dtype=torch.float64).log() for law in laws)
        there, back = divergence(policy, reference).item(), divergence(reference, policy).item()
        rows.append((name, str(laws[0]), str(laws[1]), there, back))
    return Table(
        caption="Three words, nats",
        columns=(
            Column(name=""), Column(name="π"), Column(name="π_ref"),
            Column(name="KL(π‖π_ref)", format=".4f"), Column(name="KL(π_ref‖π)", format=".4f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def grid() -> Law:
    """Where the distributions live."""
    return torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)


def two_peaks() -> Law:
    """The reference's log-probabilities."""
    x = grid()
    parts = [
        math.log(weight / width) - ((x - place) / width) ** 2 / 2 for weight, place, width in PEAKS
    ]
    return torch.stack(parts).logsumexp(dim=0).log_softmax(dim=0)


def bell(parameters: Float[Tensor, " two"]) -> Law:
    """A bell curve's log-probabilities up to a constant, from its mean and log deviation."""
    return -(((grid() - parameters[0]) / parameters[1].exp()) ** 2) / 2


def fit(name: str, lost: Divergence, start: float) -> Fit:
    """Minimise a divergence to the reference over bell curves, from one start."""
    reference = two_peaks()
    parameters = torch.tensor([start, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Float[Tensor, ""]:
        optimizer.zero_grad()
        value = lost(bell(parameters), reference)
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[arg-type]
    best = parameters.detach()
    return Fit(
        name=name, mean=best[0].item(), deviation=best[1].exp().item(),
        logits=bell(best).log_softmax(dim=0),
    )  # fmt: skip


def fits() -> list[Fit]:
    """Both orders; the first has a minimum at each peak."""
    return [
        fit("KL(π‖π_ref)", full_kl, -2.0),
        fit("KL(π‖π_ref), other start", full_kl, 2.5),
        fit("KL(π_ref‖π)", lambda policy, reference: full_kl(reference, policy), 0.0),
    ]


def fits_table(made: list[Fit]) -> Table:
    """What each order finds."""
    reference, x = two_peaks(), grid()
    valley = (x > VALLEY[0]) & (x < VALLEY[1])
    rows: list[tuple[Cell, ...]] = [
        (
            each.name, each.mean, each.deviation,
            full_kl(each.logits, reference).item(), full_kl(reference, each.logits).item(),
            each.logits.exp()[valley].sum().item(),
        )
        for each in made
    ]  # fmt: skip
    mean = (reference.exp() * x).sum()
    deviation = (reference.exp() * (x - mean) ** 2).sum().sqrt()
    low = reference.exp()[valley].sum().item()
    rows.append(("the reference itself", mean.item(), deviation.item(), 0.0, 0.0, low))
    return Table(
        caption="One bell curve fitted to a reference with two peaks",
        columns=(
            Column(name="minimised"), Column(name="mean", format=".3f"),
            Column(name="sd", format=".3f"), Column(name="KL(π‖π_ref), nats", format=".4f"),
            Column(name="KL(π_ref‖π), nats", format=".4f"),
            Column(name="mass in the valley", format=".4f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Both orders estimated from answers of the policy.

    Attributes:
        kl_coef: β of the optimal policy.
        means: KL(π‖π_ref) and KL(π_ref‖π), nats.
        answers: needed to know each to 10 %, one standard error.
    """

    kl_coef: float
    means: tuple[float, float]
    answers: tuple[float, float]


def cost(kl_coef: float) -> Cost:
    """Exact mean and variance of both estimates at an optimum of the two-letter language."""
    language = letters()
    tree = language.tree
    reference = read_table(language.reference, tree, prompt=language.prompt)
    policy = optimum(reference, language.rewards, tree, kl_coef=kl_coef).policy
    log_weight = sequence_logprobs(reference, tree) - sequence_logprobs(policy, tree)
    means, answers = [], []
    for values in (-log_weight, log_weight.exp() * log_weight):
        mean = expectation(values, policy, tree)
        variance = expectation((values - mean) ** 2, policy, tree)
        means.append(mean.item())
        answers.append((variance / (PRECISION * mean) ** 2).item())
    return Cost(kl_coef=kl_coef, means=(means[0], means[1]), answers=(answers[0], answers[1]))


def costs_table(costs: list[Cost]) -> Table:
    """How many answers each order takes."""
    return Table(
        caption="Two-letter language, answers sampled from π* at several β: both orders, and how "
        "many answers give each to 10 %",
        columns=(
            Column(name="β", format=".2f"), Column(name="KL(π‖π_ref), nats", format=".4f"),
            Column(name="KL(π_ref‖π), nats", format=".4f"),
            Column(name="answers for KL(π‖π_ref)", format=",.0f"),
            Column(name="answers for KL(π_ref‖π)", format=",.0f"),
        ),
        rows=tuple((c.kl_coef, *c.means, *c.answers) for c in costs),
    )  # fmt: skip


def _curves(axis: Axes, made: list[Fit]) -> None:
    """The reference and the fitted curves."""
    x, step = grid().tolist(), 2 * REACH / (POINTS - 1)
    density = (two_peaks().exp() / step).tolist()
    axis.fill_between(x, density, color="#d1d5db", label="π_ref, two peaks")
    looks = ((BLUE, "-"), (BLUE, ":"), (VERMILLION, "--"))
    for each, (color, dash) in zip(made, looks, strict=True):
        axis.plot(x, (each.logits.exp() / step).tolist(), dash, color=color, label=each.name)
    axis.set(
        title="One bell curve fitted to two peaks", xlabel="x", ylabel="probability density",
        xlim=(-7, 7), ylim=(0, 0.82),
    )  # fmt: skip
    axis.legend(loc="upper left", ncols=2, fontsize=8.5)


def _orders(axis: Axes) -> None:
    """Both orders for a policy that makes one of two words rare or usual."""
    shares = torch.linspace(0.001, 0.999, 400, dtype=torch.float64)
    policy = torch.stack([shares, 1 - shares], dim=1).log()
    reference = torch.tensor([0.8, 0.2], dtype=torch.float64).log().expand_as(policy)
    axis.plot(shares, full_kl(policy, reference), color=BLUE, label="KL(π‖π_ref)")
    axis.plot(shares, full_kl(reference, policy), "--", color=VERMILLION, label="KL(π_ref‖π)")
    axis.axvline(0.8, color=GREY, linewidth=0.9)
    axis.annotate("π = π_ref", (0.785, 1.9), ha="right", fontsize=8.5, color=GREY)
    axis.set(
        title="Two words, π_ref = (0.8, 0.2)", xlabel="π(first word)", ylabel="nats", ylim=(0, 3.5)
    )
    axis.legend(loc="upper center")


@styled
def draw(made: list[Fit], costs: list[Cost]) -> Figure:
    """Fits, both orders on two words, what each costs to measure."""
    figure, axes = panels(3, width=12.5, height=3.6)
    _curves(axes[0], made)
    _orders(axes[1])
    x = [c.means[0] for c in costs]
    axes[2].plot(x, [c.answers[0] for c in costs], "-o", color=BLUE, label="KL(π‖π_ref)")
    axes[2].plot(x, [c.answers[1] for c in costs], "--s", color=VERMILLION, label="KL(π_ref‖π)")
    axes[2].set(
        title="Answers of π needed for 10 %", xlabel="KL(π‖π_ref), nats per response",
        ylabel="answers", yscale="log",
    )  # fmt: skip
    axes[2].legend(loc="upper left")
    return figure


def lesson() -> Lesson:
    """Both orders, side by side."""
    made, costs = fits(), [cost(kl_coef) for kl_coef in KL_COEFS]
    return Lesson(
        name="direction",
        title="KL(π‖π_ref) forbids the new, KL(π_ref‖π) forbids forgetting",
        text=TEXT,
        formula=FORMULA,
        tables=(three_words(), fits_table(made), costs_table(costs)),
        figure=draw(made, costs),
        figure_caption="Left: a bell curve fitted to a two-peaked reference in both orders. "
        "Middle: both orders for two words; one is finite at the ends, the other is not. Right: "
        "answers of the policy needed to know each to 10 %, on a logarithmic scale.",
        remember=REMEMBER,
    )
