"""Reward against √KL: the sweet spot, stopping by held-out preference, best-of-n beside it."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tether.exact.enumerate import Table as Policy
from tether.exact.enumerate import sequence_logprobs
from tether.exact.languages import hackable, letters
from tether.exact.optimum import best_of_n, best_of_n_bound, divergence, optimum
from tether.study.ascent import Task, ascend, task_of
from tether.study.lessons.page import Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREEN, INK, ORANGE, VERMILLION, panels, styled
from tether.study.stopping import ASKED, SEEDS, Stand, Stopped, stopped

RARE, BONUS = (1, 1, 1), 6.0
"""The proxy pays this for three b in a row, which are worth −1.5."""
KL_COEFS = (8.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.35, 0.1)
NUMBERS = (1, 2, 4, 8, 16, 64, 256, 1024)
RATE, STEPS, EVERY = 0.05, 60, 2
PATIENCE = (1, 2, 4, 8)
CHECKS = (0, 4, 8, 10, 12, 16, 20, 30, 60)

Scores = Float[Tensor, " sequences"]

TEXT = (
    "The two-letter language, but the policy is trained on a proxy: the true reward plus 6 "
    "wherever three b follow each other. The reference writes that rarely, in 3 answers of 100, "
    "and it is among the worst of them. Every real proxy has such a place somewhere.",
    "Spend KL and both rewards rise at first. For small budgets the best gain is sd_ref(r)·√(2 "
    "KL), which is why √KL is the axis to plot against: a frontier leaves the reference as a "
    "straight line. The proxy's goes on rising; it cannot turn down. The true reward turns at a "
    "third of a nat and ends far below the reference. In between lies the sweet spot, and neither "
    "the reward nor the KL of the run shows where.",
    "A preference that is not trained on does: how often is the policy's answer preferred to one "
    "of the reference's? The last two tables follow a run without a tether. Every second step 256 "
    "comparisons measure the rate, and the run stops when it has seen no better one for so many "
    "checks. One bad check is often chance, so a patience of 1 stops too early; a patience of 8 "
    "stops at over 2 nats, where most of the gain and more is lost. That loss comes only from "
    "keeping the last policy. Who saves each check and returns to the best may be patient.",
    "Best-of-n needs no training: draw n answers and keep the one that the proxy likes best. It "
    "spends KL too, a little less than the usual formula log n − (n − 1)/n, which is an upper "
    "bound. At equal KL it has less of the proxy than the frontier, and here far more of the true "
    "reward: it looks at ranks, so that it does not matter by how much the hack is overpaid, while "
    "a policy is pulled by the size. But its true reward turns as well. With 64 draws a hack is "
    "nearly always among them. More samples are more optimisation.",
)

FORMULA = """\
ΔR*(KL) ≈ sd_ref(r) · √(2 KL)      for small KL
win rate(π) = P(true(y) > true(y′)) + ½ P(equal)      y ~ π, y′ ~ π_ref
best-of-n:  KL ≤ log n − (n − 1)/n"""

REMEMBER = (
    "Plot reward against √KL: gains per nat shrink from the start, and the true reward has a top.",
    "The place of the top is not visible in the proxy. A preference that was not trained on shows "
    "it.",
    "Stopping late costs more than stopping early; keep the checkpoint that the check liked best.",
    "Best-of-n is optimisation too: it spends KL, and with enough samples it hacks.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The task with its proxy, and the true reward."""

    task: Task
    true: Scores

    @property
    def reference(self) -> Scores:
        """log π_ref of every answer."""
        return sequence_logprobs(self.task.reference, self.task.tree)

    def stand(self, label: float, logprobs: Scores) -> Stand:
        """Measure a distribution over answers."""
        chances = logprobs.exp()
        return Stand(
            label=label,
            kl=divergence(logprobs, self.reference).item(),
            proxy=(chances * self.task.scores).sum().item(),
            true=(chances * self.true).sum().item(),
            wins=win_rate(logprobs, self.reference, self.true),
        )


def win_rate(first: Scores, second: Scores, worth: Scores) -> float:
    """How often an answer of the first is worth more than one of the second, ties half."""
    gap = worth[:, None] - worth[None, :]
    preferred = (gap > 0).double() + 0.5 * (gap == 0).double()
    return (first.exp() @ preferred @ second.exp()).item()


def make_world() -> World:
    """The two-letter language with a proxy that can be hacked."""
    language = hackable(letters(), rare=RARE, bonus=BONUS)
    tree = language.tree
    return World(task=task_of(language), true=language.gold(tree.tokens, tree.mask))


def frontier(world: World) -> list[Stand]:
    """The reference and the best policies for the proxy."""
    task = world.task
    stands = [world.stand(math.inf, world.reference)]
    for kl_coef in KL_COEFS:
        best = optimum(task.reference, task.scores, task.tree, kl_coef=kl_coef).policy
        stands.append(world.stand(kl_coef, sequence_logprobs(best, task.tree)))
    return stands


def chosen(world: World) -> list[Stand]:
    """Best-of-n by the proxy."""
    found = {n: best_of_n(world.reference, world.task.scores, n=n) for n in NUMBERS}
    return [world.stand(n, logprobs) for n, logprobs in found.items()]


def run(world: World) -> list[Stand]:
    """Train on the proxy with exact gradients, without a tether; where each check stands."""
    path: list[Policy] = ascend(world.task, kl_coef=0.0, rate=RATE, steps=STEPS)
    tree = world.task.tree
    return [
        world.stand(step, sequence_logprobs(policy, tree))
        for step, policy in enumerate(path)
        if step % EVERY == 0
    ]


def stands_table(caption: str, label: Column, stands: list[Stand]) -> Table:
    """Some distributions over answers."""
    return Table(
        caption=caption,
        columns=(
            label, Column(name="KL, nats", format=".4f"), Column(name="√KL", format=".3f"),
            Column(name="proxy", format=".3f"), Column(name="true reward", format="+.3f"),
            Column(name="preferred to the reference", format=".1%"),
        ),
        rows=tuple(
            (
                "∞ (reference)" if math.isinf(s.label) else s.label, s.kl,
                math.sqrt(max(s.kl, 0.0)), s.proxy, s.true, s.wins,
            )
            for s in stands
        ),
    )  # fmt: skip


def chosen_table(stands: list[Stand]) -> Table:
    """Best-of-n with its bound."""
    return Table(
        caption="Best of n answers of the reference, by the proxy, exactly",
        columns=(
            Column(name="n", format=".0f"), Column(name="KL, nats", format=".4f"),
            Column(name="log n − (n−1)/n", format=".4f"), Column(name="proxy", format=".3f"),
            Column(name="true reward", format="+.3f"),
            Column(name="preferred to the reference", format=".1%"),
        ),
        rows=tuple(
            (s.label, s.kl, best_of_n_bound(int(s.label)), s.proxy, s.true, s.wins) for s in stands
        ),
    )  # fmt: skip


def stopping_table(ends: list[Stopped], best: Stand) -> Table:
    """What late stopping loses."""
    return Table(
        caption=f"Stopping by {ASKED} comparisons a check, mean of {SEEDS} draws; the best check "
        f"of the run is step {best.label:.0f} with a true reward of {best.true:+.3f}",
        columns=(
            Column(name="patience, checks"), Column(name="stops at step", format=".1f"),
            Column(name="KL then, nats", format=".3f"),
            Column(name="true reward, last policy", format="+.3f"),
            Column(name="lost", format=".3f"),
            Column(name="true reward, best check kept", format="+.3f"),
            Column(name="lost, best kept", format=".3f"),
        ),
        rows=tuple(
            (str(e.patience), e.step, e.kl, e.last, best.true - e.last, e.kept, best.true - e.kept)
            for e in ends
        ),
    )  # fmt: skip


def _plane(axis: Axes, line: list[Stand], drawn: list[Stand]) -> None:
    """Proxy and true reward against √KL, of the best policies and of best-of-n."""
    for name, color, mark in (("proxy", ORANGE, "^"), ("true", BLUE, "o")):
        word = "proxy" if name == "proxy" else "true reward"
        x, y = [math.sqrt(max(s.kl, 0.0)) for s in line], [getattr(s, name) for s in line]
        axis.plot(x, y, color=color, label=f"{word}, best policies")
        x, y = [math.sqrt(max(s.kl, 0.0)) for s in drawn], [getattr(s, name) for s in drawn]
        axis.plot(x, y, mark, color=color, mfc="white", label=f"{word}, best of n")
    axis.axhline(line[0].true, color=INK, linewidth=0.9, linestyle=":")
    axis.set(title="Reward against √KL", xlabel="√KL, √nats", ylabel="reward", ylim=(-1, 8.6))
    axis.legend(loc="upper left", fontsize=8)


@styled
def draw(line: list[Stand], drawn: list[Stand], checks: list[Stand], ends: list[Stopped]) -> Figure:
    """The plane, the held-out rate along the run, and what stopping keeps."""
    figure, axes = panels(3, width=11.5, height=3.6)
    _plane(axes[0], line, drawn)
    x, rates = [s.label for s in checks], [s.wins for s in checks]
    error = [1.96 * math.sqrt(p * (1 - p) / ASKED) for p in rates]
    low, high = ([p + s * e for p, e in zip(rates, error, strict=True)] for s in (-1, 1))
    axes[1].fill_between(x, low, high, color=GREEN, alpha=0.2, linewidth=0)
    axes[1].plot(x, rates, color=GREEN)
    axes[1].axhline(0.5, color=INK, linewidth=0.9, linestyle=":")
    axes[1].set(title="Held-out preference", xlabel="step of the run", ylim=(0, 0.75))
    axes[1].set_ylabel("preferred to the reference, share")
    best = max(s.true for s in checks)
    places = range(len(ends))
    axes[2].bar(
        [p - 0.2 for p in places],
        [e.last for e in ends],
        0.38,
        color=VERMILLION,
        label="last policy",
    )
    axes[2].bar(
        [p + 0.2 for p in places], [e.kept for e in ends], 0.38, color=BLUE, label="best check kept"
    )
    axes[2].axhline(best, color=INK, linewidth=0.9)
    axes[2].axhline(line[0].true, color=INK, linewidth=0.9, linestyle=":")
    for height, word in ((best, "best check of the run"), (line[0].true, "reference")):
        axes[2].annotate(
            word, (4.35, height), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8
        )
    axes[2].set_xticks(list(places), [str(e.patience) for e in ends])
    axes[2].set(title="What stopping keeps", xlabel="patience, checks", ylabel="true reward")
    axes[2].set(xlim=(-0.55, 4.4), ylim=(0, 1.5))
    axes[2].grid(visible=False, axis="x")
    axes[2].legend(loc="upper left", ncols=2, fontsize=8)
    return figure


def lesson() -> Lesson:
    """Solve, draw, train, stop."""
    world = make_world()
    line, drawn, checks = frontier(world), chosen(world), run(world)
    best = max(checks, key=lambda s: s.true)
    ends = [stopped(checks, patience) for patience in PATIENCE]
    return Lesson(
        name="budget",
        title="Every proxy has a budget beyond which more reward is less",
        text=TEXT,
        formula=FORMULA,
        tables=(
            stands_table("The best policies for the proxy", Column(name="β", format="g"), line),
            chosen_table(drawn),
            stands_table(
                "A run on the proxy without a tether", Column(name="step", format=".0f"),
                [s for s in checks if s.label in CHECKS],
            ),
            stopping_table(ends, best),
        ),
        figure=draw(line, drawn, checks, ends),
        figure_caption="Proxy and true reward against √KL, of the best policies and of best-of-n, "
        "the reference's true reward dotted; the held-out preference rate along the run with the "
        f"95 % band of {ASKED} comparisons; the true reward that stopping keeps, the best check of "
        "the run as a line and the reference dotted.",
        remember=REMEMBER,
    )  # fmt: skip
