"""KL as extra code length, measured with an arithmetic coder; the frontier as rate-distortion."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tether.exact import markov
from tether.exact.frontier import most_reward
from tether.exact.languages import REWARDED_TOKEN, eight_tokens
from tether.exact.markov import Chain
from tether.exact.optimum import Point
from tether.generation.sampler import inverse_cdf
from tether.study.lessons.page import Cell, Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREY, INK, ORANGE, VERMILLION, panels, styled

KL_COEFS = (1.0, 0.5, 0.3, 0.2)
RESPONSES = 4000
SEED = 0
BITS = 32
"""Width of the coder's interval."""
TOTAL = 1 << 24
"""A law's probabilities are coded as whole numbers of this sum."""
STEP = 1e-3
"""Nats either side of a point for the slope of the frontier."""
CURVE = tuple(10 ** (1 - i / 24) for i in range(60))

Counts = list[list[list[int]]]

TEXT = (
    "A language model is a code: an arithmetic coder that is given its probabilities spends −log "
    "p nats on a text of probability p, and no code does better on texts that the model writes. "
    "So how long are the policy's answers in the reference's code? They cost what they would cost "
    "in the policy's own code, plus KL(π‖π_ref). The KL is the price of describing the new "
    "behaviour in terms of the old.",
    "The first table measures it. From the optimum π* of the eight-token language at several β we "
    "sample thousands of answers and compress them, all in one stream, with a real arithmetic "
    "coder: once with the reference's probabilities, once with the policy's. The excess agrees "
    "with the exact KL within two standard errors, which come from the sampled answers alone: on "
    "the same answers the coder itself spends less than a thousandth of a nat more than −log π.",
    "Turned round, the frontier is a rate-distortion curve. How many nats must an answer carry "
    "beyond what the reference knows, for the expected reward to reach R? The least number is "
    "KL(R), attained by π* ∝ π_ref·exp(r/β), which is also the form of Shannon's solution, and β "
    "is the slope: one nat more buys β of reward (second table). The first nats are cheap, the "
    "last ones are dear, and a budget in nats says how much the training may have taught.",
)

FORMULA = """\
E_π[−log π_ref(y)]  =  H(π)  +  KL(π‖π_ref)            1 nat = 1/ln 2 = 1.4427 bits
 reference's code     own code   extra length
KL(R) = min KL(π‖π_ref)  subject to  E_π[r] ≥ R         dR/dKL = β"""

REMEMBER = (
    "KL(π‖π_ref) in nats per response is the extra length of an answer in the reference's code.",
    "The frontier is a rate-distortion curve: β is its slope, the price of a nat.",
    "Bits and nats differ by ln 2 = 0.693; tether says nats everywhere.",
)


class Encoder:
    """Arithmetic coder with carry-over bits; counts of whole numbers in, number of bits out.

    Source:
        Witten, Neal and Cleary 1987, "Arithmetic coding for data compression".
    """

    def __init__(self) -> None:
        self.low, self.high, self.waiting, self.bits = 0, (1 << BITS) - 1, 0, 0

    def write(self, below: int, through: int) -> None:
        """Code the symbol whose cumulative counts out of TOTAL are `below` to `through`."""
        span = self.high - self.low + 1
        self.high = self.low + span * through // TOTAL - 1
        self.low += span * below // TOTAL
        half, quarter = 1 << (BITS - 1), 1 << (BITS - 2)
        while True:
            if self.high < half or self.low >= half:  # the first bit is known
                self.bits += 1 + self.waiting
                self.waiting = 0
                self.low, self.high = self.low % half, self.high % half
            elif self.low >= quarter and self.high < half + quarter:  # it will be known later
                self.waiting += 1
                self.low, self.high = self.low - quarter, self.high - quarter
            else:
                return
            self.low, self.high = 2 * self.low, 2 * self.high + 1

    def finish(self) -> int:
        """Bits of the whole stream."""
        return self.bits + self.waiting + 2


def counts(chain: Chain) -> Counts:
    """Cumulative whole counts of each law, every token at least 1."""
    probs = chain.exp()
    whole = (probs * (TOTAL - 2 * probs.shape[-1])).floor().long() + 1
    rest = TOTAL - whole.sum(dim=-1, keepdim=True)
    whole = whole.scatter_add(-1, probs.argmax(dim=-1, keepdim=True), rest)
    return torch.nn.functional.pad(whole.cumsum(dim=-1), (1, 0)).tolist()


def code_length(responses: Int[Tensor, "count time"], chain: Chain) -> float:
    """Nats that the coder spends on a response, all of them in one stream."""
    table, encoder = counts(chain), Encoder()
    for response in responses.tolist():
        before = 0
        for t, token in enumerate(response):
            cumulative = table[t][before]
            encoder.write(cumulative[token], cumulative[token + 1])
            before = token
    return encoder.finish() * math.log(2) / len(responses)


def draw_responses(chain: Chain, *, count: int) -> Int[Tensor, "count time"]:
    """Sample responses of a chain with the production sampler's draw."""
    generator = torch.Generator().manual_seed(SEED)
    columns = [torch.zeros(count, dtype=torch.long)]
    for step in chain:
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        columns.append(inverse_cdf(step[columns[-1]], uniform))
    return torch.stack(columns[1:], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Code lengths of a policy's responses, nats per response.

    Attributes:
        point: exact reward and KL.
        entropy: exact, of the policy.
        own: measured length in the policy's own code.
        reference: measured length in the reference's code.
        error: standard error of their difference.
        overhead: `own` less the mean −log π of the same responses.
    """

    point: Point
    entropy: float
    own: float
    reference: float
    error: float
    overhead: float


@cache
def setting() -> tuple[Chain, Float[Tensor, " vocab"]]:
    """The eight-token reference and its reward per token."""
    language = eight_tokens()
    rewards = torch.zeros(len(language.words), dtype=torch.float64)
    rewards[REWARDED_TOKEN] = 1.0
    return markov.read_chain(language.reference, length=language.length), rewards


def measure(kl_coef: float) -> Measured:
    """Compress samples of π* with both codes."""
    reference, rewards = setting()
    best = markov.optimum(reference, rewards, start=0, kl_coef=kl_coef)
    drawn = draw_responses(best.policy, count=RESPONSES)
    before = torch.cat([torch.zeros_like(drawn[:, :1]), drawn[:, :-1]], dim=1)
    steps = torch.arange(drawn.shape[1]).expand_as(drawn)
    logprobs = best.policy[steps, before, drawn].sum(dim=1)
    log_ratio = logprobs - reference[steps, before, drawn].sum(dim=1)
    own = code_length(drawn, best.policy)
    return Measured(
        point=best.point,
        entropy=markov.entropy(best.policy, start=0).item(),
        own=own,
        reference=code_length(drawn, reference),
        error=log_ratio.std().item() / math.sqrt(RESPONSES),
        overhead=own + logprobs.mean().item(),
    )


def lengths_table(measured: list[Measured]) -> Table:
    """Measured excess beside the exact KL."""
    rows: list[tuple[Cell, ...]] = [
        (
            m.point.kl_coef, m.entropy, m.own, m.overhead, m.reference, m.reference - m.own,
            m.error, m.point.kl, m.point.kl / math.log(2),
        )
        for m in measured
    ]  # fmt: skip
    return Table(
        caption=f"{RESPONSES:,} answers of π* in one arithmetic-coded stream; nats per response",
        columns=(
            Column(name="β", format=".1f"), Column(name="H(π), exact", format=".4f"),
            Column(name="own code", format=".4f"),
            Column(name="more than −log π", format=".5f"),
            Column(name="reference's code", format=".4f"),
            Column(name="excess, measured", format=".4f"), Column(name="± se", format=".4f"),
            Column(name="KL(π‖π_ref), exact", format=".4f"), Column(name="KL, bits", format=".4f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def solve(kl_coef: float) -> Point:
    """The optimum at one β."""
    reference, rewards = setting()
    return markov.optimum(reference, rewards, start=0, kl_coef=kl_coef).point


def slopes(points: list[Point]) -> Iterator[float]:
    """dR/dKL by a difference along the frontier, each end found by bisection."""
    for point in points:
        more, less = (most_reward(solve, point.kl + side).reward for side in (STEP, -STEP))
        yield (more - less) / (2 * STEP)


def rates_table(measured: list[Measured]) -> Table:
    """The frontier: reward, least nats, slope."""
    points = [m.point for m in measured]
    found = zip(points, slopes(points), strict=True)
    base = solve(1e6).reward
    return Table(
        caption="The frontier as rate against distortion; the reward is at most 6",
        columns=(
            Column(name="β", format=".1f"), Column(name="rate: least KL, nats", format=".4f"),
            Column(name="E[r]", format=".4f"), Column(name="distortion: 6 − E[r]", format=".4f"),
            Column(name="gain per nat so far", format=".4f"),
            Column(name="slope dR/dKL", format=".6f"),
        ),
        rows=tuple(
            (p.kl_coef, p.kl, p.reward, 6 - p.reward, (p.reward - base) / p.kl, slope)
            for p, slope in found
        ),
    )  # fmt: skip


def _lengths(axis: Axes, measured: list[Measured]) -> None:
    """Entropy and KL as one bar, the measured lengths as marks."""
    places = list(range(len(measured)))
    entropy, kl = [m.entropy for m in measured], [m.point.kl for m in measured]
    axis.bar(places, entropy, width=0.55, color="#9ca3af", label="H(π), exact")
    axis.bar(places, kl, width=0.55, bottom=entropy, color=ORANGE, label="KL(π‖π_ref), exact")
    axis.plot(places, [m.own for m in measured], "_", color=BLUE, markersize=26,
              markeredgewidth=2.5, label="own code, measured")  # fmt: skip
    axis.plot(places, [m.reference for m in measured], "_", color=VERMILLION, markersize=26,
              markeredgewidth=2.5, label="reference's code, measured")  # fmt: skip
    axis.set_xticks(places, [f"{m.point.kl_coef:g}" for m in measured])
    axis.set(
        title="Length of an answer in two codes", xlabel="β (reward per nat)",
        ylabel="nats per response",
    )  # fmt: skip
    axis.grid(visible=False, axis="x")
    axis.legend(loc="upper left")


@styled
def draw(measured: list[Measured], curve: list[Point]) -> Figure:
    """Code lengths, and the frontier with its slopes."""
    figure, axes = panels(2, width=10.5, height=3.9)
    _lengths(axes[0], measured)
    axes[1].plot([p.kl for p in curve], [6 - p.reward for p in curve], color=INK)
    for m in measured:
        p = m.point
        axes[1].plot(p.kl, 6 - p.reward, "o", color=ORANGE, markersize=7)
        reach = 3 / p.kl_coef**0.5
        ends = (p.kl - min(reach, p.kl), p.kl + reach)
        line = [6 - p.reward - p.kl_coef * (x - p.kl) for x in ends]
        axes[1].plot(ends, line, "--", color=BLUE, linewidth=1.2)
        axes[1].annotate(
            f"β = {p.kl_coef:g}", (p.kl, 6 - p.reward), xytext=(8, 5), textcoords="offset points",
            fontsize=8.5,
        )  # fmt: skip
    axes[1].axhline(0, color=GREY, linewidth=0.9)
    axes[1].set(
        title="Rate and distortion: the slope is −β", xlabel="rate: KL(π‖π_ref), nats per response",
        ylabel="distortion: 6 − E[r], reward units", ylim=(-0.2, 5.4), xlim=(-0.5, 24),
    )  # fmt: skip
    return figure


def lesson() -> Lesson:
    """Compress samples of the optima and read the frontier."""
    measured = [measure(kl_coef) for kl_coef in KL_COEFS]
    curve = [solve(kl_coef) for kl_coef in CURVE]
    return Lesson(
        name="information",
        title="KL is the extra length of the policy's answers in the reference's code",
        text=TEXT,
        formula=FORMULA,
        tables=(lengths_table(measured), rates_table(measured)),
        figure=draw(measured, curve),
        figure_caption="Left: exact entropy and KL stacked, with the measured length of an answer "
        "in the policy's own code and in the reference's. Right: the reward still missing against "
        "the least KL, with tangents of slope −β.",
        remember=REMEMBER,
    )
