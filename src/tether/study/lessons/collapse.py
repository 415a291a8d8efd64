"""Ten ways to say the right thing: how many are left, against β, and what sampling noise does."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from tether.exact.enumerate import Table as Policy
from tether.exact.enumerate import entropy, sequence_logprobs
from tether.exact.optimum import optimum
from tether.exact.tree import Tree, grow_tree
from tether.study.ascent import Task
from tether.study.lessons.page import Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREEN, ORANGE, SKY, VERMILLION, panels, styled
from tether.study.sampled import ascend_on_samples

WAYS = 10
"""Ways to say anything, all equally likely under the reference; also contents that can be said."""
PROMPTS = 3
RIGHT = 0.5
"""The reference says the right thing this often."""
TASTE = 0.1
"""Standard deviation of what the judge adds for the way a thing is said, reward units."""
TASTE_SEED = 9
KL_COEFS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
DRAWN = 100
SEEDS, STEPS, BATCH, RATE, NOISE = 3, 200, 64, 3.0, 0.5
HELD = 0.05

Scores = Float[Tensor, " sequences"]

TEXT = (
    "An answer has two tokens: the way it is put, one of ten, and what it says. Before training "
    "all ways are equally likely and half of the answers are right. There are three prompts, each "
    "with its own right answer. The judge pays 1 for being right, plus a slight taste for some "
    "ways over others, different for each prompt, with standard deviation 0.1. Nobody asked for "
    "that taste; no fitted reward model is without one.",
    "The first table solves for the best policy at each β exactly. At β = 0.2 nearly every answer "
    "is right and nine of the ten ways are in use: all that training was for is there. From then "
    "on the judge's reward still rises, but the share of right answers hardly can; what is bought "
    "is taste, and the price is every way but one. Two ways whose rewards differ by Δ end with "
    "odds of exp(Δ/β): once β is well below a difference, however small, the loser is gone. "
    "Without a tether β is 0 and every difference is large.",
    "Then let the judge have no taste at all, so that the ten ways tie exactly. The expected "
    "gradient now leaves them alone. The second table trains on samples instead, 64 answers a step "
    "through the shipped loss, judged with some noise, as any judge's scores are. A way that is "
    "overpaid once becomes likelier, is drawn more often, and nothing pulls it back: the policy "
    "drifts until few ways are left, and which ones differs from seed to seed. The penalty is the "
    "restoring force. With β = 0.05 and the same seeds about nine ways stay in use.",
    "A mean reward sees none of this, and neither does a judge that reads one answer at a time. "
    "Entropy sees it, and so does counting how many different answers a prompt gets.",
)

FORMULA = """\
π*(way i)/π*(way j) = π_ref(i)/π_ref(j) · exp((rᵢ − rⱼ)/β)
answers in use = exp(entropy)          distinct in n draws = Σ_y 1 − (1 − π(y))ⁿ"""

REMEMBER = (
    "A reward has a best answer, and maximising it alone ends there; only the KL term has a use "
    "for the others.",
    "Differences well below β leave diversity alone; differences well above it decide everything.",
    "Equal answers collapse too: sampling noise drifts, and without a tether nothing brings it "
    "back.",
    "Watch entropy and distinct answers per prompt; the reward cannot show a collapse.",
)


def right_answers(tree: Tree, prompt: int) -> Scores:
    """1 where the answer says what the prompt asks for."""
    return (tree.tokens[:, 1] == prompt).double()


def task_of(prompt: int, tree: Tree) -> Task:
    """One prompt: its reference, and what the judge pays."""
    chances = torch.full((len(tree.next_prefix), WAYS), 1 / WAYS, dtype=torch.float64)
    chances[1:] = (1 - RIGHT) / (WAYS - 1)
    chances[1:, prompt] = RIGHT
    generator = torch.Generator().manual_seed(TASTE_SEED + prompt)
    taste = TASTE * torch.randn(WAYS, generator=generator, dtype=torch.float64)
    scores = right_answers(tree, prompt) + taste[tree.tokens[:, 0]]
    return Task(reference=chances.log(), scores=scores, tree=tree)


def ways(policy: Policy) -> Float[Tensor, " vocab"]:
    """Probability of each way."""
    return policy[0].exp()


def in_use(chances: Float[Tensor, " vocab"]) -> float:
    """exp(entropy): ten equal chances make 10, one certainty makes 1."""
    return (-torch.special.xlogy(chances, chances).sum()).exp().item()


def distinct(policy: Policy, tree: Tree, draws: int) -> float:
    """Expected number of different answers among `draws`."""
    chances = sequence_logprobs(policy, tree).exp()
    return (1 - (1 - chances) ** draws).sum().item()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The best policies of all prompts at one β; numbers are means over prompts.

    Attributes:
        kl_coef: β, infinite for the reference.
        policies: one a prompt.
        reward: what the judge pays.
        right: share of right answers.
        kl: nats per response.
        entropy: of a prompt's answers, nats.
        answers: exp(entropy) of a prompt's answers.
        distinct: different answers in 100 to a prompt.
        ways: in use.
        favourite: share of the commonest way.
    """

    kl_coef: float
    policies: list[Policy]
    reward: float
    right: float
    kl: float
    entropy: float
    answers: float
    distinct: float
    ways: float
    favourite: float


def ending(kl_coef: float, tree: Tree) -> Ending:
    """Solve each prompt and measure."""
    tasks = [task_of(prompt, tree) for prompt in range(PROMPTS)]
    policies = [
        t.reference
        if math.isinf(kl_coef)
        else optimum(t.reference, t.scores, tree, kl_coef=kl_coef).policy
        for t in tasks
    ]
    both = list(zip(tasks, policies, strict=True))

    def mean(values: list[float]) -> float:
        return sum(values) / PROMPTS

    entropies = [entropy(policy, tree).item() for policy in policies]
    return Ending(
        kl_coef=kl_coef,
        policies=policies,
        reward=mean([task.reward(policy) for task, policy in both]),
        right=mean([t.mean(right_answers(tree, i), p) for i, (t, p) in enumerate(both)]),
        kl=mean([task.kl(policy) for task, policy in both]),
        entropy=mean(entropies),
        answers=mean([math.exp(value) for value in entropies]),
        distinct=mean([distinct(policy, tree, DRAWN) for policy in policies]),
        ways=mean([in_use(ways(policy)) for policy in policies]),
        favourite=mean([ways(policy).max().item() for policy in policies]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A run on samples whose ways tie exactly: ways in use at each step, and the end."""

    in_use: list[float]
    right: float
    favourite: float
    winner: int
    kl: float


def drift(kl_coef: float, seed: int, tree: Tree) -> Drift:
    """Train the first prompt on samples, without any taste in the judge."""
    right = right_answers(tree, 0)
    task = replace(task_of(0, tree), scores=right)
    path = ascend_on_samples(
        task, kl_coef=kl_coef, rate=RATE, steps=STEPS, answers=BATCH, noise=NOISE, seed=seed
    )
    end = path[-1]
    return Drift(
        in_use=[in_use(ways(policy)) for policy in path], right=task.mean(right, end),
        favourite=ways(end).max().item(), winner=int(ways(end).argmax()) + 1, kl=task.kl(end),
    )  # fmt: skip


def endings_table(endings: list[Ending]) -> Table:
    """Diversity against β."""
    return Table(
        caption="The best policy at each β, mean over three prompts",
        columns=(
            Column(name="β", format="g"), Column(name="reward", format=".3f"),
            Column(name="right", format=".1%"), Column(name="KL, nats", format=".3f"),
            Column(name="entropy, nats", format=".3f"),
            Column(name="answers in use per prompt", format=".2f"),
            Column(name=f"distinct in {DRAWN}", format=".1f"),
            Column(name="ways in use", format=".2f"), Column(name="commonest way", format=".1%"),
        ),
        rows=tuple(
            (
                "∞ (reference)" if math.isinf(e.kl_coef) else e.kl_coef, e.reward, e.right, e.kl,
                e.entropy, e.answers, e.distinct, e.ways, e.favourite,
            )
            for e in endings
        ),
    )  # fmt: skip


def drift_table(drifts: dict[float, list[Drift]]) -> Table:
    """Where sampling noise takes equal ways."""
    return Table(
        caption=f"No taste, ten equal ways: after {STEPS} steps of {BATCH} sampled answers",
        columns=(
            Column(name="run"), Column(name="seed"), Column(name="right", format=".1%"),
            Column(name="KL, nats", format=".3f"), Column(name="ways in use", format=".2f"),
            Column(name="commonest way", format=".1%"), Column(name="which"),
        ),
        rows=tuple(
            (
                f"β = {kl_coef:g}" if kl_coef else "no tether", str(seed), d.right, d.kl,
                d.in_use[-1], d.favourite, f"way {d.winner}",
            )
            for kl_coef, runs in drifts.items()
            for seed, d in enumerate(runs)
        ),
    )  # fmt: skip


@styled
def draw(endings: list[Ending], drifts: dict[float, list[Drift]]) -> Figure:
    """Ways of one prompt at three β; what β buys and costs; drift."""
    figure, axes = panels(3, width=11.5, height=3.4)
    shown = ((0.5, SKY, -0.28), (0.1, BLUE, 0.0), (0.02, VERMILLION, 0.28))
    by_coef = {e.kl_coef: e for e in endings}
    for kl_coef, color, shift in shown:
        chances = ways(by_coef[kl_coef].policies[0]).tolist()
        places = [i + 1 + shift for i in range(WAYS)]
        axes[0].bar(places, chances, width=0.27, color=color, label=f"β = {kl_coef:g}")
    axes[0].set(
        title="Ways to answer the first prompt", xlabel="way", ylabel="probability",
        xticks=range(1, WAYS + 1),
    )  # fmt: skip
    axes[0].grid(visible=False, axis="x")
    axes[0].legend()
    solved = [e for e in endings if not math.isinf(e.kl_coef)]
    x = [e.kl_coef for e in solved]
    used = [e.ways / WAYS for e in solved]
    axes[1].plot(x, [e.right for e in solved], "-o", color=GREEN, label="answers that are right")
    axes[1].plot(x, used, "--s", color=VERMILLION, label="ways in use, of ten")
    axes[1].set(title="What is gained, what is lost", xlabel="β, reward per nat", ylabel="share")
    axes[1].set(xscale="log", ylim=(0, 1.05))
    axes[1].set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes[1].legend(loc="lower right")
    colors = {0.0: (ORANGE, "-", "no tether"), HELD: (BLUE, "--", f"β = {HELD:g}")}
    for kl_coef, runs in drifts.items():
        color, dash, name = colors[kl_coef]
        for i, each in enumerate(runs):
            label = f"{name}, {SEEDS} seeds" if i == 0 else None
            axes[2].plot(each.in_use, dash, color=color, label=label, linewidth=1.5)
    axes[2].set(title="Equal ways, sampled training", xlabel="step", ylabel="ways in use")
    axes[2].set_ylim(0, 13)
    axes[2].set_yticks(range(0, 11, 2))
    axes[2].legend(loc="upper right", ncols=2)
    return figure


def lesson() -> Lesson:
    """Solve each β, then train on samples."""
    tree = grow_tree(vocab_size=WAYS, length=2, eos=None)
    endings = [ending(kl_coef, tree) for kl_coef in (math.inf, *KL_COEFS)]
    drifts = {b: [drift(b, seed, tree) for seed in range(SEEDS)] for b in (0.0, HELD)}
    return Lesson(
        name="collapse",
        title="What can be said in ten ways ends with one",
        text=TEXT,
        formula=FORMULA,
        tables=(endings_table(endings), drift_table(drifts)),
        figure=draw(endings, drifts),
        figure_caption="The ten ways to answer one prompt at three β; the share of right answers "
        "and of ways in use against β; ways in use while training on samples of ways that are "
        "exactly equal, with and without a tether.",
        remember=REMEMBER,
    )
