"""What a sampler that is not the policy does, and which tests see it."""

import pytest
import torch

from tether.exact import enumerate as exact
from tether.exact.batch import every_response
from tether.exact.placements import surrogate
from tether.exact.sampling import law_logprobs, mismatch, tempered, top_k, top_p
from tether.exact.tree import gather

LAWS = {
    "T=0.9": lambda p: tempered(p, 0.9),
    "T=0.7": lambda p: tempered(p, 0.7),
    "T=0.5": lambda p: tempered(p, 0.5),
    "T=1.3": lambda p: tempered(p, 1.3),
    "top_k=2": lambda p: top_k(p, 2),
    "top_p=0.9": lambda p: top_p(p, 0.9),
    "top_p=0.8": lambda p: top_p(p, 0.8),
}
SEEN = {  # k1 as reported, true KL, relative error of the policy gradient
    "T=0.7": (0.334, 0.385, 0.265),
    "T=0.5": (0.451, 0.658, 0.519),
    "top_k=2": (0.490, 1.192, 0.754),
    "top_p=0.9": (0.230, 0.247, 0.022),
    "top_p=0.8": (0.494, 1.044, 0.709),
}
GAPS = {"T=0.9": -0.0235, "T=0.7": -0.0797, "T=1.3": 0.0550, "top_k=2": -0.138, "top_p=0.8": -0.145}


def seen(toy, name):
    return mismatch(LAWS[name](toy.policy), toy.policy, toy.reference, toy.tree)


@pytest.mark.parametrize("name", SEEN)
def test_the_reported_kl_is_not_the_true_one(toy_two, name):
    got, (reported, true, _) = seen(toy_two, name), SEEN[name]
    torch.testing.assert_close(got.reported, reported, rtol=0, atol=5.1e-4)
    torch.testing.assert_close(got.kl, true, rtol=0, atol=5.1e-4)


def test_against_a_reference_at_the_same_temperature(toy_two):
    got = mismatch(
        tempered(toy_two.policy, 0.7),
        toy_two.policy,
        tempered(toy_two.reference, 0.7),
        toy_two.tree,
    )
    torch.testing.assert_close(got.kl, 0.4025, rtol=0, atol=5.1e-5)


@pytest.mark.parametrize("name", SEEN)
def test_the_policy_gradient_is_off_by_a_known_share(toy_two, name):
    """Reward minus ½ k1 of the whole response, centred on the drawn batch's own mean."""
    t = toy_two
    shaped = t.rewards - 0.5 * gather(t.policy - t.reference, t.tree).sum(1)

    def gradient(law):
        leaf = t.policy.clone().requires_grad_()
        weights = law_logprobs(law, t.tree).exp()
        batch = every_response(leaf, t.policy, t.reference, t.tree)
        ratio = weights / batch.weights
        centred = (shaped - (weights * shaped).sum()) * ratio
        loss = surrogate(batch, centred[:, None].expand_as(batch.logprobs))
        return torch.autograd.grad(loss, leaf)[0]

    right, got = gradient(t.policy), gradient(LAWS[name](t.policy))
    error = ((got - right).norm() / right.norm()).item()
    torch.testing.assert_close(error, SEEN[name][2], rtol=0, atol=5.1e-4)


@pytest.mark.parametrize("name", GAPS)
def test_the_surprisal_gap_sees_each_wrong_law(toy_two, name):
    torch.testing.assert_close(seen(toy_two, name).surprisal_gap, GAPS[name], rtol=0, atol=5.1e-4)


@pytest.mark.parametrize("name", ["T=0.7", "top_k=2"])
def test_the_runtime_alarm_sees_them_after_the_start(toy_two, name):
    expected = {"T=0.7": -0.042, "top_k=2": -0.085}[name]
    torch.testing.assert_close(seen(toy_two, name).ratio_gap, expected, rtol=0, atol=5.1e-4)


def test_at_the_reference_only_two_of_the_tests_can_see(toy_two):
    for make in LAWS.values():
        q = toy_two.reference
        got = mismatch(make(q), q, q, toy_two.tree)
        assert got.ratio_gap == 0
        assert got.reported == 0
        assert abs(got.surprisal_gap) > 0.01
        assert abs(got.probe_ratio - 1) > 1e-4


def test_the_right_law_passes_every_test(toy_two):
    p = toy_two.policy
    got = mismatch(p, p, toy_two.reference, toy_two.tree)
    for value, expected in (
        (got.surprisal_gap, 0.0), (got.ratio_gap, 0.0), (got.probe_ratio, 1.0),
        (got.reported, exact.kl(p, toy_two.reference, toy_two.tree).item()), (got.kl, got.reported),
    ):  # fmt: skip
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
