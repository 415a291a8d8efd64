"""What the run says about its sampler and its critic, against exact expectations."""

import math

import torch

from tether.core.diagnostics import (
    explained_variance,
    mean_with_error,
    sampler_bias,
    surprisal_gap,
)


def one_step_draws(sampler, policy, reference):
    """Every token as often as the sampler draws it: logprobs, reference's, and the mask."""
    counts = [round(1000 * p) for p in sampler]
    tokens = torch.repeat_interleave(torch.arange(len(sampler)), torch.tensor(counts))

    def take(probs):
        return torch.tensor(probs).log().double()[tokens][:, None]

    return take(policy), take(reference), torch.ones(len(tokens), 1, dtype=torch.bool)


POLICY, REFERENCE, OTHER = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5), (0.6, 0.3, 0.1)


def test_the_sampler_bias_is_zero_for_the_policys_own_tokens_only():
    own = sampler_bias(*one_step_draws(POLICY, POLICY, REFERENCE))
    assert abs(own.mean) < 1e-6
    other = sampler_bias(*one_step_draws(OTHER, POLICY, REFERENCE))
    expected = sum(s * r / p for s, p, r in zip(OTHER, POLICY, REFERENCE, strict=True)) - 1
    assert math.isclose(other.mean, expected, rel_tol=1e-6)
    assert abs(other.z) > 4


def test_the_surprisal_gap_sees_a_wrong_sampler_even_where_policy_and_reference_agree():
    entropy = -sum(p * math.log(p) for p in POLICY)
    for sampler, gap in ((POLICY, 0.0), (OTHER, None)):
        logprobs, _, mask = one_step_draws(sampler, POLICY, POLICY)
        found = surprisal_gap(logprobs, torch.full_like(logprobs, entropy), mask)
        cross = -sum(s * math.log(p) for s, p in zip(sampler, POLICY, strict=True))
        assert math.isclose(found.mean, cross - entropy, abs_tol=1e-6)
        assert (abs(found.z) < 1e-3) == (gap == 0.0)


def test_one_value_has_no_error_and_equal_values_have_no_z():
    assert mean_with_error(torch.tensor([2.0])).standard_error is None
    assert mean_with_error(torch.tensor([2.0])).z is None
    equal = mean_with_error(torch.tensor([2.0, 2.0]))
    assert (equal.mean, equal.standard_error, equal.z) == (2.0, 0.0, None)


def test_explained_variance_is_one_for_a_perfect_critic_and_ignores_padding():
    returns = torch.tensor([[1.0, 2.0, 9.0], [4.0, 3.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert explained_variance(returns + mask.logical_not() * 5, returns, mask) == 1.0
    assert explained_variance(torch.zeros_like(returns), returns, mask) == 0.0
    half = explained_variance(returns / 2, returns, mask)
    assert math.isclose(half, 0.75, rel_tol=1e-6)
