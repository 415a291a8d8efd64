"""The published objective, exactly: kept for the toy alone, a known-bad example and nothing else.

    loss = −mean(min(R Â, clip(R, 0.8, 1.2) Â) − c Σₜ (log π − log π_ref)),   R = Σₜ π/π_old

R is a sum of per-token ratios, not their product: before any step it is the number of tokens, far
above the clip, so sentences better than the mean get no gradient from it. The reference is a
constant in Σ(log π − log π_ref), so the coefficient's pull does not depend on it: it drives the
policy away from what was just sampled. Nothing here may be used to train anything else.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tether.exact.languages import Language, grammar_sentences
from tether.observer import Observer
from tether.study.toy import Row, row_of
from tether.study.toy_ground import Ground, draw

COEFS = (0.0, 1.0, 3.0, 6.0, 20.0)
"""The published coefficients; 0 is the row without the term."""
ITERATIONS = 120
BATCH = 512
EPOCHS = 4
LEARNING_RATE = 0.05
CLIP = 0.2
SAMPLING_SEED = 2

Logits = Float[Tensor, "prev vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row as it was printed.

    Attributes:
        reward: mean of 512 sentences.
        fluency: mean log π_ref of those, nats.
        sample: the first sentence; None where none was printed.
    """

    reward: float
    fluency: float
    sample: tuple[int, ...] | None


ALL_REWARDED = (3, 3, 3, 3, 3, 3)
PUBLISHED = {
    0.0: Published(reward=6.00, fluency=-23.08, sample=ALL_REWARDED),
    1.0: Published(reward=6.00, fluency=-23.08, sample=ALL_REWARDED),
    3.0: Published(reward=3.00, fluency=-13.73, sample=(1, 3, 1, 3, 1, 3)),
    6.0: Published(reward=2.00, fluency=-7.12, sample=None),
    20.0: Published(reward=2.00, fluency=-5.75, sample=None),
}
REFERENCE = Published(reward=0.84, fluency=-6.19, sample=(4, 0, 1, 2, 6, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """What the published ratio is before any gradient step, when every true ratio is 1.

    Attributes:
        ratio: mean R.
        silent: share of sentences whose gradient the clip has taken away.
    """

    ratio: float
    silent: float


def article_reference(*, steps: int = 400, learning_rate: float = 0.1) -> Logits:
    """The reference as published: an 8×8 embedding from seed 0, fitted in float32 by Adam."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table = nn.Embedding(8, 8)
    sentences = grammar_sentences(4000)
    optimizer = torch.optim.Adam(table.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = table(sentences[:, :-1].flatten())
        nn.functional.cross_entropy(logits, sentences[:, 1:].flatten()).backward()
        optimizer.step()
    return table.weight.detach()


def token_logprobs(
    table: Logits, sentences: Int[Tensor, "batch response"], *, start: int
) -> Float[Tensor, "batch response"]:
    """log π of each token after the one before it."""
    before = torch.cat([torch.full_like(sentences[:, :1], start), sentences[:, :-1]], dim=1)
    logprobs = table[before].log_softmax(dim=-1)
    return logprobs.gather(-1, sentences[..., None]).squeeze(-1)


def published_loss(
    logprobs: Float[Tensor, "batch response"],
    old_logprobs: Float[Tensor, "batch response"],
    ref_logprobs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, " batch"],
    *,
    coefficient: float,
) -> Float[Tensor, ""]:
    """The loss in the head of this page."""
    ratio = (logprobs - old_logprobs).exp().sum(dim=1)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    return -(surrogate - coefficient * (logprobs - ref_logprobs).sum(dim=1)).mean()


def standardised(scores: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """The published advantage: scores of the batch at mean 0 and (sample) deviation 1."""
    return (scores - scores.mean()) / (scores.std() + 1e-8)


def first_step(language: Language, reference: Logits) -> FirstStep:
    """Look at the published ratio on the first batch."""
    sentences, scores = _batch(language, reference, _generator(0))
    logprobs = token_logprobs(reference, sentences, start=language.prompt[-1])
    ratio = (logprobs - logprobs).exp().sum(dim=1)
    silent = (ratio > 1 + CLIP) & (standardised(scores) > 0)
    return FirstStep(ratio=ratio.mean().item(), silent=silent.float().mean().item())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SAMPLING_SEED + 1000 * seed)


def _batch(
    language: Language, table: Logits, generator: torch.Generator
) -> tuple[Int[Tensor, "batch response"], Float[Tensor, " batch"]]:
    """Sentences of the policy and their scores."""
    sentences = draw(
        table, start=language.prompt[-1], length=language.length, count=BATCH, generator=generator
    )
    mask = torch.ones_like(sentences, dtype=torch.bool)
    return sentences, language.reward(sentences, mask).float()


def train(
    language: Language, reference: Logits, coefficient: float, *, seed: int, observer: Observer
) -> Logits:
    """Train as published; seed 0 draws the published batches."""
    table = reference.clone().requires_grad_()
    optimizer = torch.optim.Adam([table], lr=LEARNING_RATE)
    generator, start = _generator(seed), language.prompt[-1]
    for _ in range(ITERATIONS):
        with torch.no_grad():
            sentences, scores = _batch(language, table, generator)
            old = token_logprobs(table, sentences, start=start)
            ref = token_logprobs(reference, sentences, start=start)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            new = token_logprobs(table, sentences, start=start)
            published_loss(new, old, ref, standardised(scores), coefficient=coefficient).backward()
            optimizer.step()
        observer.advance()
    return table.detach()


def article_row(
    known: Ground, reference: Logits, coefficient: float, seed: int, observer: Observer
) -> Row:
    """Train as published and say where that led."""
    observer.stage(f"the article at c = {coefficient:g}, seed {seed}", ITERATIONS)
    table = train(known.language, reference, coefficient, seed=seed, observer=observer)
    return row_of(known, table, coefficient)
