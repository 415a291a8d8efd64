import math

import pytest
import reference as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.core.advantages import gae
from tether.core.losses import clipped_policy_loss, pairwise_reward_loss, value_loss
from tether.core.masking import length_mask, masked_mean, position_ids, whiten
from tether.core.shaping import shape_rewards


def ragged(seed: int, lengths: list[int], width: int):
    """Random rewards and values with garbage beyond each row's end."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(len(lengths), width, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(), draw(), length_mask(torch.tensor(lengths), width)


lengths_strategy = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(lengths_strategy, st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=60)
def test_gae_equals_the_double_sum_on_ragged_responses(lengths, gamma, lam, seed):
    rewards, values, mask = ragged(seed, lengths, 8)
    got = gae(rewards, values, mask, gamma=gamma, gae_lambda=lam)
    for row, n in enumerate(lengths):
        r, v = rewards[row, :n].tolist(), values[row, :n].tolist()
        expected = ref.gae_double_sum(r, v, gamma, lam)
        torch.testing.assert_close(
            got.advantages[row, :n].tolist(), expected, rtol=1e-9, atol=1e-10
        )
        targets = [a + b for a, b in zip(expected, v, strict=True)]
        torch.testing.assert_close(got.returns[row, :n].tolist(), targets, rtol=1e-9, atol=1e-10)
    assert (got.advantages[~mask] == 0).all()
    assert (got.returns[~mask] == 0).all()


def test_lambda_one_is_monte_carlo_minus_value_and_lambda_zero_is_one_step_td():
    rewards, values, mask = ragged(3, [4], 4)
    monte_carlo = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(monte_carlo.advantages, to_go - values, rtol=1e-12, atol=1e-12)
    one_step = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.0)
    following = torch.cat([values[:, 1:], torch.zeros(1, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(
        one_step.advantages, rewards + 0.9 * following - values, rtol=1e-12, atol=1e-12
    )


def test_shaping_pays_the_score_at_the_last_token_and_charges_every_token():
    logp = torch.tensor([[-0.8, -1.6, -0.6, -1.8, -0.7, -1.5]], dtype=torch.float64)
    logq = torch.tensor([[-1.5, -0.9, -1.8, -0.9, -1.9, -0.8]], dtype=torch.float64)
    mask = torch.ones(1, 6, dtype=torch.bool)
    scores = torch.tensor([0.8], dtype=torch.float64)
    got = shape_rewards(scores, logp, logq, mask, kl_coef=0.5)
    expected = torch.tensor([[-0.35, 0.35, -0.6, 0.45, -0.6, 1.15]], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_shaping_puts_nothing_on_padding():
    logp, logq, mask = ragged(0, [2, 5], 5)
    got = shape_rewards(torch.tensor([1.0, 2.0]).double(), logp, logq, mask, kl_coef=0.3)
    assert (got[~mask] == 0).all()
    expected = -0.3 * (logp - logq)[0, 1] + 1.0
    torch.testing.assert_close(got[0, 1], expected, rtol=1e-12, atol=1e-12)


@given(lengths_strategy, st.integers(0, 99))
@settings(max_examples=40)
def test_clipped_loss_equals_the_loop_and_padding_carries_no_gradient(lengths, seed):
    new, old, mask = ragged(seed, lengths, 7)
    advantages = torch.where(mask, torch.randn_like(new), 0.0)
    new = (new * 0.5).requires_grad_()
    old = torch.where(mask, old * 0.5, 1e9)  # would overflow if padding were read
    out = clipped_policy_loss(
        new, old, advantages, mask, clip_epsilon=0.2, total_tokens=int(mask.sum())
    )
    expected = ref.clipped_loss(
        new[mask].tolist(), old[mask].tolist(), advantages[mask].tolist(), 0.2
    )
    torch.testing.assert_close(
        out.loss.item(), math.fsum(expected) / len(expected), rtol=1e-9, atol=1e-12
    )
    (gradient,) = torch.autograd.grad(out.loss, new)
    assert torch.isfinite(gradient).all()
    assert (gradient[~mask] == 0).all()


def test_padding_that_would_overflow_the_ratio_leaves_loss_and_gradient_alone():
    logprobs = torch.tensor([[-1.0, 500.0]], requires_grad=True)
    output = clipped_policy_loss(
        logprobs, torch.tensor([[-1.0, -500.0]]), torch.tensor([[2.0, 0.0]]),
        torch.tensor([[True, False]]), clip_epsilon=0.2, total_tokens=1,
    )  # fmt: skip
    output.loss.backward()
    assert output.loss.item() == -2.0
    assert logprobs.grad.tolist() == [[-2.0, 0.0]]


def test_at_the_old_policy_ratio_is_one_nothing_is_clipped_and_both_signs_carry_gradient():
    new, _, mask = ragged(1, [3, 3], 3)
    advantages = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 1.0, 3.0]], dtype=torch.float64)
    leaf = new.clone().requires_grad_()
    out = clipped_policy_loss(leaf, new, advantages, mask, clip_epsilon=0.2, total_tokens=6)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    assert out.stats["policy/clip_fraction"] == 0
    assert out.stats["policy/approx_kl_old"] == 0
    torch.testing.assert_close(gradient, -advantages / 6, rtol=1e-12, atol=0)


def test_the_ratio_is_per_token_never_the_sum_over_tokens():
    """A sum of per-token ratios would be 3 here: every positive advantage clipped, no gradient."""
    new = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    out = clipped_policy_loss(
        new,
        torch.zeros(1, 3).double(),
        torch.ones(1, 3).double(),
        mask,
        clip_epsilon=0.2,
        total_tokens=3,
    )
    torch.testing.assert_close(out.loss.item(), -1.0, rtol=1e-12, atol=0)
    assert torch.autograd.grad(out.loss, new)[0].abs().min() > 0


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_micro_batches_add_up_to_the_whole_batch(size):
    new, old, mask = ragged(2, [1, 4, 6, 2, 5], 6)
    advantages = torch.where(mask, torch.randn_like(new), 0.0)
    total = int(mask.sum())
    whole = clipped_policy_loss(new, old, advantages, mask, clip_epsilon=0.2, total_tokens=total)
    parts = [
        clipped_policy_loss(
            new[i : i + size], old[i : i + size], advantages[i : i + size], mask[i : i + size],
            clip_epsilon=0.2, total_tokens=total,
        ).loss
        for i in range(0, 5, size)
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(parts).sum(), whole.loss, rtol=1e-12, atol=1e-12)


@given(lengths_strategy, st.integers(0, 99))
@settings(max_examples=40)
def test_whitening_gives_mean_zero_variance_one_and_ignores_padding(lengths, seed):
    values, _, mask = ragged(seed, [*lengths, 3, 4], 7)
    white = whiten(values, mask)
    real = [
        x
        for row, keep in zip(white.tolist(), mask.tolist(), strict=True)
        for x, k in zip(row, keep, strict=True)
        if k
    ]
    assert abs(sum(real) / len(real)) < 1e-9
    assert abs(sum(x * x for x in real) / len(real) - 1) < 1e-6
    more = whiten(torch.cat([values, torch.full((len(values), 5), 9e9).double()], 1),
                  torch.cat([mask, torch.zeros(len(values), 5, dtype=torch.bool)], 1))  # fmt: skip
    torch.testing.assert_close(more[:, :7], white, rtol=1e-12, atol=1e-12)


def test_value_loss_is_half_the_squared_error_and_clipping_takes_the_worse_of_two():
    mask = torch.tensor([[True, True, False]])
    values = torch.tensor([[1.0, 3.0, 50.0]], dtype=torch.float64)
    returns = torch.tensor([[0.0, 5.0, 0.0]], dtype=torch.float64)
    old = torch.tensor([[0.5, 3.0, 0.0]], dtype=torch.float64)
    plain = value_loss(values, old, returns, mask, value_clip=None, total_tokens=2)
    torch.testing.assert_close(plain.loss.item(), 0.5 * (1 + 4) / 2, rtol=1e-12, atol=0)
    moved = torch.tensor([[-1.0, 3.0, 50.0]], dtype=torch.float64)
    clipped = value_loss(moved, old, returns, mask, value_clip=0.2, total_tokens=2)
    torch.testing.assert_close(clipped.loss.item(), 0.5 * (1 + 4) / 2, rtol=1e-12, atol=0)
    near = value_loss(
        torch.tensor([[0.0, 3.0, 0.0]]).double(), old, returns, mask, value_clip=0.2, total_tokens=2
    )
    torch.testing.assert_close(near.loss.item(), 0.5 * (0.3**2 + 4) / 2, rtol=1e-12, atol=0)


def test_pairwise_loss_is_minus_log_sigmoid_of_the_difference():
    better = torch.tensor([1.0, -2.0], dtype=torch.float64)
    worse = torch.tensor([0.5, 1.0], dtype=torch.float64)
    expected = (math.log1p(math.exp(-0.5)) + math.log1p(math.exp(3.0))) / 2
    torch.testing.assert_close(
        pairwise_reward_loss(better, worse).item(), expected, rtol=1e-12, atol=0
    )


def test_position_ids_count_real_tokens_only():
    mask = torch.tensor([[False, False, True, True, False], [True, True, True, False, False]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]]


def test_masked_mean_weighs_tokens_not_rows():
    values = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert masked_mean(values, mask).item() == 2.0
