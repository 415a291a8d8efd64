"""The optimum by three paths, the frontier, and what follows from π*: best-of-n, DPO, DeRa."""

import math

import pytest
import torch

from tether.core.controllers import initial_kl_coef
from tether.errors import ConfigError
from tether.exact import enumerate as exact
from tether.exact.frontier import frontier, least_kl, most_reward
from tether.exact.languages import hackable
from tether.exact.optimum import (
    best_of_n,
    best_of_n_bound,
    divergence,
    gibbs,
    implicit_rewards,
    optimum,
    realigned,
    realigned_sequences,
)

OPTIMA = {  # β: V*(start) = J*, E r, KL
    4: (0.958255, 1.117583, 0.039832),
    2: (1.124177, 1.467970, 0.171897),
    1: (1.481528, 2.207744, 0.726215),
    0.5: (2.158580, 3.360739, 2.404318),
    0.25: (3.010206, 4.123932, 4.454901),
    0.1: (3.739032, 4.249571, 5.105397),
}


@pytest.fixture
def solve(toy_two):
    return lambda coef: (
        optimum(toy_two.reference, toy_two.rewards, toy_two.tree, kl_coef=coef).point
    )


def solved(toy, kl_coef):
    return optimum(toy.reference, toy.rewards, toy.tree, kl_coef=kl_coef)


@pytest.mark.parametrize("kl_coef", OPTIMA)
def test_the_optimum_has_its_known_value_reward_and_kl(toy_two, kl_coef):
    best = solved(toy_two, kl_coef)
    objective, reward, kl = OPTIMA[kl_coef]
    torch.testing.assert_close(best.values[0].item(), objective, rtol=0, atol=5.1e-7)
    torch.testing.assert_close(best.point.objective, objective, rtol=0, atol=5.1e-7)
    torch.testing.assert_close(best.point.reward, reward, rtol=0, atol=5.1e-7)
    torch.testing.assert_close(best.point.kl, kl, rtol=0, atol=5.1e-7)


@pytest.mark.parametrize("kl_coef", OPTIMA)
def test_value_iteration_equals_the_softmax_over_responses(toy_two, kl_coef):
    best = solved(toy_two, kl_coef)
    logq = exact.sequence_logprobs(toy_two.reference, toy_two.tree)
    brute = gibbs(logq, toy_two.rewards, kl_coef=kl_coef)
    got = exact.sequence_logprobs(best.policy, toy_two.tree)
    torch.testing.assert_close(got.exp(), brute.exp(), rtol=0, atol=1e-12)
    log_z = (logq + toy_two.rewards / kl_coef).logsumexp(0).item()
    torch.testing.assert_close(best.values[0].item(), kl_coef * log_z, rtol=0, atol=1e-12)


def test_some_responses_have_their_known_probability_at_the_optimum(toy_two):
    got = exact.sequence_logprobs(solved(toy_two, 0.5).policy, toy_two.tree).exp()
    expected = torch.tensor([0.007843, 0.003880, 0.000476]).double()
    torch.testing.assert_close(got[:3], expected, rtol=0, atol=5.1e-7)


def test_gradient_ascent_on_the_exact_objective_ends_at_the_optimum(toy_two):
    logits = toy_two.reference.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=300, line_search_fn="strong_wolfe",
                                  tolerance_grad=1e-11, tolerance_change=1e-16)  # fmt: skip

    def loss():
        optimizer.zero_grad()
        value = -exact.objective(logits.log_softmax(-1), toy_two.reference, toy_two.rewards,
                                 toy_two.tree, kl_coef=0.5)  # fmt: skip
        value.backward()
        return value

    optimizer.step(loss)
    best = solved(toy_two, 0.5)
    torch.testing.assert_close(-loss().item(), best.values[0].item(), rtol=0, atol=1e-9)


def test_what_a_policy_loses_is_beta_times_its_kl_to_the_optimum(toy_two):
    best = solved(toy_two, 0.5)
    value = exact.objective(
        toy_two.policy, toy_two.reference, toy_two.rewards, toy_two.tree, kl_coef=0.5
    )
    lost = 0.5 * exact.kl(toy_two.policy, best.policy, toy_two.tree)
    torch.testing.assert_close(best.values[0] - value, lost, rtol=0, atol=1e-12)


def test_the_reward_gained_is_beta_times_both_divergences(toy_two):
    for kl_coef in OPTIMA:
        best, q, tree = solved(toy_two, kl_coef), toy_two.reference, toy_two.tree
        gained = best.point.reward - exact.expectation(toy_two.rewards, q, tree)
        both = exact.kl(best.policy, q, tree) + exact.kl(q, best.policy, tree)
        torch.testing.assert_close(gained, kl_coef * both, rtol=0, atol=1e-11)


def test_beta_is_the_slope_of_the_frontier(solve):
    for kl_coef in (1.0, 0.5, 0.25):
        step = 1e-5 * kl_coef
        above, below = solve(kl_coef - step), solve(kl_coef + step)
        slope = (above.reward - below.reward) / (above.kl - below.kl)
        torch.testing.assert_close(slope, kl_coef, rtol=1e-7, atol=0)


def test_the_envelope_and_the_speed_of_the_kl(toy_two, solve):
    """dJ*/dβ = −KL and dKL/dβ = −Var(r)/β³: −1.436920 at β = 1, −6.70005 at 0.5."""
    for kl_coef, speed in ((1.0, -1.436920), (0.5, -6.70005)):
        up, down = solve(kl_coef + 1e-5), solve(kl_coef - 1e-5)
        envelope = (up.objective - down.objective) / 2e-5
        torch.testing.assert_close(envelope, -solve(kl_coef).kl, rtol=1e-7, atol=0)
        policy = solved(toy_two, kl_coef).policy
        mean = exact.expectation(toy_two.rewards, policy, toy_two.tree)
        variance = exact.expectation((toy_two.rewards - mean) ** 2, policy, toy_two.tree).item()
        torch.testing.assert_close(-variance / kl_coef**3, speed, rtol=0, atol=5e-6)
        torch.testing.assert_close((up.kl - down.kl) / 2e-5, speed, rtol=1e-6, atol=0)


BUDGETS = {  # nats per response: β, E r
    0.1: (2.582207, 1.306022),
    0.25: (1.676036, 1.610373),
    0.5: (1.203080, 1.960548),
    1: (0.847468, 2.459135),
    1.5: (0.676528, 2.836341),
    2: (0.566840, 3.145543),
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_of_nats_has_its_known_price_and_reward(solve, budget):
    point = most_reward(solve, budget)
    kl_coef, reward = BUDGETS[budget]
    torch.testing.assert_close(point.kl, float(budget), rtol=0, atol=1e-12)
    torch.testing.assert_close(point.kl_coef, kl_coef, rtol=0, atol=5.1e-7)
    torch.testing.assert_close(point.reward, reward, rtol=0, atol=5.1e-7)
    back = least_kl(solve, point.reward)
    torch.testing.assert_close(back.kl, point.kl, rtol=1e-9, atol=0)


def test_the_rule_for_the_first_beta_is_near_the_exact_multiplier(toy_two):
    mean = exact.expectation(toy_two.rewards, toy_two.reference, toy_two.tree)
    variance = exact.expectation((toy_two.rewards - mean) ** 2, toy_two.reference, toy_two.tree)
    assert round(initial_kl_coef(variance.sqrt().item(), 1.0), 2) == 0.76


def test_a_budget_off_the_frontier_is_refused_with_its_ends(solve):
    for wanted in (0.0, 5.2):
        with pytest.raises(ConfigError, match="nats per response"):
            most_reward(solve, wanted)
    with pytest.raises(ConfigError, match="reward units"):
        least_kl(solve, 0.8)


BEST_OF = {4: (0.6124, 0.6363), 16: (1.8138, 1.8351), 256: (4.3778, 4.5491), 1000: (5.1017, 5.9088)}


@pytest.mark.parametrize("n", BEST_OF)
def test_best_of_n_has_its_known_kl_below_the_bound_and_below_the_frontier(toy_two, solve, n):
    logq = exact.sequence_logprobs(toy_two.reference, toy_two.tree)
    best = best_of_n(logq, toy_two.rewards, n=n)
    kl, reward = divergence(best, logq).item(), (best.exp() * toy_two.rewards).sum().item()
    torch.testing.assert_close(best.exp().sum().item(), 1.0, rtol=0, atol=1e-12)
    torch.testing.assert_close(kl, BEST_OF[n][0], rtol=0, atol=5.1e-5)
    torch.testing.assert_close(best_of_n_bound(n), BEST_OF[n][1], rtol=0, atol=5.1e-5)
    assert kl < best_of_n_bound(n)
    assert reward <= most_reward(solve, kl).reward + 1e-9


def test_best_of_n_against_the_frontier_in_numbers(toy_two, solve):
    logq = exact.sequence_logprobs(toy_two.reference, toy_two.tree)
    for n, reward, most in ((4, 1.9673, 2.0890), (64, 3.5565, 3.6863)):
        best = best_of_n(logq, toy_two.rewards, n=n)
        torch.testing.assert_close(
            (best.exp() * toy_two.rewards).sum().item(), reward, rtol=0, atol=5.1e-5
        )
        point = most_reward(solve, divergence(best, logq).item())
        torch.testing.assert_close(point.reward, most, rtol=0, atol=5.1e-5)


def test_best_of_two_equals_the_sum_over_pairs_with_ties_drawn_by_lot():
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    rewards = torch.tensor([1.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    expected = torch.zeros(4, dtype=torch.float64)
    for i in range(4):
        for j in range(4):
            tie = 0.5 if rewards[i] == rewards[j] else float(rewards[i] > rewards[j])
            expected[i] += q[i] * q[j] * tie
            expected[j] += q[i] * q[j] * (1 - tie)
    torch.testing.assert_close(best_of_n(q.log(), rewards, n=2).exp(), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(best_of_n(q.log(), rewards, n=1).exp(), q, rtol=0, atol=1e-14)


def test_the_implicit_reward_of_the_optimum_is_the_reward_up_to_a_constant(toy_two):
    best = solved(toy_two, 0.5)
    implied = implicit_rewards(best.policy, toy_two.reference, toy_two.tree, kl_coef=0.5)
    constant = toy_two.rewards - implied
    torch.testing.assert_close(constant, best.values[0].expand(31), rtol=0, atol=1e-12)


REALIGNED = {0.25: 0.00137, 0.5: 0.00199, 0.75: 0.00086, 1: 0.0, 1.5: 0.0047, 2: 0.0150, 4: 0.0255}


@pytest.mark.parametrize("scale", REALIGNED)
def test_realignment_is_exact_on_responses_and_off_by_a_known_kl_on_tokens(toy_two, scale):
    q, tree = toy_two.reference, toy_two.tree
    first, wanted = solved(toy_two, 1.0), solved(toy_two, 1.0 / scale)
    mixed = realigned_sequences(
        exact.sequence_logprobs(first.policy, tree), exact.sequence_logprobs(q, tree), scale=scale
    )
    target = exact.sequence_logprobs(wanted.policy, tree)
    torch.testing.assert_close(mixed.exp(), target.exp(), rtol=0, atol=1e-12)
    error = exact.kl(realigned(first.policy, q, scale=scale), wanted.policy, tree).item()
    # 0.0255 at λ = 4 and 0.0150 at 2 are printed to three digits
    torch.testing.assert_close(
        error, REALIGNED[scale], rtol=0, atol=5.1e-6 if scale < 1 else 5.1e-5
    )


def test_realignment_undershoots_the_kl_above_one_and_overshoots_below(toy_two):
    first, q, tree = solved(toy_two, 1.0).policy, toy_two.reference, toy_two.tree
    for scale, kl in ((2, 2.209), (0.5, 0.1915)):
        got = exact.kl(realigned(first, q, scale=scale), q, tree).item()
        torch.testing.assert_close(got, kl, rtol=0, atol=5.1e-4 if scale == 2 else 5.1e-5)


def test_realignment_by_zero_is_the_reference(toy_two):
    first = solved(toy_two, 1.0).policy
    torch.testing.assert_close(
        realigned(first, toy_two.reference, scale=0.0), toy_two.reference, rtol=0, atol=1e-14
    )


def test_a_frontier_has_more_reward_for_more_nats(solve):
    points = frontier(solve, (4, 2, 1, 0.5, 0.25, 0.1))
    assert [p.kl for p in points] == sorted(p.kl for p in points)
    assert [p.reward for p in points] == sorted(p.reward for p in points)


def test_a_hackable_reward_rises_while_the_gold_rises_and_falls(toy_two):
    """Along the optima of the hackable reward, from the reference outward."""
    language = hackable(toy_two.language, rare=(1, 1, 1, 1), bonus=8.0)
    proxy, gold = language.rewards, toy_two.rewards
    assert ((proxy - gold) / 8.0).tolist().count(1.0) == 1
    paths = [
        optimum(toy_two.reference, proxy, toy_two.tree, kl_coef=math.exp(-x / 4)).policy
        for x in range(-12, 12)
    ]
    scores = [exact.expectation(proxy, p, toy_two.tree).item() for p in paths]
    worth = [exact.expectation(gold, p, toy_two.tree).item() for p in paths]
    peak = worth.index(max(worth))
    assert scores == sorted(scores)
    assert 0 < peak < len(worth) - 1
    assert worth[peak] > worth[0] + 0.1
    assert worth[-1] < worth[0] - 0.1
