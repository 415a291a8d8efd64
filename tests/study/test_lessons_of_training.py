"""What the lessons on training claim, checked beside the tables that they print."""

import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from test_lessons import close, column, made, table

from tether.core.controllers import ControllerState
from tether.core.losses import pairwise_reward_loss
from tether.exact.enumerate import kl, objective, sequence_logprobs
from tether.exact.frontier import most_reward
from tether.exact.languages import letters
from tether.exact.optimum import optimum
from tether.study import sampled, steering, stopping
from tether.study.ascent import ascend, natural_direction, task_of
from tether.study.lessons import budget, collapse, dpo, hacking, published, reference


@cache
def task():
    return task_of(letters())


def solve(kl_coef):
    return optimum(task().reference, task().scores, task().tree, kl_coef=kl_coef)


@cache
def world():
    return hacking.make_world()


@cache
def hacking_run(kl_coef):
    return hacking.run(world(), kl_coef)


def falls(values):
    return all(a > b for a, b in pairwise(values))


# Training without noise, and with sampling's own


def test_nothing_moves_at_the_optimum_and_every_step_before_it_gains():
    still = natural_direction(solve(0.5).policy, task(), kl_coef=0.5)
    assert still.std(dim=1).max() < 1e-9  # the same shift of all logits is no move
    path = ascend(task(), kl_coef=0.5, rate=0.2, steps=30)
    gains = [objective(p, task().reference, task().scores, task().tree, kl_coef=0.5) for p in path]
    assert falls([-g.item() for g in gains])


def test_the_natural_direction_is_the_exact_advantage():
    """Q(s, a) − V(s) of the shaped reward, from values computed backwards over the tree."""
    policy, tree, beta = solve(2.0).policy, task().tree, 0.7
    values, q = torch.zeros(len(policy)).double(), torch.zeros_like(policy)
    for span in reversed(tree.spans):
        ends = tree.ends[span]
        after = torch.where(ends >= 0, task().scores[ends], values[tree.next_prefix[span]])
        q[span] = after - beta * (policy - task().reference)[span]
        values[span] = (policy[span].exp() * q[span]).sum(dim=1)
    found = natural_direction(policy, task(), kl_coef=beta)
    torch.testing.assert_close(found, q - values[:, None], rtol=0, atol=1e-9)


def test_sampled_steps_follow_the_expected_gradient():
    generator = torch.Generator().manual_seed(0)
    chances = sequence_logprobs(task().reference, task().tree).exp()
    drawn = torch.multinomial(chances, 400_000, replacement=True, generator=generator)
    silent = torch.zeros(len(drawn)).double()
    stepped = sampled.sampled_step(
        task().reference, task(), drawn, silent, kl_coef=0.5, rate=1.0
    )  # fmt: skip
    weight = sequence_logprobs(task().reference, task().tree).exp()
    leaf = task().reference.clone().requires_grad_()
    (
        weight.detach() * task().scores * sequence_logprobs(leaf.log_softmax(-1), task().tree)
    ).sum().backward()
    expected = (task().reference + leaf.grad).log_softmax(dim=-1)
    assert (stepped - expected).abs().max() < 0.01
    assert (expected - task().reference).abs().max() > 0.1


# hacking


def test_hacking_true_reward_falls_while_the_models_rises():
    free, held = hacking_run(0.0), hacking_run(hacking.KL_COEF)
    assert falls([-r for r in free.reward])
    assert falls([-n for n in free.length])
    top = free.true.index(max(free.true))
    assert 0 < top < 20
    assert falls(free.true[top:])
    assert free.true[-1] < free.true[0] < 0.1 < held.true[-1]
    close(free.true[-1], hacking.POINTS_THAT_COUNT - hacking.COST * hacking.LONGEST, atol=1e-3)
    assert free.length[-1] > 7.99
    assert held.length[-1] < 5.5


def test_hacking_the_tethered_run_ends_at_the_optimum():
    held, t = hacking_run(hacking.KL_COEF), world().task
    best = optimum(t.reference, t.scores, t.tree, kl_coef=hacking.KL_COEF).point.objective
    assert 0 < best - (held.reward[-1] - hacking.KL_COEF * held.kl[-1]) < 1e-3


def test_hacking_the_model_is_the_fit_of_its_pairs_and_good_where_they_lie():
    tree = world().task.tree
    features = torch.stack(
        [((tree.tokens == t) & tree.mask).sum(1).double() for t in (hacking.POINT, hacking.FILLER)],
        dim=1,
    )
    chances = sequence_logprobs(world().task.reference, tree).exp()
    better, worse = hacking.judged_pairs(chances, world().true, seed=0)
    gap = features[better] - features[worse]
    miss = torch.sigmoid(gap @ torch.tensor(world().weights).double()) - 1
    assert (miss[:, None] * gap).mean(dim=0).abs().max() < 1e-6
    ours, best = world().agreement
    assert best - 0.08 < ours < best
    rows = dict(table("hacking").rows)
    assert rows["correlation of true reward and length"] > 0.3
    assert rows["correlation of the model and true reward"] > 0.7


# collapse


def test_collapse_odds_are_exp_of_the_difference_over_beta():
    tree = collapse.grow_tree(vocab_size=collapse.WAYS, length=2, eos=None)
    prompt = collapse.task_of(1, tree)
    first = collapse.ending(0.05, tree).policies[1][0]
    paid = prompt.scores.view(collapse.WAYS, collapse.WAYS)
    taste = paid[:, 0] - paid[0, 0]
    torch.testing.assert_close(first - first[0], taste / 0.05, rtol=0, atol=1e-9)


def test_collapse_variety_falls_with_beta_and_the_gain_ends_long_before():
    shown = table("collapse")
    for name in ("entropy, nats", "answers in use per prompt", "ways in use"):
        assert falls(column(shown, name))
    right, ways = column(shown, "right"), column(shown, "ways in use")
    at = column(shown, "β").index(0.2)
    assert right[at] > 0.99
    assert ways[at] > 8.9
    assert ways[-1] < 1.2
    close([right[0], ways[0]], [0.5, 10.0], atol=1e-9)


def test_collapse_counts_distinct_answers():
    tree = collapse.grow_tree(vocab_size=10, length=2, eos=None)
    uniform = torch.full((len(tree.next_prefix), 10), 0.1, dtype=torch.float64).log()
    close(collapse.distinct(uniform, tree, 100), 100 * (1 - 0.99**100), atol=1e-9)
    close(collapse.in_use(torch.tensor([0.5, 0.5, 0.0]).double()), 2.0, atol=1e-9)


def test_collapse_equal_ways_drift_without_a_tether_and_stay_with_one():
    shown = table("collapse", 1)
    ends = list(zip(column(shown, "run"), column(shown, "ways in use"), strict=True))
    free = [ways for run, ways in ends if run == "no tether"]
    held = [ways for run, ways in ends if run != "no tether"]
    assert min(free) < 2
    assert max(free) < 7
    assert min(held) > 8.5
    assert min(column(shown, "right")) > 0.97


# beta


@pytest.mark.parametrize("kl_coef", [2.0, 1.0, 0.5, 0.25])
def test_beta_is_the_price_of_a_nat(kl_coef):
    found = steering.price(task(), kl_coef)
    torch.testing.assert_close(found.reward_per_nat, kl_coef, rtol=1e-7, atol=0)
    torch.testing.assert_close(found.kl_per_coef, found.formula, rtol=1e-6, atol=0)


def test_beta_has_the_known_derivatives():
    found = [steering.price(task(), b).formula for b in (1.0, 0.5)]
    close(found, [-1.436920, -6.70005], atol=5.1e-6)


def test_beta_the_adaptive_rule_is_the_published_one():
    """Batch 512, horizon 10,000, target 6: scaled here to the lesson's target of 1."""
    after = [
        steering.ziegler(ControllerState(multiplier=0.15), measured / 6).kl_coef
        for measured in (9.0, 3.0, 6.6)
    ]
    close(after, [0.151536, 0.148464, 0.150768], atol=1e-9)


def test_beta_the_target_controller_finds_the_coefficient_from_both_sides():
    exact = most_reward(lambda b: solve(b).point, steering.TARGET).kl_coef
    shown = table("beta", 3)
    ends = dict(zip(column(shown, "controller"), column(shown, "last β"), strict=True))
    assert ends["fixed"] == 3.0
    last = [
        (b, k) for c, b, k in zip(*(column(shown, n) for n in ("controller", "last β", "last KL")), strict=True)
        if c == "target"
    ]  # fmt: skip
    assert len(last) == 2
    for kl_coef, spent in last:
        close([kl_coef, spent], [exact, steering.TARGET], atol=2e-3)
    highest = column(shown, "highest KL")
    assert highest[2] < 0.5 * highest[1]
    assert highest[5] < 1.02


def test_beta_a_bounded_update_is_bounded_and_their_sum_is_not():
    free = steering.bounded_run(task(), 0.0)
    assert max(free.per_update) <= steering.REGION + 1e-9
    close(free.from_reference[-1], solve(1e-3).point.kl, atol=1e-3)
    assert free.from_reference[9] > 3
    held = column(table("beta", 4), f"after {steering.UPDATES}, nats")[1]
    close(held, steering.TARGET, atol=1e-3)


def test_beta_published_values_say_what_they_would_buy():
    close(published.gaussian_kl(0.15), 22.2222, atol=1e-4)
    kl_coefs = [s.kl_coef for s in published.SETTINGS]
    assert min(kl_coefs) == 0.001
    assert all(s.source and s.scale for s in published.SETTINGS)


# budget


def test_budget_true_reward_has_a_top_and_the_proxy_has_none():
    shown = table("budget")
    assert falls([-r for r in column(shown, "proxy")])
    true = column(shown, "true reward")
    top = true.index(max(true))
    assert 0 < top < len(true) - 4
    assert true[-1] < 0 < true[0] < true[top]
    close(column(shown, "preferred to the reference")[0], 0.5, atol=1e-12)


def test_budget_best_of_n_is_under_the_frontier_and_its_bound():
    hacked = budget.make_world()
    t = hacked.task
    for stand in budget.chosen(hacked)[1:6]:
        best = most_reward(
            lambda b: optimum(t.reference, t.scores, t.tree, kl_coef=b).point, stand.kl
        )
        assert stand.proxy < best.reward
    shown = table("budget", 1)
    spent, bound = column(shown, "KL, nats"), column(shown, "log n − (n−1)/n")
    assert all(a < b for a, b in zip(spent[1:], bound[1:], strict=True))
    assert column(shown, "true reward")[3] > max(column(table("budget"), "true reward")) + 0.5


def test_budget_win_rate_by_hand():
    half = torch.tensor([0.5, 0.5]).double().log()
    first = torch.tensor([0.25, 0.75]).double().log()
    worth = torch.tensor([0.0, 1.0]).double()
    close(budget.win_rate(first, half, worth), 0.625, atol=1e-12)


def test_budget_stopping_by_hand():
    rates = [0.5, 0.6, 0.55, 0.58, 0.7, 0.4, 0.3]
    assert stopping.stop(rates, 1) == (2, 1)
    assert stopping.stop(rates, 3) == (6, 4)
    assert stopping.stop(rates, 2) == (3, 1)


def test_budget_late_stopping_loses_and_the_kept_check_does_not():
    shown = table("budget", 3)
    lost, kept = column(shown, "lost"), column(shown, "lost, best kept")
    assert min(lost + kept) >= 0
    assert lost[-1] > 0.5 > 5 * kept[-1]
    assert lost[1] < min(lost[0], lost[2])


# reference


def test_reference_the_anchor_decides_where_the_same_run_ends():
    before, after = table("reference"), table("reference", 1)
    wrong, reward = column(after, "ungrammatical steps"), column(after, "reward")
    assert falls(wrong)
    assert falls(reward)
    assert wrong[0] > 0.8
    gained = [a - b for a, b in zip(reward, column(before, "reward"), strict=True)]
    assert gained[2] < 0.02
    assert 1.5 < gained[1] < gained[0]
    answers = column(after, "answers in use")
    assert answers[2] < 2
    assert answers[1] > 500


def test_reference_equal_budgets_are_spent_exactly_and_buy_different_things():
    shown = table("reference", 2)
    close(column(shown, "KL from it, nats"), [reference.BUDGET] * 3, atol=1e-9)
    assert falls(column(shown, "reward"))
    away = column(shown, "KL from the fine-tuned, nats")
    close(away[1], reference.BUDGET, atol=1e-9)
    assert away[0] > 8


# dpo


def test_dpo_on_all_pairs_is_the_optimum():
    shown = table("dpo")
    assert max(column(shown, "KL(DPO‖π*), nats")) < 1e-9
    assert max(column(shown, "largest error of a difference")) < 1e-5
    close(column(shown, "of DPO, nats"), column(shown, "KL of π*, nats"), atol=1e-6)
    differences = table("dpo", 1)
    close(
        column(differences, "of implicit rewards"), column(differences, "difference of rewards"),
        atol=1e-5,
    )  # fmt: skip


def test_dpo_loss_is_the_production_loss_of_implicit_rewards():
    scores = torch.randn(5, generator=torch.Generator().manual_seed(0)).double()
    better, worse = torch.tensor([0, 1, 1, 4]), torch.tensor([2, 3, 0, 1])
    pairs = torch.zeros(5, 5).double()
    pairs[better, worse] = 0.25
    expected = pairwise_reward_loss(scores[better], scores[worse])
    torch.testing.assert_close(dpo.dpo_loss(scores, pairs), expected, rtol=0, atol=1e-9)


def test_dpo_drawn_pairs_approach_all_pairs_as_the_reference_draws_them():
    chances = sequence_logprobs(task().reference, task().tree).exp()
    judged = torch.sigmoid(task().scores[:, None] - task().scores[None, :])
    both = 2 * chances[:, None] * chances[None, :] * judged
    drawn = dpo.drawn_pairs(task(), 400_000, seed=1)
    assert (drawn - both.fill_diagonal_(0.0)).abs().max() < 2e-3
    weights = dpo.exact_pairs(task())
    close((weights + weights.T)[0, 1].item() * 465, 1.0, atol=1e-12)


def test_dpo_on_few_pairs_spends_what_it_likes():
    shown = table("dpo", 2)
    spent = column(shown, "KL, nats")
    exact, few, many = spent[0], spent[1:4], spent[-3:]
    close(exact, 2.404318, atol=5.1e-7)
    assert max(abs(value - exact) for value in few) > 2
    assert max(abs(value - exact) for value in many) < 0.3
    single = -sequence_logprobs(task().reference, task().tree)[task().scores.argmax()]
    assert min(abs(value - single) for value in spent) < 1e-2
    best = column(shown, "reward − β KL")
    assert max(best[1:]) < best[0]


def test_no_number_in_a_table_is_missing():
    for name in ("hacking", "collapse", "beta", "budget", "reference", "dpo"):
        for each in made(name).tables:
            numbers = [cell for row in each.rows for cell in row if not isinstance(cell, str)]
            assert not any(math.isnan(number) for number in numbers)


def test_path_of_ascent_stays_a_distribution():
    last = ascend(task(), kl_coef=0.0, rate=1.0, steps=60)[-1]
    torch.testing.assert_close(
        last.exp().sum(dim=1), torch.ones(len(last)).double(), rtol=0, atol=1e-9
    )
    assert kl(last, task().reference, task().tree) < 5.1217
