import math

import pytest
import reference as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.core.kl import compare, full_kl, k1, k2, k3, kl_lower_bound

TOY_THETA = torch.tensor([0.3, -0.2, 0.8, 0.1], dtype=torch.float64)
TOY_REF = torch.tensor([0.0, 0.5, -0.5, 1.0], dtype=torch.float64)
TOY_OLD = torch.tensor([0.1, 0.1, 0.4, 0.4], dtype=torch.float64)
logits = st.lists(st.floats(-6, 6), min_size=5, max_size=5)


def exact_gradient() -> torch.Tensor:
    theta = TOY_THETA.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(full_kl(theta, TOY_REF), theta)
    return gradient


def expected_loss_gradient(estimator) -> torch.Tensor:
    """E over tokens of the gradient of an estimator differentiated in the loss."""
    theta = TOY_THETA.clone().requires_grad_()
    logp = theta.log_softmax(-1)
    value = (logp.detach().exp() * estimator(logp - TOY_REF.log_softmax(-1))).sum()
    (gradient,) = torch.autograd.grad(value, theta, allow_unused=True)
    return gradient


def expected_reward_gradient(estimator) -> torch.Tensor:
    """E over tokens of (detached estimator) x gradient of log π."""
    theta = TOY_THETA.clone().requires_grad_()
    logp = theta.log_softmax(-1)
    weight = (logp.exp() * estimator(logp - TOY_REF.log_softmax(-1))).detach()
    (gradient,) = torch.autograd.grad((weight * logp).sum(), theta)
    return gradient


def relative_error(gradient: torch.Tensor) -> float:
    exact = exact_gradient()
    return ((gradient - exact).norm() / exact.norm()).item()


def test_full_kl_of_the_bandit_toy_in_both_argument_orders():
    torch.testing.assert_close(full_kl(TOY_THETA, TOY_REF).item(), 0.397375, rtol=0, atol=5e-7)
    torch.testing.assert_close(full_kl(TOY_REF, TOY_THETA).item(), 0.337815, rtol=0, atol=5e-7)


def test_full_kl_equals_a_float64_loop_at_any_temperature():
    for temperature in (0.5, 1.0, 1.7):
        got = full_kl(TOY_THETA, TOY_REF, temperature=temperature).item()
        expected = ref.kl(TOY_THETA.tolist(), TOY_REF.tolist(), temperature)
        assert math.isclose(got, expected, rel_tol=1e-12)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    logp, logq = TOY_THETA.log_softmax(-1), TOY_REF.log_softmax(-1)
    exact = full_kl(TOY_THETA, TOY_REF)
    for estimator in (k1, k3):
        torch.testing.assert_close(
            (logp.exp() * estimator(logp - logq)).sum(), exact, rtol=1e-12, atol=0
        )
    assert abs((logp.exp() * k2(logp - logq)).sum() - exact) > 0.01


def test_detached_k1_as_reward_has_the_exact_gradient():
    torch.testing.assert_close(expected_reward_gradient(k1), exact_gradient(), rtol=0, atol=1e-12)


def test_k1_in_the_loss_has_no_gradient_at_all():
    assert expected_loss_gradient(k1).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("place", "estimator", "error"),
    [
        (expected_loss_gradient, k2, 0.0),
        (expected_loss_gradient, k3, 0.261),
        (expected_reward_gradient, k2, 0.680),
        (expected_reward_gradient, k3, 0.860),
    ],
)
def test_other_placements_have_the_known_gradient_error(place, estimator, error):
    assert abs(relative_error(place(estimator)) - error) < 5e-4


@given(logits, logits)
def test_full_kl_is_never_negative_and_zero_only_for_itself(a, b):
    p, q = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert full_kl(p, q).item() >= -1e-15
    assert abs(full_kl(p, p).item()) < 1e-15


@given(logits, logits, st.integers(1, 5))
@settings(max_examples=60)
def test_the_tail_bucket_never_exceeds_the_kl_and_the_whole_vocabulary_is_exact(a, b, top):
    p, q = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    bound, exact = kl_lower_bound(p, q, top=top).item(), full_kl(p, q).item()
    assert -1e-12 <= bound <= exact + 1e-12
    if top >= 4:
        assert math.isclose(bound, exact, rel_tol=1e-9, abs_tol=1e-12)


def test_k3_stays_finite_where_float32_would_overflow():
    for dtype in (torch.float32, torch.bfloat16):
        values = k3(torch.tensor([-100.0, 0.0, 100.0], dtype=dtype))
        assert torch.isfinite(values).all()
        assert values[0] > 1e40


def test_compare_in_chunks_equals_the_whole_vocabulary_at_once():
    torch.manual_seed(0)
    head, ref_head = torch.nn.Linear(6, 9).double(), torch.nn.Linear(6, 9).double()
    hidden, ref_hidden = torch.randn(13, 6).double(), torch.randn(13, 6).double()
    tokens = torch.randint(0, 9, (13,))
    for chunk in (1, 4, 100):
        got = compare(
            hidden, ref_hidden, tokens, head=head, ref_head=ref_head, temperature=0.8, chunk=chunk
        )
        for i in range(13):
            p, q = head(hidden[i]).tolist(), ref_head(ref_hidden[i]).tolist()
            probs = ref.softmax(p, 0.8)
            assert math.isclose(got.kl[i].item(), ref.kl(p, q, 0.8), rel_tol=1e-9)
            entropy = -sum(x * math.log(x) for x in probs)
            assert math.isclose(got.entropy[i].item(), entropy, rel_tol=1e-9)
            expected = math.log(ref.softmax(q, 0.8)[tokens[i]])
            assert math.isclose(got.ref_logprobs[i].item(), expected, rel_tol=1e-9)
