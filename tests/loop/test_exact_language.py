"""The production stages on a language small enough to enumerate: every number is known exactly."""

import itertools
import math

import pytest
import torch
from conftest import tiny_policy

from tether.core.masking import length_mask
from tether.core.shaping import shape_rewards
from tether.models.load import reference_of
from tether.rollout import collect_rollout, measure_kl, read_reference
from tether.types import PromptBatch

VOCAB, LIMIT, EOS = 4, 3, 2


def sequences() -> list[tuple[int, ...]]:
    """All responses: they end with the first EOS or at the limit."""
    found = []
    for length in range(1, LIMIT + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ended = tokens[-1] == EOS
            if EOS not in tokens[:-1] and (ended or length == LIMIT):
                found.append(tokens)
    return found


def log_probability(lm, prompt: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
    """Sum of next-token log-probabilities, one plain forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    logp = lm(input_ids=ids).logits[0].double().log_softmax(-1)
    places = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    return torch.stack([logp[i, t] for i, t in zip(places, tokens, strict=True)]).sum()


@pytest.fixture(scope="module")
def language():
    policy = tiny_policy(vocab=VOCAB, first_layer=2)
    words = sequences()
    with torch.no_grad():
        logp = torch.stack([log_probability(policy.lm, [3], w) for w in words])
        with reference_of(policy) as lm:
            logq = torch.stack([log_probability(lm, [3], w) for w in words])
    return policy, words, logp, logq


def drawn(policy, n: int):
    prompts = PromptBatch(
        prompt_tokens=torch.tensor([[3]]),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        texts=("w3",),
    )
    rollout = collect_rollout(
        policy, prompts, responses_per_prompt=n, max_new_tokens=LIMIT, temperature=1.0, seed=1,
        reward_layer=None, recompute_logprobs=False, memory_gib=2.0,
    )  # fmt: skip
    reference = read_reference(policy, rollout, reward_layer=None, memory_gib=2.0)
    return rollout, measure_kl(policy, rollout, reference, temperature=1.0)


def test_all_responses_have_probability_one_together(language):
    _, _, logp, logq = language
    torch.testing.assert_close(logp.exp().sum().item(), 1.0, rtol=1e-5, atol=0)
    torch.testing.assert_close(logq.exp().sum().item(), 1.0, rtol=1e-5, atol=0)


def test_the_sampler_draws_whole_responses_with_their_exact_probability(language):
    policy, words, logp, _ = language
    n = 20000
    rollout, _ = drawn(policy, n)
    counts = dict.fromkeys(words, 0)
    for row, real in zip(rollout.response_tokens, rollout.response_mask, strict=True):
        counts[tuple(row[real].tolist())] += 1
    for word, exact in zip(words, logp.exp().tolist(), strict=True):
        error = math.sqrt(exact * (1 - exact) / n)
        assert abs(counts[word] / n - exact) <= 4.5 * error + 1e-9, word


def test_the_measured_kl_is_the_sequence_kl_with_less_variance_than_the_log_ratio(language):
    policy, _, logp, logq = language
    exact = (logp.exp() * (logp - logq)).sum().item()
    rollout, drift = drawn(policy, 4000)
    mask = rollout.response_mask
    full = torch.where(mask, drift.kl, 0.0).sum(1)
    k1 = torch.where(mask, rollout.old_logprobs - drift.ref_logprobs, 0.0).sum(1)
    for estimate in (full, k1):
        error = estimate.std().item() / math.sqrt(len(estimate))
        assert abs(estimate.mean().item() - exact) < 4.5 * error
    assert exact > 0.05
    assert full.std() < k1.std()
    assert full.min() >= -1e-6


def test_shaped_rewards_weighted_by_probability_have_the_gradient_of_reward_minus_beta_kl(language):
    """E[Σ_t r̃_to-go ∇log π] over all responses equals ∇(E[r] − β KL), by autograd through both."""
    policy, words, _, logq = language
    beta = 0.7
    scores = torch.tensor([math.sin(3.0 * i) for i in range(len(words))])
    parameters = [p for n, p in policy.lm.named_parameters() if "lora_B" in n]
    logp = torch.stack([log_probability(policy.lm, [3], w) for w in words])
    objective = (logp.exp() * (scores.double() - beta * (logp - logq))).sum()
    exact = torch.autograd.grad(objective, parameters, retain_graph=True)

    width = max(len(w) for w in words)
    mask = length_mask(torch.tensor([len(w) for w in words]), width)
    tokens = torch.tensor([list(w) + [0] * (width - len(w)) for w in words])
    own, ref = per_token(policy, words, width)
    rewards = shape_rewards(scores, own.detach(), ref, mask, kl_coef=beta)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    weights = logp.exp().detach()[:, None]
    surrogate = torch.where(mask, weights * to_go.double() * own.double(), 0.0).sum()
    assert tokens.shape == own.shape
    for got, expected in zip(torch.autograd.grad(surrogate, parameters), exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def per_token(policy, words, width: int):
    """log π (differentiable) and log π_ref of each token, by plain forward passes."""

    def rows(lm):
        out = torch.zeros(len(words), width)
        for i, word in enumerate(words):
            ids = torch.tensor([[3, *word]])
            logp = lm(input_ids=ids).logits[0].log_softmax(-1)
            out[i, : len(word)] = torch.stack([logp[t, a] for t, a in enumerate(word)])
        return out

    own = rows(policy.lm)
    with torch.no_grad(), reference_of(policy) as lm:
        ref = rows(lm)
    return own, ref
