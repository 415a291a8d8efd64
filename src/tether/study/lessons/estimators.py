"""k1, k2, k3 and the full-vocabulary KL: as numbers, as gradients, as objectives."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tether.core.kl import k1, k2, k3
from tether.exact.enumerate import expectation
from tether.exact.enumerate import kl as sequence_kl
from tether.exact.optimum import Point, optimum
from tether.study.lessons.estimator_facts import (
    KL_COEF,
    Outcome,
    Setting,
    estimates,
    moments,
    outcome,
    setting,
)
from tether.study.lessons.page import Cell, Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREEN, GREY, INK, VERMILLION, panels, styled

SHOWN = (
    "k1 in reward", "full KL in loss, later in reward", "k2 in loss", "k3 in loss", "k1 in loss",
    "k2 in reward", "k3 in reward", "full KL in reward",
)  # fmt: skip
"""The placements of the table, by the oracle's names."""
VERDICTS = {"reward": "`reward`, the default", "exact": "`exact`", "token_loss": "`token_loss`"}
MARKS = {"reward": (GREEN, "o"), "exact": (BLUE, "D"), "token_loss": (INK, "s")}
POINTED, TAIL = (0.98, 0.01, 0.01), (0.30, 0.35, 0.35)
FRONTIER = tuple(10 ** (1 - i / 20) for i in range(50))


TEXT = (
    "KL(π‖π_ref) is a mean over answers of π, so it must be estimated from samples. Write l for "
    "the log-ratio log π − log π_ref of a sampled token. Schulman's three estimators are "
    "functions of l; the fourth sums over the whole vocabulary at each sampled position, which a "
    "language model gives for nothing. They answer three different questions, and an estimator "
    "can be right for one and wrong for the next.",
    "As a number (first table, two-letter language, one answer): k1 is unbiased, but its standard "
    "deviation is three times the KL and it is negative for many answers. k2 is biased. k3 and "
    "the full KL are unbiased, and the full KL has the least variance. k3 is no safe choice "
    "either: where the policy has almost given up a token that the reference likes, exp(−l) is "
    "huge. On the pair of distributions in the second table its variance is forty times that of "
    "k1.",
    "As a gradient (third table): an unbiased estimate of a number, differentiated, need not be "
    "an unbiased estimate of its gradient, because the samples themselves depend on the policy. "
    "k1 in the loss has gradient 0 on average. k3 in the loss follows another divergence. The "
    "same k1 as a detached charge in the reward is exact. The full KL, harmless as a metric, is "
    "wrong as a reward: it does not depend on the token that was chosen, so that it acts as a "
    "baseline, and what the choice itself costs is lost.",
    "As an objective (the same table, right): each placement was trained to its end with exact "
    "gradients at β = 0.5. The exact ones reach π*. Token-level ones stop a little beside it. The "
    "refused ones behave as if there were no penalty: they end on the single best answer at 5.1 "
    "nats. A bigger β does not help, because near the reference their gradient vanishes or points "
    "nowhere. tether refuses them when the recipe is read.",
)

FORMULA = """\
k1 = l      k2 = l²/2      k3 = e⁻ˡ − 1 + l      full = Σₐ π(a|s) log π(a|s)/π_ref(a|s)
∇KL = E Σₜ [ ∇KLₜ(sₜ)  +  ∇log π(aₜ|sₜ) Σ_{u>t} KL_u(s_u) ]
              direct        through the states that the choice leads to"""

REMEMBER = (
    "Measure with the full-vocabulary KL along sampled answers: unbiased, never negative, least "
    "variance.",
    "Penalise with detached k1 per token in the reward (`kl.placement: reward`), or the exact form "
    "with less variance (`exact`).",
    "Unbiased as a value does not mean right as a gradient: k1 in the loss does nothing, k3 in the "
    "reward switches the penalty off.",
)


def values_table(given: Setting) -> Table:
    """Each estimator as a number."""
    truth = sequence_kl(given.policy, given.reference, given.tree).item()
    rows: list[tuple[Cell, ...]] = []
    for name, values in estimates(given).items():
        mean, deviation = moments(values, given)
        below = expectation((values < 0).to(values), given.policy, given.tree).item()
        rows.append((name, mean, mean - truth, deviation, deviation / truth, below))
    return Table(
        caption=f"As a number: one answer of the two-letter language, true KL {truth:.6f} nats",
        columns=(
            Column(name="estimator"), Column(name="mean", format=".6f"),
            Column(name="bias", format="+.4f"), Column(name="sd", format=".4f"),
            Column(name="sd / KL", format=".2f"), Column(name="P(negative)", format=".3f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def tail_table() -> Table:
    """A pair of distributions on which k3 is far worse than k1."""
    policy, reference = (torch.tensor(p, dtype=torch.float64).log() for p in (POINTED, TAIL))
    rows: list[tuple[Cell, ...]] = []
    for name, estimate in (("k1", k1), ("k2", k2), ("k3", k3)):
        values = estimate(policy - reference)
        mean = (policy.exp() * values).sum()
        variance = (policy.exp() * (values - mean) ** 2).sum()
        rows.append((name, mean.item(), variance.item(), values.max().item()))
    return Table(
        caption=f"As a number, one token: π = {POINTED}, π_ref = {TAIL}",
        columns=(
            Column(name="estimator"), Column(name="mean", format=".4f"),
            Column(name="variance", format=".3f"), Column(name="largest value", format=".2f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def outcomes_table(outcomes: list[Outcome]) -> Table:
    """Each placement as a gradient and as an objective."""
    return Table(
        caption="As a gradient on-policy, and where training ends at β = 0.5 (π*: J* − J = 0)",
        columns=(
            Column(name="placement"), Column(name="`kl.placement`"),
            Column(name="error of E[gradient]", format=".3f"), Column(name="cosine", format=".3f"),
            Column(name="variance", format=".3f"), Column(name="ends at E[r]", format=".4f"),
            Column(name="KL, nats", format=".4f"), Column(name="J* − J", format=".4f"),
        ),
        rows=tuple(
            (
                o.placement.name, VERDICTS.get(o.placement.trains, "refused"), o.error, o.cosine,
                o.variance, o.point.reward, o.point.kl, o.lost,
            )
            for o in outcomes
        ),
    )  # fmt: skip


def _spread(axis: Axes, given: Setting) -> None:
    """Standard deviation of each estimator."""
    truth = sequence_kl(given.policy, given.reference, given.tree).item()
    names, widths = [], []
    for name, values in estimates(given).items():
        names.append(
            name.replace(", summed over tokens", "").replace(" of the answer's", ", answer's")
        )
        widths.append(moments(values, given)[1] / truth)
    bars = axis.barh(names, widths, color=[GREY] * (len(names) - 1) + [GREEN])
    axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8.5)
    axis.invert_yaxis()
    axis.set(title="As a number: sd of one answer", xlabel="standard deviation / KL", xlim=(0, 3.7))
    axis.grid(visible=False, axis="y")


def _ends(axis: Axes, outcomes: list[Outcome], frontier: list[Point]) -> None:
    """Where each placement's training ends in the plane of KL and reward."""
    axis.plot([p.kl for p in frontier], [p.reward for p in frontier], color=GREY, zorder=1)
    axis.annotate("best reward\nfor a KL", (1.0, 1.75), fontsize=8.5, color=GREY)
    refused = []
    for each in outcomes:
        at = (each.point.kl, each.point.reward)
        color, mark = MARKS.get(each.placement.trains, (VERMILLION, "X"))
        size = 110 if each.placement.trains == "exact" else 46
        face = "none" if each.placement.trains == "exact" else color
        axis.scatter(*at, s=size, marker=mark, facecolors=face, edgecolors=color, zorder=3)
        if each.point.kl > 5:
            refused.append(each.placement.name)
        elif each.placement.trains != "exact":
            axis.annotate(
                each.placement.name, at, xytext=(-7, 5) if color == GREEN else (7, -11),
                ha="right" if color == GREEN else "left", textcoords="offset points", fontsize=8.5,
                color=color,
            )  # fmt: skip
    last = max(outcomes, key=lambda each: each.point.kl).point
    axis.annotate(
        "\n".join(refused), (last.kl, last.reward), xytext=(5.3, 2.2), ha="right", va="top",
        fontsize=8.5, color=VERMILLION,
        arrowprops={"arrowstyle": "-", "color": VERMILLION, "linewidth": 0.8, "shrinkB": 8},
    )  # fmt: skip
    axis.set(
        title="As an objective: the end of training", xlabel="KL(π‖π_ref), nats per response",
        ylabel="E[r], reward units", xlim=(0, 5.5), ylim=(0.7, 4.5),
    )  # fmt: skip


@styled
def draw(given: Setting, outcomes: list[Outcome], frontier: list[Point]) -> Figure:
    """Spread of the estimators, error of the gradients, ends of training."""
    figure, axes = panels(3, width=13, height=3.9)
    _spread(axes[0], given)
    colors = [MARKS.get(o.placement.trains, (VERMILLION, ""))[0] for o in outcomes]
    names = [o.placement.name.replace(", later", ",\nlater") for o in outcomes]
    bars = axes[1].barh(names, [o.error for o in outcomes], color=colors)
    axes[1].bar_label(bars, fmt="%.2f", padding=3, fontsize=8.5)
    axes[1].invert_yaxis()
    axes[1].set(
        title="As a gradient: error of the mean", xlabel="|E[gradient] − ∇KL| / |∇KL|",
        xlim=(0, 1.2),
    )  # fmt: skip
    axes[1].grid(visible=False, axis="y")
    _ends(axes[2], outcomes, frontier)
    return figure


def lesson() -> Lesson:
    """Measure every estimator and train every placement to its end."""
    given = setting()

    def solve(kl_coef: float) -> Point:
        return optimum(given.reference, given.rewards, given.tree, kl_coef=kl_coef).point

    best = solve(KL_COEF).objective
    outcomes = [outcome(name, given, best) for name in SHOWN]
    frontier = [solve(kl_coef) for kl_coef in FRONTIER]
    return Lesson(
        name="estimators",
        title="An estimator of the KL can be right as a number and wrong as a penalty",
        text=TEXT,
        formula=FORMULA,
        tables=(values_table(given), tail_table(), outcomes_table(outcomes)),
        figure=draw(given, outcomes, frontier),
        figure_caption="Left: standard deviation of each estimator over the KL, for one answer. "
        "Middle: relative error of the expected gradient; the placements in vermilion are "
        "refused. Right: where training with each placement ends, under the exact frontier of "
        "reward and KL.",
        remember=REMEMBER,
    )
