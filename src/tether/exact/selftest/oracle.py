"""What production is held against: plain forward passes and loops in float64, nothing shared.

Absent on purpose: every function of the training path. A mistake there must not be able to reach
the number that it is compared with.
"""

import copy
import math
from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from tether.exact.enumerate import Table
from tether.exact.languages import Language, letters


def precise(lm: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model, with the weights it has, in float64 on the CPU."""
    return copy.deepcopy(lm).cpu().double()  # type: ignore[return-value]


def plain_table(lm: PreTrainedModel, language: Language, *, temperature: float = 1.0) -> Table:
    """Next-token log-probabilities of every prefix, from whole forward passes without padding."""
    parts = []
    for level in language.tree.levels:
        prompt = torch.tensor(language.prompt).expand(len(level), -1)
        logits = lm(input_ids=torch.cat([prompt, level], dim=1)).logits[:, -1]
        parts.append((logits / temperature).log_softmax(dim=-1))
    return torch.cat(parts)


@cache
def small_language() -> Language:
    """Two letters and EOS, at most four tokens; made once."""
    return letters()


@cache
@torch.no_grad()
def known_table(name: str, dtype: torch.dtype, temperature: float) -> Table:
    """A model of the small language in float64, its weights rounded to a precision first.

    Args:
        name: reference, policy or old.
        dtype: precision that production's weights have.
        temperature: divides the logits.
    """
    language = small_language()
    lm = language.reference if name == "reference" else language.others[name]
    rounded = copy.deepcopy(lm).to(dtype)  # type: ignore[arg-type]
    return plain_table(precise(rounded), language, temperature=temperature)


@torch.no_grad()
def plain_logprobs(
    lm: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], *, temperature: float
) -> Float[Tensor, " response"]:
    """log π of each token of one response, one forward pass, no padding and no cache."""
    logits = lm(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
    logprobs = (logits / temperature).log_softmax(dim=-1)
    return torch.stack([logprobs[len(prompt) - 1 + t, token] for t, token in enumerate(response)])


def gae_by_double_sum(
    rewards: Sequence[float], values: Sequence[float], *, gae_lambda: float
) -> list[float]:
    """Âₜ = Σₖ λᵏ (rₜ₊ₖ + V(sₜ₊ₖ₊₁) − V(sₜ₊ₖ)), term by term, discount 1."""
    ahead = [*values[1:], 0.0]
    errors = [r + after - v for r, after, v in zip(rewards, ahead, values, strict=True)]
    return [
        sum(gae_lambda**k * error for k, error in enumerate(errors[t:])) for t in range(len(errors))
    ]


def clipped_gradient(
    log_ratio: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    *,
    clip_epsilon: float,
) -> Float[Tensor, "batch response"]:
    """Slope of PPO's clipped loss in each token's log-probability, token by token.

    It is −ρA over the number of tokens, and 0 where the ratio is past the side that A pushes to.
    """
    slopes = torch.zeros_like(log_ratio, dtype=torch.float64)
    total = sum(sum(row) for row in mask.tolist())
    for i, row in enumerate(mask.tolist()):
        for t, real in enumerate(row):
            ratio, advantage = math.exp(log_ratio[i, t].item()), advantages[i, t].item()
            past = ratio > 1 + clip_epsilon if advantage > 0 else ratio < 1 - clip_epsilon
            slopes[i, t] = -ratio * advantage / total if real and not past else 0.0
    return slopes


def steered(measured: Sequence[float], *, start: float, target: float, rate: float) -> list[float]:
    """β after each measurement by the rule of the target controller, as a loop of floats.

    Bounds of β are 10⁻⁴ and 10, as in a recipe.
    """
    multiplier, seen, betas = start, list[float](), list[float]()
    for kl in measured:
        if math.isnan(kl) or math.isinf(kl) or kl < -1e-3:
            betas.append(betas[-1])
            continue
        change = kl - seen[-1] if seen else 0.0
        seen.append(kl)
        error = min(1.0, max(-1.0, (kl + 4 * change) / target - 1))
        settled = len(seen) >= 3 and seen[-1] - seen[-3] < 0.01 * target
        if error >= 0 or settled:
            multiplier = min(10.0, max(1e-4, multiplier * math.exp(rate * error)))
        betas.append(min(10.0, multiplier * math.exp(0.6 * max(0.0, error))))
    return betas


def numbers_of_responses(
    tokens: Int[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    language: Language,
) -> Int[Tensor, " batch"]:
    """Number of each response in the language's tree; −1 where it is none of them."""

    def key(row: Sequence[int], real: Sequence[bool]) -> tuple[int, ...]:
        return tuple(token for token, here in zip(row, real, strict=True) if here)

    def keys(rows: Tensor, masks: Tensor) -> list[tuple[int, ...]]:
        return [key(r, m) for r, m in zip(rows.tolist(), masks.tolist(), strict=True)]

    number = {k: i for i, k in enumerate(keys(language.tree.tokens, language.tree.mask))}
    return torch.tensor([number.get(k, -1) for k in keys(tokens, mask)])
