"""The eight-token language: its fit, its published sample, its exact optima by steps."""

import itertools

import numpy as np
import pytest
import torch
from toys import eight, eight_rewards

from tether.exact import enumerate as exact
from tether.exact import markov
from tether.exact.frontier import least_kl
from tether.exact.languages import cross_entropy, fit_bigram, grammar, grammar_sentences
from tether.exact.optimum import optimum
from tether.exact.stationary import best_stationary

REWARDS = eight_rewards()


def chain(length=6):
    return markov.read_chain(eight().reference, length=length)


def solve(kl_coef, length=6):
    return markov.optimum(chain(length), REWARDS, start=0, kl_coef=kl_coef)


def test_the_sentences_are_those_of_numpys_choice():
    rng, probs = np.random.default_rng(0), grammar().numpy()
    for row in grammar_sentences(20).tolist():
        for before, after in itertools.pairwise(row):
            assert rng.choice(8, p=probs[before]) == after


def test_the_reference_is_fitted_to_the_published_cross_entropy():
    sentences = grammar_sentences(4000)
    pairs = (sentences[:, :-1] * 8 + sentences[:, 1:]).flatten()
    counts = torch.bincount(pairs, minlength=64).reshape(8, 8).double()
    assert round(cross_entropy(fit_bigram(sentences), counts).item(), 4) == 1.0112


def test_the_published_evaluation_sample_comes_out():
    """512 responses by torch.multinomial after manual_seed(9), column by column, in float32."""
    logp = chain()[0].float()
    torch.manual_seed(9)
    current, tokens, fluency = torch.zeros(512, dtype=torch.long), [], torch.zeros(512)
    for _ in range(6):
        drawn = torch.multinomial(logp[current].exp(), 1)[:, 0]
        fluency += logp[current, drawn]
        tokens.append(drawn)
        current = drawn
    sample = torch.stack(tokens, 1)
    reward = eight().reward(sample, torch.ones_like(sample, dtype=torch.bool))
    assert sample[0].tolist() == [4, 0, 1, 2, 6, 7]
    assert round(reward.mean().item(), 2) == 0.84
    assert round(fluency.mean().item(), 2) == -6.19


OPTIMA = {  # β: E r, KL
    1: (1.1991, 0.1673),
    0.5: (1.6232, 0.8153),
    0.3: (2.4469, 3.0470),
    0.2: (3.8650, 8.9961),
    0.1: (5.9567, 22.6014),
}


@pytest.mark.parametrize("kl_coef", OPTIMA)
def test_the_optimum_has_its_known_reward_and_kl(kl_coef):
    best = solve(kl_coef)
    torch.testing.assert_close(best.point.reward, OPTIMA[kl_coef][0], rtol=0, atol=5.1e-5)
    torch.testing.assert_close(best.point.kl, OPTIMA[kl_coef][1], rtol=0, atol=5.1e-5)
    torch.testing.assert_close(best.values[0, 0].item(), best.point.objective, rtol=0, atol=1e-12)


def test_a_reward_has_its_least_kl():
    points = lambda kl_coef: solve(kl_coef).point  # noqa: E731
    for reward, kl in ((2.0, 1.70), (3.0, 5.09)):
        torch.testing.assert_close(least_kl(points, reward).kl, kl, rtol=0, atol=5.1e-3)


STATIONARY = {0.5: (1.5448, 0.7298), 0.3: (2.3803, 3.0100)}


@pytest.mark.parametrize("kl_coef", STATIONARY)
def test_the_best_stationary_policy_has_its_known_reward_and_kl(kl_coef):
    best = best_stationary(chain(), REWARDS, start=0, kl_coef=kl_coef)
    torch.testing.assert_close(best.point.reward, STATIONARY[kl_coef][0], rtol=0, atol=5.1e-5)
    torch.testing.assert_close(best.point.kl, STATIONARY[kl_coef][1], rtol=0, atol=1e-4)
    law = markov.stationary(best.policy, length=6)
    lost = kl_coef * markov.kl(law, solve(kl_coef).policy, start=0)
    torch.testing.assert_close(best.gap, lost.item(), rtol=0, atol=1e-10)
    assert best.gap > 0.02


def test_several_starts_find_a_better_stationary_policy_than_the_reference_alone():
    """At β = 0.1 quasi-Newton from the reference stopped at 3.6955 where 3.6962 can be reached."""
    best = best_stationary(chain(), REWARDS, start=0, kl_coef=0.1)
    assert 3.69625 < best.point.objective < solve(0.1).point.objective
    torch.testing.assert_close(best.gap, 3.6965468 - 3.6962589, rtol=0, atol=1e-6)


def test_a_chain_and_the_enumeration_of_a_short_language_agree():
    from tether.exact.tree import gather, grow_tree

    tree = grow_tree(vocab_size=8, length=4, eos=None)
    reference = exact.read_table(eight().reference, tree, prompt=(0,))
    rewards = (tree.tokens == 3).sum(1).double()
    by_tree, by_step = optimum(reference, rewards, tree, kl_coef=0.4), solve(0.4, length=4)
    torch.testing.assert_close(by_tree.point.reward, by_step.point.reward, rtol=0, atol=1e-11)
    torch.testing.assert_close(by_tree.point.kl, by_step.point.kl, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        exact.entropy(by_tree.policy, tree),
        markov.entropy(by_step.policy, start=0),
        rtol=0,
        atol=1e-11,
    )
    steps = torch.arange(4).expand(len(tree.tokens), -1)
    before = torch.cat([torch.zeros_like(steps[:, :1]), tree.tokens[:, :-1]], 1)
    along = by_step.policy[steps, before, tree.tokens]
    torch.testing.assert_close(gather(by_tree.policy, tree), along, rtol=0, atol=1e-11)


def test_values_and_visits_give_the_same_objective():
    best, reference = solve(0.3), chain()
    by_values = markov.objective(best.policy, reference, REWARDS, start=0, kl_coef=0.3)
    torch.testing.assert_close(by_values.item(), best.point.objective, rtol=0, atol=1e-12)


def test_two_hundred_tokens_are_no_trouble():
    best = solve(0.3, length=200)
    torch.testing.assert_close(best.values[0, 0].item(), best.point.objective, rtol=1e-12, atol=0)
    assert best.point.kl > 90
