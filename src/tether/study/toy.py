"""`tether toy`: the eight-token language through the production loop, beside its exact frontier.

Flows in: values of β and seeds. Flows out: a row for each β, its figures exact. The policy is a
bigram, so the fair comparison is the best bigram; the frontier of all policies stands beside it.
"""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.baseline import first_controller, measure_baseline
from tether.config import (
    AdvantagesConfig,
    CriticConfig,
    GenerationConfig,
    KLConfig,
    ModelConfig,
    PPOConfig,
    PromptsConfig,
    Recipe,
    RewardConfig,
)
from tether.data.prompts import Prompt, PromptSet
from tether.exact import markov
from tether.exact.history import with_history
from tether.exact.languages import REWARDED_TOKEN, Language
from tether.models.load import Policy, make_policy
from tether.observer import Observer, SilentObserver
from tether.prepare import Prepared
from tether.rewards import Reward
from tether.study.toy_ground import (
    SHOWN,
    Ground,
    Standing,
    distinct,
    evaluation_sentences,
)
from tether.train import train_step
from tether.update import make_optimizer

COEFS = (1.0, 0.5, 0.3, 0.2, 0.1)
"""β that span the frontier, from 0.13 to 22 nats."""
STEPS = 40
BATCH = 512
HELDOUT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run.

    Attributes:
        coefficient: β of ours, c of the article's; reward per nat.
        standing: where the trained policy stands, exactly.
        distinct: different sentences among 512.
        samples: the first of those, as token ids.
        reported: reward and fluency as the mean of those 512.
    """

    coefficient: float
    standing: Standing
    distinct: int
    samples: tuple[tuple[int, ...], ...]
    reported: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """What a bigram can reach at β.

    Attributes:
        reward: of the best bigram, reward units.
        kl: its KL, nats per response.
        objective: its J = E[r] − β KL, reward units.
        cost: J* − J: what a policy that depends on the step has on it, reward units.
    """

    reward: float
    kl: float
    objective: float
    cost: float


def best_bigram(known: Ground, kl_coef: float) -> Best:
    """The best bigram at β."""
    found = known.best_bigram(kl_coef)
    return Best(
        reward=found.point.reward,
        kl=found.point.kl,
        objective=found.point.objective,
        cost=found.gap,
    )


def objective(row: Row) -> float:
    """J = E[r] − β KL of a trained policy, reward units."""
    return row.standing.reward - row.coefficient * row.standing.kl


def bigram_efficiency(row: Row, best: Best) -> float:
    """The least KL that a bigram needs for this reward over the KL spent; a lower bound of it.

    No bigram has E[r] − β KL above the best one's, so a reward r takes at least (r − J)/β nats:
    the frontier's tangent, which lies below it and touches it at the best bigram.
    """
    return (row.standing.reward - best.objective) / (row.coefficient * row.standing.kl)


def reference_row(known: Ground) -> Row:
    """The reference itself, as the row that all others are compared with."""
    return row_of(known, known.reference[0], 0.0)


def row_of(known: Ground, law: Float[Tensor, "prev vocab"], coefficient: float) -> Row:
    """Look at a bigram: exactly, and through 512 sentences."""
    sentences = evaluation_sentences(law, known.language)
    before = torch.cat([torch.full_like(sentences[:, :1], known.start), sentences[:, :-1]], dim=1)
    fluency = known.reference[0][before, sentences].sum(dim=1)
    reward = known.language.reward(sentences, torch.ones_like(sentences, dtype=torch.bool))
    return Row(
        coefficient=coefficient,
        standing=known.standing(law.double().log_softmax(dim=-1)),
        distinct=distinct(sentences),
        samples=tuple(tuple(s) for s in sentences[:SHOWN].tolist()),
        reported=(reward.mean().item(), fluency.mean().item()),
    )


def recipe(kl_coef: float, *, seed: int, steps: int = STEPS) -> Recipe:
    """The run of one β: fixed β, k1 in the reward, λ 0.95, a rate that falls to 0."""
    return Recipe(
        steps=steps,
        seed=seed,
        threads=1,
        device="cpu",
        model=ModelConfig(name="the eight-token language", trainable="full"),
        prompts=PromptsConfig(per_step=1, heldout=HELDOUT),
        generation=GenerationConfig(responses_per_prompt=BATCH, max_new_tokens=6),
        reward=RewardConfig(function=("the:reward",)),
        kl=KLConfig(controller="fixed", coef=kl_coef),
        advantages=AdvantagesConfig(gae_lambda=0.95),
        critic=CriticConfig(hidden_units=32, learning_rate=0.02),
        ppo=PPOConfig(
            learning_rate=0.1, final_learning_rate_fraction=0.0, epochs=4, minibatches=1,
            max_gradient_norm=1e3, max_approx_kl_old=1.0, micro_batch_tokens=2**20,
        ),
    )  # fmt: skip


def prepared(language: Language, settings: Recipe, observer: Observer) -> Prepared:
    """Everything that `train_step` works with, for the language instead of files; gates passed."""
    torch.manual_seed(settings.seed)  # initial weights of the value head
    lm = with_history(language.reference, steps=language.length + 1).float()
    policy = make_policy(
        language.base(lm), settings.model, value_units=settings.critic.hidden_units
    )
    word = language.words[REWARDED_TOKEN]

    def count(_prompts: list[str], responses: list[str]) -> list[float]:
        return [float(response.split().count(word)) for response in responses]

    reward = Reward(
        model=None, functions=(("count", count),), weights=(1.0,), missing_eos_penalty=0.0
    )
    heldout = language.prompts(settings.prompts.heldout)
    prompts = PromptSet(train=(Prompt(text=heldout.texts[0], tokens=language.prompt),), heldout=())
    baseline = measure_baseline(settings, policy, reward, None, prompts, heldout, observer)
    return Prepared(
        recipe=settings, policy=policy, reward=reward, judge=None, prompts=prompts,
        heldout=heldout, baseline=baseline,
    )  # fmt: skip


def train(known: Ground, settings: Recipe, observer: Observer) -> Float[Tensor, "prev vocab"]:
    """Run the production loop to its end; the trained bigram's logits, float64."""
    ready = prepared(known.language, settings, SilentObserver())
    optimizer = make_optimizer(ready.policy, settings.ppo, settings.critic)
    controller = first_controller(settings, ready.baseline, observer)
    for step in range(1, settings.steps + 1):
        controller, _ = train_step(ready, optimizer, controller, step=step)
        observer.advance()
    return law_of(ready.policy)


def law_of(policy: Policy) -> Float[Tensor, "prev vocab"]:
    """A trained bigram's next-token log-probabilities, in float64."""
    with torch.no_grad():
        return markov.read_chain(copy.deepcopy(policy.lm).double(), length=1)[0]  # type: ignore[arg-type]


def tether_row(known: Ground, kl_coef: float, seed: int, observer: Observer) -> Row:
    """Train at β and say where that led."""
    settings = recipe(kl_coef, seed=seed)
    observer.stage(f"training at β = {kl_coef:g}, seed {seed}", settings.steps)
    return row_of(known, train(known, settings, observer), kl_coef)
