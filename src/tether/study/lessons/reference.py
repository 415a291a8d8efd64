"""The same reward and the same β on three anchors: pre-trained, fine-tuned, too focused."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from tether.exact import markov
from tether.exact.frontier import most_reward
from tether.exact.languages import REWARDED_TOKEN, eight_tokens, grammar
from tether.exact.markov import Chain
from tether.exact.optimum import Point
from tether.study.lessons.page import Column, Lesson, Table
from tether.study.lessons.style import BLUE, GREEN, ORANGE, panels, styled

START, LENGTH, VOCAB = 0, 6, 8
KL_COEF = 0.3
BUDGET = 3.0
"""Nats per response."""
KL_COEFS = (2.0, 1.0, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.17, 0.15, 0.12, 0.1)
GRAMMAR_SHARE = 0.25
"""How much of the pre-trained model is this grammar; the rest is other text, here uniform."""
FOCUS = 3.0
"""The too-focused model: the fine-tuned one's log-probabilities times this."""
COMMON = 0.05
"""Grammatical transitions are likelier than this in the grammar."""

TEXT = (
    "The KL is measured from somewhere, and that somewhere is a choice. In the eight-token "
    "language a grammar says which token may follow which, and the reward counts one token. The "
    "run is the same three times: start at the reference, pay β = 0.3 per nat, train to the end, "
    "that is to the exact optimum. Only the reference differs.",
    "The pre-trained model has read everything; a quarter of that was this grammar. The fine-tuned "
    "model is fitted to 4,000 sentences of the grammar. The too-focused one is the fine-tuned "
    "model made three times as sure of everything, as happens with too many epochs on too few "
    "examples. The first table shows them before any reward.",
    "At the same β they end in three different places. For the pre-trained model ungrammatical "
    "steps were never unlikely, so they cost little: it earns the most and four in five of its "
    "steps break the grammar. The tether held it to its reference; the reference did not know the "
    "task. The too-focused model hardly moves. Each new token would cost more nats than the reward "
    "pays for, and the answers stay what they were: one and a half of them. The fine-tuned model "
    "earns something, keeps seven in ten steps grammatical and all of its variety.",
    "Nor does giving each the same KL make them equal. The third table spends 3 nats from each "
    "anchor: a nat is a unit of distance, but the directions in which it is cheap are the "
    "reference's. The last column, the KL from the fine-tuned model, shows that a small KL from "
    "one model says nothing about another. So the reference should be the model whose habits are "
    "worth keeping: the fine-tuned one, before it has forgotten how to say things in more than one "
    "way.",
)

FORMULA = """\
π*_ref(y) ∝ π_ref(y) · exp(r(y)/β)
what π_ref does not exclude is cheap; what it excludes costs −log π_ref(y) nats, at any β"""

REMEMBER = (
    "A tether holds to its anchor, no better: what the reference allows, the KL does not forbid.",
    "Anchor to the fine-tuned model. The pre-trained one knows too much, a too-focused one too "
    "little.",
    "A KL, and a β, can only be compared between runs with the same reference.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a policy of the eight-token language is like.

    Attributes:
        reward: tokens that are paid, per response.
        ungrammatical: share of its steps that the grammar has at 2 %.
        entropy: nats per response.
        from_tuned: KL from the fine-tuned model, nats.
    """

    reward: float
    ungrammatical: float
    entropy: float
    from_tuned: float


def token_rewards() -> Float[Tensor, " vocab"]:
    """1 for the paid token."""
    rewards = torch.zeros(VOCAB, dtype=torch.float64)
    rewards[REWARDED_TOKEN] = 1.0
    return rewards


def anchors() -> dict[str, Chain]:
    """The three references."""
    tuned = markov.read_chain(eight_tokens().reference, length=LENGTH)
    mixed = GRAMMAR_SHARE * grammar() + (1 - GRAMMAR_SHARE) / VOCAB
    focused = (FOCUS * tuned[0]).log_softmax(dim=-1)
    return {
        "pre-trained": markov.stationary(mixed.log(), length=LENGTH),
        "fine-tuned": tuned,
        "too focused": markov.stationary(focused, length=LENGTH),
    }


def ungrammatical(policy: Chain) -> float:
    """Expected share of steps that the grammar hardly has."""
    wrong = (grammar() < COMMON).double()
    each = (policy.exp() * wrong).sum(dim=-1)
    return (markov.visits(policy, start=START) * each).sum().item() / LENGTH


def measure(policy: Chain, tuned: Chain) -> Measured:
    """Reward, grammar, variety, and the way from the fine-tuned model."""
    return Measured(
        reward=markov.mean_reward(policy, token_rewards(), start=START).item(),
        ungrammatical=ungrammatical(policy),
        entropy=markov.entropy(policy, start=START).item(),
        from_tuned=markov.kl(policy, tuned, start=START).item(),
    )


def trained(reference: Chain, kl_coef: float) -> markov.ChainOptimum:
    """Where a run from this reference ends."""
    return markov.optimum(reference, token_rewards(), start=START, kl_coef=kl_coef)


def coefficient_for(reference: Chain, budget: float) -> float:
    """β that spends the budget."""

    def solve(kl_coef: float) -> Point:
        return trained(reference, kl_coef).point

    return most_reward(solve, budget).kl_coef


def table_of(caption: str, policies: dict[str, tuple[Chain, float, float]], tuned: Chain) -> Table:
    """Measure some policies, each given with its β and its KL."""
    rows = []
    for name, (policy, kl_coef, spent) in policies.items():
        m = measure(policy, tuned)
        answers = torch.tensor(m.entropy).exp().item()
        rows.append((
            name, kl_coef, spent, m.reward, m.ungrammatical, m.entropy, answers, m.from_tuned,
        ))  # fmt: skip
    return Table(
        caption=caption,
        columns=(
            Column(name="reference"), Column(name="β", format=".3f"),
            Column(name="KL from it, nats", format=".3f"), Column(name="reward", format=".3f"),
            Column(name="ungrammatical steps", format=".1%"),
            Column(name="entropy, nats", format=".3f"),
            Column(name="answers in use", format=",.1f"),
            Column(name="KL from the fine-tuned, nats", format=".3f"),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def ends(
    references: dict[str, Chain], kl_coefs: dict[str, float]
) -> dict[str, tuple[Chain, float, float]]:
    """The trained policy of each reference with its β and KL."""
    found = {}
    for name, reference in references.items():
        best = trained(reference, kl_coefs[name])
        found[name] = (best.policy, best.point.kl_coef, best.point.kl)
    return found


@styled
def draw(references: dict[str, Chain]) -> Figure:
    """Grammar and variety against reward along each anchor's best policies."""
    figure, axes = panels(3, width=11.5, height=3.4)
    looks = {
        "pre-trained": (ORANGE, ":", "^"),
        "fine-tuned": (BLUE, "-", "o"),
        "too focused": (GREEN, "--", "s"),
    }
    tuned = references["fine-tuned"]
    for name, reference in references.items():
        color, dash, mark = looks[name]
        best = [trained(reference, kl_coef) for kl_coef in KL_COEFS]
        path = [measure(reference, tuned), *(measure(b.policy, tuned) for b in best)]
        reward, spent = [m.reward for m in path], [0.0, *(b.point.kl for b in best)]
        here = 1 + KL_COEFS.index(KL_COEF)
        panes = (
            (spent, reward),
            (reward, [m.ungrammatical for m in path]),
            (reward, [m.entropy for m in path]),
        )
        for axis, (x, y) in zip(axes, panes, strict=True):
            axis.plot(x, y, dash, color=color, label=name)
            axis.plot(x[:1], y[:1], mark, color=color, mfc="white")
            axis.plot(x[here : here + 1], y[here : here + 1], mark, color=color)
    axes[0].set(
        title="Reward for KL",
        xlabel="KL from its own reference, nats",
        ylabel="reward, tokens paid",
    )
    axes[1].set(
        title="Grammar",
        xlabel="reward, tokens paid",
        ylabel="ungrammatical steps, share",
        ylim=(0, 1),
    )
    axes[2].set(title="Variety", xlabel="reward, tokens paid", ylabel="entropy, nats per response")
    axes[0].legend(loc="lower right")
    return figure


def lesson() -> Lesson:
    """Anchor three times."""
    references = anchors()
    tuned = references["fine-tuned"]
    before = {name: (chain, float("inf"), 0.0) for name, chain in references.items()}
    same = ends(references, dict.fromkeys(references, KL_COEF))
    spent = {name: coefficient_for(chain, BUDGET) for name, chain in references.items()}
    return Lesson(
        name="reference",
        title="The anchor decides what a nat can buy",
        text=TEXT,
        formula=FORMULA,
        tables=(
            table_of("The references themselves", before, tuned),
            table_of(f"Trained with β = {KL_COEF:g}", same, tuned),
            table_of(f"Trained to {BUDGET:g} nats", ends(references, spent), tuned),
        ),
        figure=draw(references),
        figure_caption="The best policies anchored to a pre-trained, a fine-tuned and a too-"
        "focused model: reward against KL, ungrammatical steps and entropy against reward. Open "
        "marks are "
        f"the references, filled ones the policies at β = {KL_COEF:g}.",
        remember=REMEMBER,
    )
