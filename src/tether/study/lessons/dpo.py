"""The closed form: DPO on all pairs ends at the optimum of RLHF; on few pairs it does not."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tether.exact.enumerate import Table as Policy
from tether.exact.enumerate import sequence_logprobs
from tether.exact.languages import letters
from tether.exact.optimum import divergence, implicit_rewards, optimum
from tether.study.ascent import Task, task_of
from tether.study.lessons.page import Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREY, INK, VERMILLION, panels, styled

KL_COEFS = (2.0, 1.0, 0.5, 0.25)
KL_COEF = 0.5
"""β of the fits on sampled pairs."""
COUNTS = (300, 3_000, 30_000, 300_000)
SEEDS = 3
ITERATIONS = 150
"""Of L-BFGS, at most; where an answer never lost there is no minimum to arrive at."""
SHOWN = 6
"""Pairs in the table of differences."""

Pairs = Float[Tensor, "sequences sequences"]
"""Weight of 'the row's response is preferred to the column's'."""

TEXT = (
    "The optimum of reward minus β times KL has a closed form: π* is π_ref·exp(r/β), divided by "
    "its sum Z. Read backwards it says what reward a policy is optimal for: β log π/π_ref, up to "
    "the constant β log Z, which no comparison of two answers to one prompt can see. DPO puts this "
    "implicit reward into the usual loss for reward models. There is no reward model, no sampling, "
    "no RL; the KL is hidden in the form of the reward.",
    "The first table fits it on all pairs of the 31 answers of the two-letter language, each "
    "weighted by how often a Bradley-Terry judge of the true reward would decide either way. The "
    "fit is done on the policy's logits alone and knows no reward. It arrives at the optimum that "
    "soft value iteration computes from the reward: the gap is below a millionth of a nat, and so "
    "are the errors of all 465 differences of implicit rewards. The second table shows a few.",
    "So far the two methods are one. The third table draws a finite number of pairs from the "
    "reference, judged once each, as real data are. The RL optimum at β = 0.5 costs 2.40 nats. DPO "
    "with the same β spends what the pairs happen to say. An answer that never lost is pushed up "
    "without end, one that never won down: with 5.12 nats the policy says a single answer and "
    "nothing else. Even 3,000 pairs about 31 answers do not exclude that. RL measures the KL on "
    "its own answers at every step; in DPO β is a parameter of the loss, and what was spent has to "
    "be measured afterwards.",
)

FORMULA = """\
π*(y) = π_ref(y) exp(r(y)/β)/Z    ⇔    r(y) = β log π*(y)/π_ref(y) + β log Z
r̂(y) = β log π(y)/π_ref(y)        loss = −log σ(r̂(better) − r̂(worse))
at π*:  r̂(y) − r̂(y′) = r(y) − r(y′)   for every pair"""

REMEMBER = (
    "DPO is the reward-model loss with β log π/π_ref in place of a reward model.",
    "With every pair, judged often enough, it has the same optimum as RL with the same β.",
    "With the pairs that one has, β is not a KL: measure what a DPO model spent.",
)


def exact_pairs(task: Task) -> Pairs:
    """All pairs of different responses, weighted by what a Bradley-Terry judge prefers."""
    chosen = torch.sigmoid(task.scores[:, None] - task.scores[None, :])
    return (chosen / chosen.triu(diagonal=1).count_nonzero()).fill_diagonal_(0.0)


def drawn_pairs(task: Task, count: int, *, seed: int) -> Pairs:
    """Pairs of the reference's responses, each judged once; equal responses say nothing."""
    chances = sequence_logprobs(task.reference, task.tree).exp()
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.multinomial(
        chances, 2 * count, replacement=True, generator=generator
    ).view(2, -1)
    drawn = torch.rand(count, generator=generator, dtype=chances.dtype)
    wins = drawn < torch.sigmoid(task.scores[first] - task.scores[second])
    better, worse = torch.where(wins, first, second), torch.where(wins, second, first)
    size = len(chances)
    cells = torch.bincount(better * size + worse, minlength=size**2).view(size, size)
    return (cells.double() / count).fill_diagonal_(0.0)


def dpo_loss(implicit: Float[Tensor, " sequences"], pairs: Pairs) -> Float[Tensor, ""]:
    """The Bradley-Terry loss of weighted pairs with implicit rewards as scores.

    Source:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 7.
    """
    margin = implicit[:, None] - implicit[None, :]
    return -(pairs * torch.nn.functional.logsigmoid(margin)).sum()


def fit(task: Task, pairs: Pairs, kl_coef: float) -> Policy:
    """Minimise the DPO loss in the logits of every prefix, from the reference."""
    logits = task.reference.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=ITERATIONS, history_size=50, tolerance_grad=1e-12,
        tolerance_change=1e-16, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Float[Tensor, ""]:
        optimizer.zero_grad()
        policy = logits.log_softmax(dim=-1)
        implicit = implicit_rewards(policy, task.reference, task.tree, kl_coef=kl_coef)
        value = dpo_loss(implicit, pairs)
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    return logits.detach().log_softmax(dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A policy that DPO made.

    Attributes:
        policy: next-token log-probabilities.
        implicit: β log π/π_ref of each response.
        gap: KL(π‖π*), nats.
        error: largest |difference of implicit rewards − difference of rewards| over all pairs.
        reward: E[r].
        kl: KL(π‖π_ref), nats.
    """

    policy: Policy
    implicit: Float[Tensor, " sequences"]
    gap: float
    error: float
    reward: float
    kl: float


def fitted(task: Task, pairs: Pairs, kl_coef: float) -> Fitted:
    """Fit and compare with the optimum of RLHF."""
    policy = fit(task, pairs, kl_coef)
    best = optimum(task.reference, task.scores, task.tree, kl_coef=kl_coef).policy
    ours, theirs = (sequence_logprobs(p, task.tree) for p in (policy, best))
    implicit = implicit_rewards(policy, task.reference, task.tree, kl_coef=kl_coef)
    wrong = implicit - task.scores
    return Fitted(
        policy=policy, implicit=implicit, gap=divergence(ours, theirs).item(),
        error=(wrong.max() - wrong.min()).item(), reward=task.reward(policy), kl=task.kl(policy),
    )  # fmt: skip


def fits_table(task: Task, fits: dict[float, Fitted]) -> Table:
    """All pairs, several β, beside the optimum."""
    rows = []
    for kl_coef, found in fits.items():
        best = optimum(task.reference, task.scores, task.tree, kl_coef=kl_coef).point
        rows.append((
            kl_coef, best.reward, found.reward, best.kl, found.kl, abs(found.gap), found.error
        ))  # fmt: skip
    return Table(
        caption="DPO on all pairs beside the optimum of RLHF",
        columns=(
            Column(name="β", format="g"), Column(name="reward of π*", format=".6f"),
            Column(name="of DPO", format=".6f"), Column(name="KL of π*, nats", format=".6f"),
            Column(name="of DPO, nats", format=".6f"),
            Column(name="KL(DPO‖π*), nats", format=".6f"),
            Column(name="largest error of a difference", format=".6f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def differences_table(task: Task, found: Fitted) -> Table:
    """A few pairs."""
    words = letters().words
    order = task.scores.argsort(descending=True).tolist()
    rows = []
    for first, second in zip(order[:SHOWN], order[::-1][:SHOWN], strict=True):
        names = (
            f"`{' '.join(words[a] for a in task.tree.tokens[i][task.tree.mask[i]].tolist())}`"
            for i in (first, second)
        )
        rows.append((
            *names, (task.scores[first] - task.scores[second]).item(),
            (found.implicit[first] - found.implicit[second]).item(),
        ))  # fmt: skip
    return Table(
        caption=f"Differences between answers at β = {KL_COEF:g}",
        columns=(
            Column(name="answer"), Column(name="and another"),
            Column(name="difference of rewards", format=".6f"),
            Column(name="of implicit rewards", format=".6f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def samples_table(task: Task, samples: dict[int, list[Fitted]]) -> Table:
    """Finite pairs."""
    best = optimum(task.reference, task.scores, task.tree, kl_coef=KL_COEF).point
    rows = [("all, π*", "", best.reward, best.kl, best.objective)]
    rows += [
        (f"{count:,}", str(seed), f.reward, f.kl, f.reward - KL_COEF * f.kl)
        for count, each in samples.items()
        for seed, f in enumerate(each)
    ]
    return Table(
        caption=f"DPO at β = {KL_COEF:g} on pairs of the reference's answers, judged once",
        columns=(
            Column(name="pairs"), Column(name="seed"), Column(name="reward", format=".3f"),
            Column(name="KL, nats", format=".3f"), Column(name="reward − β KL", format="+.3f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _differences(axis: Axes, task: Task, found: Fitted, title: str, color: str) -> None:
    """Every pair: difference of implicit rewards against difference of rewards."""
    first, second = torch.triu_indices(len(task.scores), len(task.scores), offset=1)
    x = (task.scores[first] - task.scores[second]).tolist()
    y = (found.implicit[first] - found.implicit[second]).tolist()
    ends = [min(x), max(x)]
    axis.plot(ends, ends, color=GREY, linewidth=1)
    axis.plot(x, y, ".", color=color, markersize=3)
    axis.set(title=title, xlabel="difference of rewards", ylabel="difference of implicit rewards")


@styled
def draw(task: Task, exact: Fitted, samples: dict[int, list[Fitted]]) -> Figure:
    """Implicit against true differences, and the KL that finite pairs spend."""
    figure, axes = panels(3, width=11.5, height=3.5)
    _differences(axes[0], task, exact, "All pairs", BLUE)
    count = COUNTS[1]
    _differences(axes[1], task, samples[count][0], f"{count:,} pairs, seed 0", VERMILLION)
    for number, each in samples.items():
        axes[2].plot([number] * len(each), [f.kl for f in each], "o", color=VERMILLION)
    axes[2].axhline(exact.kl, color=INK, linewidth=0.9)
    axes[2].annotate(
        "π*", (COUNTS[-1], exact.kl), xytext=(14, 3), textcoords="offset points", fontsize=9
    )
    axes[2].set(
        title=f"KL spent at β = {KL_COEF:g}", xlabel="pairs", ylabel="nats per response",
        xscale="log", xlim=(150, 900_000),
    )  # fmt: skip
    axes[2].set_ylim(bottom=0)
    return figure


def lesson() -> Lesson:
    """Fit on everything, then on samples."""
    task = task_of(letters())
    fits = {kl_coef: fitted(task, exact_pairs(task), kl_coef) for kl_coef in KL_COEFS}
    samples = {
        count: [fitted(task, drawn_pairs(task, count, seed=s), KL_COEF) for s in range(SEEDS)]
        for count in COUNTS
    }
    exact = fits[KL_COEF]
    return Lesson(
        name="dpo",
        title="DPO is RLHF's optimum read backwards, if the pairs say everything",
        text=TEXT,
        formula=FORMULA,
        tables=(
            fits_table(task, fits),
            differences_table(task, exact),
            samples_table(task, samples),
        ),
        figure=draw(task, exact, samples),
        figure_caption="Differences of implicit rewards against differences of rewards, for DPO on "
        "all pairs and on a sample of them; the KL that DPO spends with finite pairs, three seeds "
        "each, beside that of the optimum.",
        remember=REMEMBER,
    )
