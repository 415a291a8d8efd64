"""Enumeration against plain loops, its own second paths, and the published toy values."""

import itertools
import math

import pytest
import torch
from conftest import tiny_llama

from tether.errors import ConfigError
from tether.exact import enumerate as exact
from tether.exact.tree import gather, grow_tree


def responses(vocab: int, length: int, eos: int | None) -> list[tuple[int, ...]]:
    return [
        word
        for n in range(1, length + 1)
        for word in itertools.product(range(vocab), repeat=n)
        if eos not in word[:-1] and (word[-1] == eos or n == length)
    ]


@pytest.mark.parametrize(
    ("vocab", "length", "eos"), [(3, 4, 2), (3, 4, None), (4, 1, None), (4, 3, 1)]
)
def test_the_tree_lists_every_response_once_breadth_first(vocab, length, eos):
    tree = grow_tree(vocab_size=vocab, length=length, eos=eos)
    got = [tuple(row[m].tolist()) for row, m in zip(tree.tokens, tree.mask, strict=True)]
    assert got == responses(vocab, length, eos)  # product order is breadth-first order


@pytest.mark.parametrize("eos", [2, None])
def test_prefixes_successors_and_ends_fit_together(eos):
    tree = grow_tree(vocab_size=3, length=4, eos=eos)
    prefixes = [tuple(row.tolist()) for level in tree.levels for row in level]
    words = [tuple(row[m].tolist()) for row, m in zip(tree.tokens, tree.mask, strict=True)]
    for i, prefix in enumerate(prefixes):
        for a in range(3):
            child, end = int(tree.next_prefix[i, a]), int(tree.ends[i, a])
            assert (child < 0) != (end < 0)
            assert (prefixes[child] if end < 0 else words[end]) == (*prefix, a)
    for n, word in enumerate(words):
        for t in range(len(word)):
            assert prefixes[int(tree.prefix[n, t])] == word[:t]


def test_too_large_a_language_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="markov"):
        grow_tree(vocab_size=50, length=9, eos=None)


@pytest.mark.parametrize("eos", [2, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_any_causal_model_becomes_a_table_with_a_prompt(eos, temperature):
    lm = tiny_llama(vocab=4, layers=2).double()
    tree = grow_tree(vocab_size=4, length=3, eos=eos)
    table = exact.read_table(lm, tree, prompt=(3, 1), temperature=temperature, rows=5)
    logp = exact.sequence_logprobs(table, tree)
    torch.testing.assert_close(logp.exp().sum().item(), 1.0, rtol=0, atol=1e-9)
    for i in (0, 5, len(logp) - 1):
        word = tree.tokens[i][tree.mask[i]].tolist()
        rows = lm(input_ids=torch.tensor([[3, 1, *word]])).logits[0].double() / temperature
        own = sum(rows.log_softmax(-1)[1 + t, a] for t, a in enumerate(word))
        torch.testing.assert_close(logp[i], own, rtol=0, atol=1e-5)


def test_a_table_is_differentiable_in_the_parameters_of_the_model():
    lm = tiny_llama(vocab=4, layers=1, tied=False).double()
    tree = grow_tree(vocab_size=4, length=2, eos=2)
    reference = exact.read_table(tiny_llama(vocab=4, layers=1, seed=1).double(), tree, prompt=(3,))
    weight = lm.lm_head.weight.requires_grad_()
    value = lambda: exact.kl(exact.read_table(lm, tree, prompt=(3,)), reference, tree)  # noqa: E731
    slope = exact.gradient(value(), weight)[1, 2].item()
    with torch.no_grad():
        weight[1, 2] += 1e-5
        up = value().item()
        weight[1, 2] -= 2e-5
        down = value().item()
    torch.testing.assert_close((up - down) / 2e-5, slope, rtol=1e-4, atol=1e-7)


def test_the_bandit_toy_has_its_known_divergences(toy_one):
    p, q, tree = toy_one.policy, toy_one.reference, toy_one.tree
    torch.testing.assert_close(exact.kl(p, q, tree).item(), 0.397375, rtol=0, atol=5e-7)
    torch.testing.assert_close(exact.kl(q, p, tree).item(), 0.337815, rtol=0, atol=5e-7)


def test_the_letters_toy_has_its_known_values(toy_two):
    p, q, tree, rewards = toy_two.policy, toy_two.reference, toy_two.tree, toy_two.rewards
    assert (len(tree.next_prefix), len(tree.tokens)) == (15, 31)
    mean = exact.expectation(rewards, q, tree)
    sd = (exact.expectation(rewards**2, q, tree) - mean**2).sqrt()
    best = int(rewards.argmax())
    numbers = {
        0.214830: exact.kl(p, q, tree),
        0.072616: exact.kl(p, toy_two.old, tree),
        0.806278: mean,
        1.075177: sd,
        4.250997: rewards[best],
        5.121644: -exact.sequence_logprobs(q, tree)[best],
        # the mean length under the policy: sum over tokens .214830 / .070927 nats a token
        3.0289: exact.mean_length(p, tree),
    }
    for expected, got in numbers.items():
        digits = 5e-7 if expected != 3.0289 else 5e-5
        torch.testing.assert_close(got.item(), expected, rtol=0, atol=digits)
    assert tree.tokens[best].tolist() == [0, 0, 0, 0]


ESTIMATORS = {  # mean and variance over responses of the policy, five and four printed digits
    "k1 of the sequence": (0.214830, 0.4638),
    "k2 by token": (0.209602, 0.0129),
    "k2 of the sequence": (0.254988, 0.0671),
    "k3 by token": (0.214830, 0.0130),
    "k3 of the sequence": (0.214830, 0.0316),
    "Rao-Blackwell": (0.214830, 0.0068),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_of_the_kl_has_its_known_mean_and_variance(toy_two, name):
    from tether.core.kl import k2, k3

    p, q, tree = toy_two.policy, toy_two.reference, toy_two.tree
    ratio = gather(p - q, tree)
    values = {
        "k1 of the sequence": ratio.sum(1),
        "k2 by token": k2(ratio).sum(1),
        "k2 of the sequence": k2(ratio.sum(1)),
        "k3 by token": k3(ratio).sum(1),
        "k3 of the sequence": k3(ratio.sum(1)),
        "Rao-Blackwell": exact.rao_blackwell(p, q, tree),
    }[name]
    mean = exact.expectation(values, p, tree)
    variance = exact.expectation((values - mean) ** 2, p, tree)
    torch.testing.assert_close(mean.item(), ESTIMATORS[name][0], rtol=0, atol=5e-7)
    torch.testing.assert_close(variance.item(), ESTIMATORS[name][1], rtol=0, atol=5e-5)


def test_the_aggregation_of_the_kl_is_a_choice_of_unit(toy_two):
    p, q, tree = toy_two.policy, toy_two.reference, toy_two.tree
    lengths = tree.mask.sum(1).double()
    ratio = gather(p - q, tree).sum(1)
    per_token = exact.kl(p, q, tree) / exact.mean_length(p, tree)
    torch.testing.assert_close(per_token.item(), 0.070927, rtol=0, atol=5e-7)
    torch.testing.assert_close(
        exact.expectation(ratio / lengths, p, tree).item(), -0.012590, rtol=0, atol=5e-7
    )
    torch.testing.assert_close((exact.kl(p, q, tree) / 4).item(), 0.053707, rtol=0, atol=5e-7)


def test_different_paths_to_one_number_agree(toy_two):
    p, q, tree = toy_two.policy, toy_two.reference, toy_two.tree
    value = exact.kl(p, q, tree)
    by_loop = sum(
        math.exp(a) * (a - b)
        for a, b in zip(exact.sequence_logprobs(p, tree).tolist(),
                        exact.sequence_logprobs(q, tree).tolist(), strict=True)
    )  # fmt: skip
    for other in (
        torch.tensor(by_loop, dtype=torch.float64),
        exact.kl_by_states(p, q, tree),
        exact.expectation(exact.rao_blackwell(p, q, tree), p, tree),
    ):
        torch.testing.assert_close(other, value, rtol=0, atol=1e-12)
    by_states = (exact.visits(p, tree) * -(p.exp() * p).sum(1)).sum()
    torch.testing.assert_close(exact.entropy(p, tree), by_states, rtol=0, atol=1e-12)
    lengths = exact.visits(p, tree).sum()  # one token is chosen at each visit
    torch.testing.assert_close(exact.mean_length(p, tree), lengths, rtol=0, atol=1e-12)


def test_the_naive_top_k_is_not_a_kl_and_the_tail_bucket_is_a_bound(toy_two):
    from tether.core.kl import kl_lower_bound

    p, q, tree = toy_two.policy, toy_two.reference, toy_two.tree
    for top, naive, bound in ((1, 0.1632, 0.0962), (2, 0.3441, 0.2148)):
        best, index = p.topk(top, dim=-1)
        partial = (best.exp() * (best - q.gather(-1, index))).sum(-1)
        seen = exact.visits(p, tree)
        torch.testing.assert_close((seen * partial).sum().item(), naive, rtol=0, atol=5e-5)
        whole = (seen * kl_lower_bound(p, q, top=top)).sum()
        torch.testing.assert_close(whole.item(), bound, rtol=0, atol=5e-5)
