"""A reward model that has learnt 'longer is better', and what a policy makes of it."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from tether.core.losses import pairwise_reward_loss
from tether.exact.enumerate import Table as Policy
from tether.exact.enumerate import sequence_logprobs
from tether.exact.tree import grow_tree
from tether.study.ascent import Task, ascend
from tether.study.lessons.page import Cell, Column, Lesson, Table
from tether.study.lessons.style import BLUE, INK, VERMILLION, panels, styled

POINT, FILLER, END = 0, 1, 2
CHANCES = (0.45, 0.20, 0.35)
"""The reference's next token at every step: a point, a filler, the end."""
LONGEST = 8
"""Most tokens of an answer."""
POINTS_THAT_COUNT = 3
COST = 0.4
"""What reading a token costs, in points."""
PAIRS = 4000
KL_COEF, RATE, STEPS = 1.0, 0.1, 60
SHOWN = (6, 12, 18, 24, 60)

Scores = Float[Tensor, " sequences"]

TEXT = (
    "Answers here are made of points, fillers and an end token, at most eight tokens. A reader "
    "gains 1 from each of the first three points, nothing from further ones, and loses 0.4 for "
    "each token read: that is the true reward. The reference rarely says more than three things, "
    "so among its answers the longer ones tend to be the better ones.",
    "A reward model sees only pairs of such answers. It is linear in the number of points and of "
    "fillers, fitted with the production Bradley-Terry loss on 4,000 pairs that a reader has "
    "judged, and scaled to mean 0 and standard deviation 1 on the reference. The first table says "
    "what it has learnt. By the usual measure it is a good model: on fresh pairs it agrees with "
    "the reader nearly as often as the true reward itself does, because a reader is not always "
    "consistent. Its one mistake is that a point is worth the same however many came before, and "
    "where the pairs lie that mistake hardly shows.",
    "Training finds it. Both runs start at the reference and follow the exact expectation of the "
    "shipped gradient (k1 in the reward, natural-gradient steps), so nothing below is noise. "
    "Without a tether the reward of the model climbs at every step, the answers grow to the limit, "
    "and the true reward, after a short rise, falls below where it began. Look at the reward curve "
    "alone and this is the most successful run one could wish for.",
    "With β = 1 the same model, the same mistake and the same steps end elsewhere. Nothing has "
    "told the policy what is true. It is kept where the model was fitted, and there the model is "
    "nearly right.",
)

FORMULA = """\
true(y)  = min(points, 3) − 0.4 · length
model(y) = w₁ · points + w₂ · fillers          fitted:  min  −log σ(model(better) − model(worse))
trained: max  E[model] − β KL(π‖π_ref)         β = 0 and β = 1"""

REMEMBER = (
    "Agreement on held-out pairs is measured where the reference writes; training leaves there.",
    "A reward curve cannot show hacking. Plot length and KL beside it, and a judge that is not "
    "trained on.",
    "The tether does not repair a reward model; it keeps the policy where the model holds.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Answers, their true reward, the model fitted to pairs, and what is trained on it.

    Attributes:
        task: trained on the model's scores.
        true: reward of each answer to a reader, points.
        lengths: tokens, the end included.
        weights: of the fitted model, per point and per filler, before scaling.
        agreement: with the reader's choice on fresh pairs, of the model and of the true reward.
    """

    task: Task
    true: Scores
    lengths: Scores
    weights: tuple[float, float]
    agreement: tuple[float, float]

    def correlation(self, first: Scores, second: Scores) -> float:
        """Correlation of two numbers over the reference's answers."""

        def mean(values: Scores) -> float:
            return self.task.mean(values, self.task.reference)

        a, b = first - mean(first), second - mean(second)
        return mean(a * b) / (mean(a * a) * mean(b * b)) ** 0.5


def judged_pairs(
    chances: Scores, true: Scores, *, seed: int
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """Pairs of reference answers, better and worse as a reader of noisy taste says."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.multinomial(
        chances, 2 * PAIRS, replacement=True, generator=generator
    ).view(2, -1)
    drawn = torch.rand(PAIRS, generator=generator, dtype=chances.dtype)
    prefers_first = drawn < torch.sigmoid(2 * (true[first] - true[second]))
    return torch.where(prefers_first, first, second), torch.where(prefers_first, second, first)


def fit(
    features: Float[Tensor, "sequences features"],
    better: Int[Tensor, " pairs"],
    worse: Int[Tensor, " pairs"],
) -> Float[Tensor, " features"]:
    """The Bradley-Terry fit of a linear reward model."""
    weights = features.new_zeros(features.shape[1]).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=50,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Float[Tensor, ""]:
        optimizer.zero_grad()
        scores = features @ weights
        value = pairwise_reward_loss(scores[better], scores[worse])
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    return weights.detach()


def agreement(scores: Scores, better: Tensor, worse: Tensor) -> float:
    """Share of pairs ordered as the reader did, ties half."""
    margin = scores[better] - scores[worse]
    return ((margin > 0).double() + 0.5 * (margin == 0).double()).mean().item()


def make_world() -> World:
    """Enumerate the answers, judge pairs, fit and scale the model."""
    tree = grow_tree(vocab_size=3, length=LONGEST, eos=END)
    logprobs = torch.tensor(CHANCES, dtype=torch.float64).log()
    reference = logprobs.expand(len(tree.next_prefix), -1).clone()
    counts = torch.stack([((tree.tokens == t) & tree.mask).sum(dim=1) for t in (POINT, FILLER)], 1)
    features, lengths = counts.double(), tree.mask.sum(dim=1).double()
    true = features[:, 0].clamp(max=POINTS_THAT_COUNT) - COST * lengths
    chances = sequence_logprobs(reference, tree).exp()
    weights = fit(features, *judged_pairs(chances, true, seed=0))
    raw, fresh = features @ weights, judged_pairs(chances, true, seed=1)
    task = Task(reference=reference, scores=raw, tree=tree)
    centred = raw - task.reward(reference)
    scaled = centred / task.mean(centred**2, reference) ** 0.5
    return World(
        task=replace(task, scores=scaled), true=true, lengths=lengths,
        weights=(weights[0].item(), weights[1].item()),
        agreement=(agreement(raw, *fresh), agreement(true, *fresh)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """One run, at the start and after each step."""

    reward: list[float]
    true: list[float]
    length: list[float]
    kl: list[float]


def run(world: World, kl_coef: float) -> Curves:
    """Train on the model and watch what it does not see."""
    task = world.task
    path: list[Policy] = ascend(task, kl_coef=kl_coef, rate=RATE, steps=STEPS)
    return Curves(
        reward=[task.reward(policy) for policy in path],
        true=[task.mean(world.true, policy) for policy in path],
        length=[task.mean(world.lengths, policy) for policy in path],
        kl=[task.kl(policy) for policy in path],
    )


def model_table(world: World) -> Table:
    """What was learnt from the pairs."""
    scores = world.task.scores
    rows: tuple[tuple[Cell, ...], ...] = (
        ("weight of a point", world.weights[0]),
        ("weight of a filler", world.weights[1]),
        ("agreement with the reader, fresh pairs", world.agreement[0]),
        ("agreement of the true reward with the reader", world.agreement[1]),
        ("correlation of true reward and length", world.correlation(world.true, world.lengths)),
        ("correlation of the model and length", world.correlation(scores, world.lengths)),
        ("correlation of the model and true reward", world.correlation(scores, world.true)),
    )
    return Table(
        caption=f"The reward model after {PAIRS:,} pairs, on the reference's answers",
        columns=(Column(name="quantity"), Column(name="value", format="+.3f")),
        rows=rows,
    )


def runs_table(free: Curves, held: Curves) -> Table:
    """Both runs at a few steps."""
    rows = [("reference", 0, free, 0)]
    rows += [("no tether", step, free, step) for step in SHOWN]
    rows += [(f"β = {KL_COEF:g}", step, held, step) for step in SHOWN]
    return Table(
        caption="What the model says, what the reader gets, and what it takes",
        columns=(
            Column(name="run"), Column(name="step"), Column(name="model's reward", format=".3f"),
            Column(name="true reward", format="+.3f"), Column(name="length, tokens", format=".2f"),
            Column(name="KL, nats per response", format=".3f"),
        ),
        rows=tuple(
            (name, step, c.reward[i], c.true[i], c.length[i], c.kl[i]) for name, step, c, i in rows
        ),
    )  # fmt: skip


@styled
def draw(free: Curves, held: Curves) -> Figure:
    """Four curves of each run against the step."""
    figure, axes = panels(4, width=11.5, height=3.1)
    titles = {
        "reward": ("The model's reward …", "reward-model sd"),
        "true": ("… and the true one", "points"),
        "length": ("Length", "tokens"),
        "kl": ("KL(π‖π_ref)", "nats per response"),
    }
    for axis, (name, (title, unit)) in zip(axes, titles.items(), strict=True):
        axis.plot(getattr(free, name), color=VERMILLION, label="no tether")
        axis.plot(getattr(held, name), "--", color=BLUE, label=f"β = {KL_COEF:g}")
        axis.set(title=title, xlabel="step", ylabel=unit)
    axes[1].axhline(free.true[0], color=INK, linewidth=0.9, linestyle=":")
    axes[1].annotate(
        "the reference", (STEPS, free.true[0]), xytext=(0, 3), textcoords="offset points",
        ha="right", fontsize=8,
    )  # fmt: skip
    axes[2].axhline(LONGEST, color=INK, linewidth=0.9, linestyle=":")
    axes[2].set_ylim(2, 8.9)
    axes[2].annotate(
        "the limit", (STEPS, LONGEST), xytext=(0, 3), textcoords="offset points",
        ha="right", fontsize=8,
    )  # fmt: skip
    axes[0].legend(loc="center right")
    return figure


def lesson() -> Lesson:
    """Fit the model, train on it twice."""
    world = make_world()
    free, held = run(world, 0.0), run(world, KL_COEF)
    return Lesson(
        name="hacking",
        title="A policy finds what its reward model got wrong, and the reward curve only cheers",
        text=TEXT,
        formula=FORMULA,
        tables=(model_table(world), runs_table(free, held)),
        figure=draw(free, held),
        figure_caption="Training on a fitted reward model without a tether and with β = 1: the "
        "model's reward, the true reward, the length and the KL at each step.",
        remember=REMEMBER,
    )
