"""The published objective does not do what it says; each claim is computed."""

import pytest
import torch

from tether.exact import enumerate as exact
from tether.exact.article import article_loss, article_ratio
from tether.exact.batch import every_response


def gradient(toy, advantages, *, kl_weight, policy=None, old=None, reference=None, row=None):
    leaf = (toy.reference if policy is None else policy).clone().requires_grad_()
    old = leaf.detach() if old is None else old
    batch = every_response(leaf, old, toy.reference if reference is None else reference, toy.tree)
    batch = batch if row is None else batch.only(row)
    loss = article_loss(batch, advantages, kl_weight=kl_weight)
    return -torch.autograd.grad(loss, leaf)[0]


def policy_gradient(toy, advantages):
    leaf = toy.reference.clone().requires_grad_()
    value = exact.expectation(advantages, leaf.log_softmax(-1), toy.tree)
    return torch.autograd.grad(value, leaf)[0]


@pytest.fixture
def whitened(toy_two):
    """Advantages at the start, where policy = reference, at mean 0 and standard deviation 1."""
    mean = exact.expectation(toy_two.rewards, toy_two.reference, toy_two.tree)
    centred = toy_two.rewards - mean
    return centred / exact.expectation(centred**2, toy_two.reference, toy_two.tree).sqrt()


def test_the_ratio_at_the_first_step_is_the_number_of_columns(toy_two):
    batch = every_response(toy_two.policy, toy_two.policy, toy_two.reference, toy_two.tree)
    torch.testing.assert_close(
        article_ratio(batch), torch.full((31,), 4.0).double(), rtol=0, atol=1e-14
    )


def test_no_positive_advantage_carries_any_gradient(toy_two, whitened):
    chance = exact.sequence_logprobs(toy_two.reference, toy_two.tree).exp()
    mass = chance[whitened > 0].sum().item()
    torch.testing.assert_close(mass, 0.4349, rtol=0, atol=5.1e-5)
    for row in range(31):
        size = gradient(toy_two, whitened, kl_weight=0.0, row=row).norm()
        assert (size == 0) == bool(whitened[row] > 0)


def test_what_is_left_is_the_gradient_of_the_negative_part(toy_two, whitened):
    got = gradient(toy_two, whitened, kl_weight=0.0)
    torch.testing.assert_close(
        got, policy_gradient(toy_two, whitened.clamp(max=0)), rtol=0, atol=1e-15
    )
    right = policy_gradient(toy_two, whitened)
    cosine = ((got * right).sum() / got.norm() / right.norm()).item()
    for value, expected in (
        (got.norm().item(), 0.161),
        (right.norm().item(), 0.390),
        (cosine, 0.892),
    ):
        torch.testing.assert_close(value, expected, rtol=0, atol=6e-4)


def test_the_kl_term_never_depends_on_the_reference(toy_two, whitened):
    noise = torch.randn(15, 3, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    for policy, old in ((toy_two.reference, None), (toy_two.policy, toy_two.old)):
        first, second = (
            gradient(toy_two, whitened, kl_weight=0.5, policy=policy, old=old, reference=ref)
            for ref in (toy_two.reference, noise)
        )
        assert torch.equal(first, second)


def test_the_kl_term_vanishes_at_first_and_then_pushes_away_from_the_old_policy(toy_two, whitened):
    none = torch.zeros_like(whitened)
    assert gradient(toy_two, none, kl_weight=1.0).norm() < 1e-15
    got = gradient(toy_two, none, kl_weight=1.0, policy=toy_two.policy, old=toy_two.old)
    leaf = toy_two.policy.clone().requires_grad_()
    away = exact.gradient(exact.kl(toy_two.old, leaf.log_softmax(-1), toy_two.tree), leaf)
    torch.testing.assert_close(got, away, rtol=0, atol=1e-14)  # ascends KL(π_old‖π)


def test_in_a_finite_batch_it_shifts_every_advantage_by_its_weight(toy_two, whitened):
    leaf = toy_two.reference.clone().requires_grad_()
    logp = exact.sequence_logprobs(leaf.log_softmax(-1), toy_two.tree)
    for row in range(31):
        got = gradient(toy_two, whitened, kl_weight=1.0, row=row)
        weight = whitened[row].clamp(max=0) - 1
        expected = torch.autograd.grad(weight * logp[row], leaf, retain_graph=True)[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("kl_weight", "variance"), [(0, 0.761), (0.1, 0.903), (0.5, 1.787), (1, 3.595)]
)
def test_it_only_adds_variance(toy_two, whitened, kl_weight, variance):
    mean = gradient(toy_two, whitened, kl_weight=float(kl_weight))
    chance = exact.sequence_logprobs(toy_two.reference, toy_two.tree).exp()
    each = torch.stack(
        [gradient(toy_two, whitened, kl_weight=float(kl_weight), row=row) for row in range(31)]
    )
    got = (chance * ((each - mean) ** 2).sum((1, 2))).sum().item()
    torch.testing.assert_close(got, variance, rtol=0, atol=6e-4)
