"""At the optimum every response earns β log Z and every advantage is 0, in every layout."""

import pytest
import torch

from tether.core.advantages import gae
from tether.core.masking import masked_mean, masked_time_mean, masked_variance, whiten
from tether.core.shaping import shape_rewards
from tether.exact import enumerate as exact
from tether.exact.batch import every_response
from tether.exact.certificate import certificate
from tether.exact.optimum import optimum
from tether.exact.tree import gather, gather_states


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(("padding", "junk"), [(0, 0.0), (0, 7.0), (3, -5.0)])
def test_shaped_returns_are_constant_and_advantages_vanish(toy_two, gae_lambda, padding, junk):
    best = optimum(toy_two.reference, toy_two.rewards, toy_two.tree, kl_coef=0.5)
    got = certificate(
        best, toy_two.reference, toy_two.rewards, toy_two.tree, gae_lambda=gae_lambda,
        padding=padding, junk=junk,
    )  # fmt: skip
    torch.testing.assert_close(got.value, 2.158580, rtol=0, atol=5.1e-7)
    assert got.shaped_return < 1e-12
    assert got.advantage < 1e-12


def test_away_from_the_optimum_the_certificate_fails(toy_two):
    best = optimum(toy_two.reference, toy_two.rewards, toy_two.tree, kl_coef=0.5)
    off = certificate(best, toy_two.policy, toy_two.rewards, toy_two.tree, gae_lambda=1.0)
    assert off.advantage > 0.1


def policy_values(toy, kl_coef):
    """V^π of the shaped reward, from the last token to the first."""
    tree, values = toy.tree, torch.zeros(15, dtype=torch.float64)
    charge = -kl_coef * (toy.policy - toy.reference)
    for span in reversed(tree.spans):
        after = torch.where(
            tree.ends[span] >= 0, toy.rewards[tree.ends[span]], values[tree.next_prefix[span]]
        )
        values[span] = (toy.policy[span].exp() * (charge[span] + after)).sum(1)
    return values


def advantages(toy, values, *, gae_lambda, gamma=1.0, kl_coef=0.5):
    tree = toy.tree
    rewards = shape_rewards(
        toy.rewards,
        gather(toy.policy, tree),
        gather(toy.reference, tree),
        tree.mask,
        kl_coef=kl_coef,
    )
    return gae(
        rewards, gather_states(values, tree), tree.mask, gamma=gamma, gae_lambda=gae_lambda
    ).advantages


def policy_gradient(toy, weights):
    """Expected gradient, and the trace of a response's covariance, for weights on each token."""
    leaf = toy.policy.clone().requires_grad_()
    batch = every_response(leaf, toy.policy, toy.reference, toy.tree)
    each = torch.stack(
        [
            torch.autograd.grad(row.sum(), leaf, retain_graph=True)[0]
            for row in weights * batch.logprobs
        ]
    )
    mean = torch.einsum("y,ysa->sa", batch.weights, each)
    return mean, (batch.weights * ((each - mean) ** 2).sum((1, 2))).sum().item()


def noise():
    import numpy as np

    return torch.from_numpy(np.random.default_rng(0).normal(size=15))


GAE = {  # values: relative error and variance at λ = 0, 0.5, 0.95, 1
    "none": ((1.18, 0.816, 0.109, 0.0), (1.43, None, None, 4.12)),
    "exact": ((0.0, 0.0, 0.0, 0.0), (0.696, 0.863, 1.513, 1.647)),
    "noisy": ((0.398, 0.251, 0.029, 0.0), (None,) * 4),
}


@pytest.mark.parametrize("kind", GAE)
def test_gae_has_its_known_bias_and_variance(toy_two, kind):
    own = policy_values(toy_two, 0.5)
    values = {"none": 0 * own, "exact": own, "noisy": own + 0.5 * noise()}[kind]
    exact_mean, _ = policy_gradient(toy_two, advantages(toy_two, own, gae_lambda=1.0))
    errors, variances = GAE[kind]
    for lam, error, variance in zip((0.0, 0.5, 0.95, 1.0), errors, variances, strict=True):
        mean, spread = policy_gradient(toy_two, advantages(toy_two, values, gae_lambda=lam))
        got = ((mean - exact_mean).norm() / exact_mean.norm()).item()
        torch.testing.assert_close(got, error, rtol=0, atol=5e-3 if error > 1 else 6e-4)
        if variance is not None:
            torch.testing.assert_close(
                spread, variance, rtol=0, atol=5e-3 if error > 1 or lam == 1 else 6e-4
            )


def test_a_discount_biases_the_gradient(toy_two):
    own = policy_values(toy_two, 0.5)
    right, _ = policy_gradient(toy_two, advantages(toy_two, own, gae_lambda=1.0))
    got, _ = policy_gradient(toy_two, advantages(toy_two, own, gae_lambda=1.0, gamma=0.99))
    torch.testing.assert_close(
        ((got - right).norm() / right.norm()).item(), 0.022, rtol=0, atol=5e-4
    )


def test_a_mean_over_each_response_turns_the_gradient(toy_two):
    values = advantages(toy_two, policy_values(toy_two, 0.5), gae_lambda=1.0)
    right, _ = policy_gradient(toy_two, values)
    leaf = toy_two.policy.clone().requires_grad_()
    batch = every_response(leaf, toy_two.policy, toy_two.reference, toy_two.tree)
    means = masked_time_mean((values * batch.logprobs)[..., None], batch.mask)[:, 0]
    (got,) = torch.autograd.grad((batch.weights * means).sum(), leaf)
    cosine = ((got * right).sum() / got.norm() / right.norm()).item()
    torch.testing.assert_close(cosine, 0.941, rtol=0, atol=5e-4)
    torch.testing.assert_close(
        (1 - cosine**2) ** 0.5, 0.339, rtol=0, atol=5e-4
    )  # best-scaled error


def test_moments_over_padding_are_other_moments(toy_two):
    """Production moments on a batch in which each response stands as often as it is likely."""
    returns = advantages(toy_two, torch.zeros(15).double(), gae_lambda=1.0)
    chance = exact.sequence_logprobs(toy_two.policy, toy_two.tree).exp()
    copies = (chance * 20000).round().long()
    values = returns.repeat_interleave(copies, dim=0)
    mask = toy_two.tree.mask.repeat_interleave(copies, dim=0)
    for of, mean, std in ((mask, 1.147, 1.161), (torch.ones_like(mask), 0.868, 1.124)):
        torch.testing.assert_close(masked_mean(values, of).item(), mean, rtol=0, atol=2e-3)
        torch.testing.assert_close(
            masked_variance(values, of).sqrt().item(), std, rtol=0, atol=2e-3
        )
    white = whiten(values, mask)
    torch.testing.assert_close(masked_mean(white, mask).item(), 0.0, rtol=0, atol=1e-9)


def test_a_reward_per_token_is_a_reward_for_length(toy_two):
    t, lengths = toy_two, toy_two.tree.mask.sum(1).double()
    best = optimum(t.reference, t.rewards, t.tree, kl_coef=0.5)
    torch.testing.assert_close(
        exact.mean_length(best.policy, t.tree).item(), 3.846, rtol=0, atol=5e-4
    )
    # 3.3745 was printed as 3.375
    for shift, length, lost in ((0.5, 3.3745, 0.1495), (-0.5, None, 0.0203)):
        moved = optimum(t.reference, t.rewards - shift * lengths, t.tree, kl_coef=0.5)
        value = exact.objective(moved.policy, t.reference, t.rewards, t.tree, kl_coef=0.5)
        torch.testing.assert_close((best.values[0] - value).item(), lost, rtol=0, atol=5.1e-5)
        if length:
            got = exact.mean_length(moved.policy, t.tree).item()
            torch.testing.assert_close(got, length, rtol=0, atol=5e-5)


def test_scaling_the_reward_is_scaling_beta_and_clipping_it_costs(toy_two):
    t = toy_two
    mean = exact.expectation(t.rewards, t.reference, t.tree)
    std = (exact.expectation(t.rewards**2, t.reference, t.tree) - mean**2).sqrt()
    scaled = optimum(t.reference, t.rewards / std, t.tree, kl_coef=0.5)
    same = optimum(t.reference, t.rewards, t.tree, kl_coef=0.5 * std.item())
    torch.testing.assert_close(scaled.policy, same.policy, rtol=0, atol=1e-12)
    torch.testing.assert_close(same.point.kl_coef, 0.5376, rtol=0, atol=5.1e-5)
    torch.testing.assert_close(same.point.kl, 2.1665, rtol=0, atol=5.1e-5)
    clipped = optimum(t.reference, t.rewards.clamp(-1, 1.5), t.tree, kl_coef=0.5)
    value = exact.objective(clipped.policy, t.reference, t.rewards, t.tree, kl_coef=0.5)
    torch.testing.assert_close(value.item(), 1.5995, rtol=0, atol=5.1e-5)
