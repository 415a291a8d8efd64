"""A policy that never leaves its trust region and still walks to the end of the world."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tether.core.losses import clipped_policy_loss
from tether.exact import markov
from tether.exact.languages import REWARDED_TOKEN, eight_tokens
from tether.study.lessons.page import Cell, Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREY, ORANGE, VERMILLION, panels, styled

CLIP_EPSILON = 0.2
UPDATES = 100
RATE = 1.0
"""Largest step; further out it is the trust region that shortens a step."""
KL_COEFS = (0.0, 0.3, 0.5)
RATIOS = (0.7, 0.9, 1.0, 1.1, 1.3)

Law = Float[Tensor, "prev vocab"]

TEXT = (
    "PPO's objective pays for a token only while its ratio to the policy that sampled it, π/π_old, "
    "stays within 1 ± ε. Beyond, a good token earns no more and the gradient is 0 (first table). "
    "This keeps one update honest: the advantages were measured under π_old, and they say little "
    "about a policy that is far from it.",
    "But π_old is not a fixed point. After the update the new policy is the next π_old, and the "
    "fence moves with it. The eight-token language pays 1 for every token 3. We take its exact "
    "policy gradient, through the production loss and with no sampling noise, and shorten every "
    "step until no ratio leaves [0.8, 1.2]: clipping as good as clipping can be.",
    "The second table shows what that bounds. No single update is worth more than two hundredths "
    "of a nat. Yet without a penalty the policy goes on until it says nothing but 3 3 3 3 3 3. "
    "Small steps in one direction are a long walk: near a policy KL grows with the square of the "
    "distance, so that the KL of the whole walk is many times the sum of the KL of its steps.",
    "With β(log π − log π_ref) charged in the reward the updates are fenced in exactly the same "
    "way, but the walk ends: where the next nat would buy less reward than β. Clipping knows the "
    "last policy, the penalty knows the reference.",
)

FORMULA = """\
Lᶜˡⁱᵖ = min(ρ Â, clip(ρ, 1−ε, 1+ε) Â)      ρ = π(a|s)/π_old(a|s)      bounds one update
J     = E[r] − β KL(π‖π_ref)                                          bounds the sum of them"""

REMEMBER = (
    "Clipping compares with the last policy, which moves; the penalty compares with the reference, "
    "which does not.",
    "A small KL(new‖old) at every update says nothing about KL(π‖π_ref) after a hundred of them.",
    "approx_kl_old and clip_fraction are health readings of the optimiser; the budget is a matter "
    "of KL to the reference.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A training run; one entry an update, after it.

    Attributes:
        kl_coef: β.
        ratio: largest |π/π_old − 1| of any token.
        kl_old: KL(new‖old), nats per response.
        kl: KL(π‖π_ref), nats per response.
        reward: E[r].
        likeliest: the likeliest response at the end.
    """

    kl_coef: float
    ratio: list[float]
    kl_old: list[float]
    kl: list[float]
    reward: list[float]
    likeliest: str


def natural_gradient(
    law: Law, reference: Law, rewards: Float[Tensor, " vocab"], *, kl_coef: float, length: int
) -> Law:
    """Ascent direction of the production loss on all tokens, each weighted by its probability.

    Advantages are exact; the KL is charged per token in the reward. Dividing by the probability
    makes the direction the advantage itself, averaged over steps.
    """
    chain = markov.stationary(law, length=length)
    gain = rewards - kl_coef * (law - reference)
    following, advantages = torch.zeros_like(rewards), []
    for _ in range(length):
        outcome = gain + following
        following = (law.exp() * outcome).sum(dim=-1)
        advantages.append(outcome - following[:, None])
    reached = markov.visits(chain, start=0)
    weights = torch.einsum("ts,sv->tsv", reached, law.exp())
    weighted = (weights * torch.stack(advantages[::-1])).flatten(0, 1)
    leaf = law.clone().requires_grad_()
    loss = clipped_policy_loss(
        leaf.log_softmax(dim=-1).repeat(length, 1), law.repeat(length, 1), weighted,
        torch.ones_like(weighted, dtype=torch.bool), clip_epsilon=CLIP_EPSILON, total_tokens=1,
    ).loss  # fmt: skip
    (slope,) = torch.autograd.grad(loss, leaf)
    return -slope / weights.sum(dim=0)


def inside(law: Law, direction: Law) -> Law:
    """The longest step along a direction that keeps every ratio within 1 ± ε."""
    step = RATE
    while True:
        new = (law + step * direction).log_softmax(dim=-1)
        if ((new - law).exp() - 1).abs().max() <= CLIP_EPSILON:
            return new
        step *= 0.97


def walk(kl_coef: float) -> Walk:
    """Train from the reference, exactly."""
    language = eight_tokens()
    length = language.length
    reference = markov.read_chain(language.reference, length=length)
    rewards = torch.zeros(len(language.words), dtype=torch.float64)
    rewards[REWARDED_TOKEN] = 1.0
    law = reference[0]
    done = Walk(kl_coef=kl_coef, ratio=[], kl_old=[], kl=[], reward=[], likeliest="")
    for _ in range(UPDATES):
        old = markov.stationary(law, length=length)
        slope = natural_gradient(law, reference[0], rewards, kl_coef=kl_coef, length=length)
        law = inside(law, slope)
        new = markov.stationary(law, length=length)
        done.ratio.append(((law - old[0]).exp() - 1).abs().max().item())
        done.kl_old.append(markov.kl(new, old, start=0).item())
        done.kl.append(markov.kl(new, reference, start=0).item())
        done.reward.append(markov.mean_reward(new, rewards, start=0).item())
    return Walk(
        kl_coef=kl_coef, ratio=done.ratio, kl_old=done.kl_old, kl=done.kl, reward=done.reward,
        likeliest=likeliest(law, length),
    )  # fmt: skip


def likeliest(law: Law, length: int) -> str:
    """The most probable response, by Viterbi's recursion."""
    best, paths = law[0], [str(a) for a in range(len(law))]
    for _ in range(length - 1):
        total = best[:, None] + law
        best, origin = total.max(dim=0)
        paths = [f"{paths[int(o)]} {a}" for a, o in enumerate(origin)]
    return paths[int(best.argmax())]


def objective(ratio: float, advantage: float) -> tuple[float, float]:
    """The production objective of one token and its slope in the ratio."""
    leaf = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    loss = clipped_policy_loss(
        leaf, torch.zeros_like(leaf), torch.full_like(leaf, advantage),
        torch.ones_like(leaf, dtype=torch.bool), clip_epsilon=CLIP_EPSILON, total_tokens=1,
    ).loss  # fmt: skip
    (slope,) = torch.autograd.grad(loss, leaf)
    return -loss.item(), -slope.item() / ratio


def one_token() -> Table:
    """Objective and slope of a single token at several ratios."""
    rows: list[tuple[Cell, ...]] = [
        (ratio, *objective(ratio, 1.0), *objective(ratio, -1.0)) for ratio in RATIOS
    ]
    return Table(
        caption=f"One token: what the clipped objective pays, ε = {CLIP_EPSILON}",
        columns=(
            Column(name="ratio ρ", format=".1f"),
            Column(name="objective, Â = +1", format="+.2f"),
            Column(name="slope, Â = +1", format="+g"),
            Column(name="objective, Â = −1", format="+.2f"),
            Column(name="slope, Â = −1", format="+g"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def walks_table(walks: list[Walk]) -> Table:
    """What an update is worth and where the walk ends."""
    return Table(
        caption=f"{UPDATES} updates of the eight-token language, every ratio within 1 ± "
        f"{CLIP_EPSILON}; KL in nats per response",
        columns=(
            Column(name="β", format=".1f"), Column(name="largest |ρ − 1|", format=".3f"),
            Column(name="largest KL(new‖old)", format=".4f"),
            Column(name="sum of KL(new‖old)", format=".3f"),
            Column(name="KL(π‖π_ref) at the end", format=".3f"),
            Column(name="reward", format=".4f"), Column(name="likeliest answer"),
        ),
        rows=tuple(
            (
                w.kl_coef, max(w.ratio), max(w.kl_old), sum(w.kl_old), w.kl[-1], w.reward[-1],
                w.likeliest,
            )
            for w in walks
        ),
    )  # fmt: skip


def _surrogate(axis: Axes) -> None:
    """The clipped objective over the ratio."""
    ratios = [0.5 + 0.005 * i for i in range(201)]
    for advantage, color, dash in ((1.0, BLUE, "-"), (-1.0, VERMILLION, "--")):
        paid = [objective(ratio, advantage)[0] for ratio in ratios]
        name = f"Â = {advantage:+.0f}".replace("-", "−")
        axis.plot(ratios, paid, dash, color=color, label=name)
    axis.axvspan(1 - CLIP_EPSILON, 1 + CLIP_EPSILON, color="#e5e7eb", zorder=0)
    axis.axvline(1, color=GREY, linewidth=0.9)
    axis.set(
        title="What one token is paid", xlabel="ratio ρ = π/π_old", ylabel="objective (reward)"
    )
    axis.legend(loc="center left")


@styled
def draw(walks: list[Walk]) -> Figure:
    """The clipped objective; the KL of each update; the KL of the walk."""
    figure, axes = panels(3, width=11, height=3.5)
    _surrogate(axes[0])
    looks = ((VERMILLION, "-"), (ORANGE, "--"), (BLUE, "-."))
    updates = range(1, UPDATES + 1)
    for each, (color, dash) in zip(walks, looks, strict=True):
        name = f"β = {each.kl_coef:g}"
        axes[1].plot(updates, each.kl_old, dash, color=color, label=name)
        axes[2].plot(updates, each.kl, dash, color=color, label=name)
        axes[2].annotate(
            each.likeliest, (UPDATES, each.kl[-1]), xytext=(0, -5 if each.kl[-1] > 5 else 4),
            textcoords="offset points", ha="right", fontsize=8.5, color=color,
            va="top" if each.kl[-1] > 5 else "bottom",
        )  # fmt: skip
    axes[1].set(
        title="One update: KL(new‖old)", xlabel="update", ylabel="nats per response", yscale="log",
        ylim=(1e-6, 0.5),
    )  # fmt: skip
    axes[2].set(title="The walk: KL(π‖π_ref)", xlabel="update", ylabel="nats per response")
    axes[1].legend(loc="upper right")
    axes[2].legend(loc="center right")
    return figure


def lesson() -> Lesson:
    """Walk with and without the penalty."""
    walks = [walk(kl_coef) for kl_coef in KL_COEFS]
    return Lesson(
        name="clipping",
        title="Clipping bounds one update; the penalty bounds the sum of them",
        text=TEXT,
        formula=FORMULA,
        tables=(one_token(), walks_table(walks)),
        figure=draw(walks),
        figure_caption="Left: the clipped objective of one token, flat where clipping stops "
        "paying; the band is 1 ± ε. Middle: KL of each update to the policy before it, on a "
        "logarithmic scale. Right: KL to the reference over the same updates, with the likeliest "
        "answer at the end.",
        remember=REMEMBER,
    )
