"""The stages on a random four-layer model: masks, EOS, sharing, invariances, gradients."""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_policy, tiny_prompts

from tether.config import CriticConfig, PPOConfig
from tether.core.advantages import gae
from tether.core.logprobs import token_logprobs
from tether.core.masking import whiten
from tether.core.shaping import shape_rewards
from tether.errors import TrainingDiverged
from tether.generation.sampler import inverse_cdf, sample
from tether.generation.sequences import sequence
from tether.models.load import reference_of
from tether.models.trunk import final_hidden, keeping
from tether.rollout import collect_rollout, measure_kl, read_reference, trainer_logprobs
from tether.update import (
    forward,
    make_optimizer,
    set_learning_rates,
    training_data,
    update_policy,
)

LIMIT = 6


def roll(policy, *, n=4, seed=0, reward_layer=None, recompute=False, memory_gib=2.0, prompts=None):
    rollout = collect_rollout(
        policy, prompts or tiny_prompts(), responses_per_prompt=n, max_new_tokens=LIMIT,
        temperature=0.9, seed=seed, reward_layer=reward_layer, recompute_logprobs=recompute,
        memory_gib=memory_gib,
    )  # fmt: skip
    reference = read_reference(policy, rollout, reward_layer=reward_layer, memory_gib=memory_gib)
    return rollout, reference, measure_kl(policy, rollout, reference, temperature=0.9)


def data_for(policy, *, beta=0.1, seed=0, n=4):
    rollout, _, drift = roll(policy, n=n, seed=seed)
    scores = torch.randn(len(rollout.texts), generator=torch.Generator().manual_seed(1))
    rewards = shape_rewards(
        scores, rollout.old_logprobs, drift.ref_logprobs, rollout.response_mask, kl_coef=beta
    )
    estimate = gae(rewards, rollout.values, rollout.response_mask, gamma=1.0, gae_lambda=0.95)
    return training_data(rollout, estimate, whiten(estimate.advantages, rollout.response_mask))


def update(policy, data, ppo=None, seed=0):
    ppo = ppo or PPOConfig(minibatches=2)
    optimizer = make_optimizer(policy, ppo, CriticConfig())
    return update_policy(
        policy, optimizer, data, ppo=ppo, critic=CriticConfig(), temperature=0.9, seed=seed
    )


def plain_logits(lm, generation):
    """The model's own logits at the predicting positions, no layer shared, no cache."""
    tokens, mask = sequence(generation)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    logits = lm(input_ids=tokens, attention_mask=mask.long(), position_ids=positions).logits
    prompt = generation.prompt_tokens.shape[1]
    return logits[:, prompt - 1 : -1]


@pytest.mark.parametrize("first_layer", [0, 2])
def test_one_pass_of_sampling_gives_the_log_probs_of_the_plain_model(first_layer):
    policy = tiny_policy(first_layer=first_layer)
    rollout, _, drift = roll(policy)
    mask = rollout.response_mask
    with torch.no_grad():
        own = plain_logits(policy.lm, rollout.generation)
        with reference_of(policy) as lm:
            ref = plain_logits(lm, rollout.generation)
    expected = token_logprobs(own, rollout.response_tokens, 0.9)
    torch.testing.assert_close(rollout.old_logprobs[mask], expected[mask], rtol=0, atol=2e-5)
    expected_ref = token_logprobs(ref, rollout.response_tokens, 0.9)
    torch.testing.assert_close(drift.ref_logprobs[mask], expected_ref[mask], rtol=0, atol=2e-5)
    p, q = (x.double() / 0.9 for x in (own, ref))
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).float()
    torch.testing.assert_close(drift.kl[mask], kl[mask], rtol=1e-4, atol=2e-5)
    assert drift.kl[mask].mean() > 0.01
    assert (drift.kl[~mask] == 0).all()


def test_a_fresh_adapter_is_the_reference_bit_for_bit():
    policy = tiny_policy(stirred=False)
    tokens, mask = torch.tensor([[3, 4, 5, 6]]), torch.ones(1, 4, dtype=torch.bool)
    with torch.no_grad():
        on = final_hidden(policy.lm, tokens, mask)
        with reference_of(policy) as lm:
            off = final_hidden(lm, tokens, mask)
    assert torch.equal(on, off)


def test_the_reference_is_the_untouched_base_bit_for_bit_after_training():
    from conftest import tiny_base

    tokens, mask = torch.tensor([[3, 4, 5, 6]]), torch.ones(1, 4, dtype=torch.bool)
    policy = tiny_policy()
    update(policy, data_for(policy))
    with torch.no_grad(), reference_of(policy) as lm:
        got = final_hidden(lm, tokens, mask)
    assert torch.equal(got, final_hidden(tiny_base().lm, tokens, mask))


def test_full_fine_tuning_moves_the_policy_and_leaves_the_frozen_copy():
    policy = tiny_policy(trainable="full", first_layer=0, stirred=False)
    before = [p.clone() for p in policy.frozen_copy.parameters()]
    update(policy, data_for(policy))
    assert all(
        torch.equal(a, b) for a, b in zip(before, policy.frozen_copy.parameters(), strict=True)
    )
    assert all(p.grad is None for p in policy.frozen_copy.parameters())
    _, _, drift = roll(policy)
    assert drift.kl.sum() > 1e-6


def test_the_first_eos_is_inside_the_mask_and_nothing_follows_it():
    policy = tiny_policy()
    rollout, _, _ = roll(policy, n=40)
    ended = 0
    for row, real in zip(rollout.response_tokens, rollout.response_mask, strict=True):
        tokens = row[real].tolist()
        assert 2 not in tokens[:-1]
        assert tokens[-1] == 2 or len(tokens) == LIMIT
        ended += tokens[-1] == 2
    assert 0 < ended < len(rollout.texts)
    assert int(rollout.finished.sum()) == ended


def double_policy(**options):
    """In float64 what must be equal is so to the last digits; the value head stays float32."""
    policy = tiny_policy(**options)
    policy.lm.double()
    return policy


def test_splitting_the_batch_to_a_memory_limit_changes_no_sample():
    policy = double_policy()
    whole, _, drift = roll(policy, n=5)
    split, _, split_drift = roll(policy, n=5, memory_gib=2e-5)
    assert torch.equal(whole.response_tokens, split.response_tokens)
    torch.testing.assert_close(whole.old_logprobs, split.old_logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(drift.kl, split_drift.kl, rtol=0, atol=1e-12)


def test_more_left_padding_changes_no_sample_and_no_number():
    policy = double_policy()
    plain = tiny_prompts()
    wide = replace(
        plain,
        prompt_tokens=torch.cat([torch.full((3, 7), 9), plain.prompt_tokens], 1),
        prompt_mask=torch.cat([torch.zeros(3, 7, dtype=torch.bool), plain.prompt_mask], 1),
    )
    a, _, kl_a = roll(policy, prompts=plain)
    b, _, kl_b = roll(policy, prompts=wide)
    assert torch.equal(a.response_tokens, b.response_tokens)
    torch.testing.assert_close(a.old_logprobs, b.old_logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(a.values, b.values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kl_a.kl, kl_b.kl, rtol=0, atol=1e-12)


def test_the_sampler_draws_from_the_softmax_at_its_temperature():
    policy = tiny_policy()
    prompts = replace(
        tiny_prompts(), prompt_tokens=torch.tensor([[3]]), prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        texts=("w3",),
    )  # fmt: skip
    draws = 20000
    got = sample(
        policy.base, prompts, responses_per_prompt=draws, max_new_tokens=1, temperature=0.7, seed=3
    )
    with torch.no_grad():
        logits = policy.lm(input_ids=torch.tensor([[3]])).logits[0, -1].double()
    probs = (logits / 0.7).softmax(-1)
    counts = torch.bincount(got.response_tokens.flatten(), minlength=11).double() / draws
    error = (probs * (1 - probs) / draws).sqrt()
    assert ((counts - probs).abs() <= 4.5 * error + 1e-12).all()


def test_inverse_cdf_never_draws_an_impossible_token_and_meets_both_ends():
    logprobs = torch.tensor([[-torch.inf, 0.5, 0.5, -torch.inf]]).log_softmax(-1)
    for u, expected in ((0.0, 1), (0.4999, 1), (0.5001, 2), (1 - 1e-12, 2)):
        assert inverse_cdf(logprobs, torch.tensor([u], dtype=torch.float64)).item() == expected


def test_the_trainers_pass_agrees_with_the_sampler_and_may_replace_it():
    policy = tiny_policy()
    rollout, _, _ = roll(policy)
    again = trainer_logprobs(policy, rollout.generation, temperature=0.9, memory_gib=2.0)
    torch.testing.assert_close(again, rollout.old_logprobs, rtol=0, atol=2e-5)
    recomputed, _, _ = roll(policy, recompute=True)
    torch.testing.assert_close(recomputed.old_logprobs, again, rtol=0, atol=1e-7)


@pytest.mark.parametrize("reward_layer", [1, 2, 3, 4])
def test_the_reward_layer_is_the_references_whether_shared_or_above(reward_layer):
    policy = tiny_policy(first_layer=2)
    rollout, reference, _ = roll(policy, reward_layer=reward_layer)
    tokens, mask = sequence(rollout.generation)
    with torch.no_grad(), reference_of(policy) as lm, keeping(lm, [reward_layer]) as kept:
        final_hidden(lm, tokens, mask)
    # an EOS is sampled but never read by the sampler; nothing reads its state
    readable = mask.clone()
    ends = torch.cat(
        [torch.zeros_like(rollout.generation.prompt_mask), rollout.response_tokens == 2], 1
    )
    readable &= ~ends
    got = reference.layer_hidden[reward_layer][readable]
    torch.testing.assert_close(got, kept[reward_layer][readable], rtol=1e-4, atol=1e-4)


def test_learning_rate_zero_changes_nothing_and_the_ratio_is_one():
    policy = tiny_policy()
    before = {n: p.clone() for n, p in policy.lm.named_parameters()}
    metrics = update(policy, data_for(policy), PPOConfig(learning_rate=1e-300, epochs=2))
    assert all(torch.equal(before[n], p) for n, p in policy.lm.named_parameters())
    assert metrics["policy/ratio_first_max_deviation"] < 5e-5
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/approx_kl_old"] < 1e-8


def test_the_gradient_does_not_depend_on_micro_batches_or_row_order():
    gradients = []
    for tokens, order in ((10**6, None), (9, None), (30, None), (10**6, "reversed")):
        policy = tiny_policy()
        data = data_for(policy)
        rows = torch.arange(len(data.advantages))
        from tether.update import _accumulate

        rows = rows.flip(0) if order else rows
        ppo = PPOConfig(micro_batch_tokens=tokens)
        _accumulate(policy, data, rows, ppo=ppo, critic=CriticConfig(), temperature=0.9)
        gradients.append({n: p.grad for n, p in policy.lm.named_parameters() if p.grad is not None})
    assert gradients[0]
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-6)


def test_the_gradient_is_that_of_the_token_sum_over_the_minibatchs_token_count():
    from tether.update import _accumulate

    policy, critic = tiny_policy(), CriticConfig(coef=0.3)
    data = data_for(policy)
    lengths = data.rollout.response_mask.sum(dim=1)
    assert len(set(lengths.tolist())) > 1
    rows = lengths.argsort()[1:]
    _accumulate(policy, data, rows, ppo=PPOConfig(), critic=critic, temperature=0.9)
    found = {n: p.grad for n, p in policy.lm.named_parameters() if p.grad is not None}
    value_slope = policy.value_head.net[-1].bias.grad
    for parameter in [*policy.lm.parameters(), *policy.value_head.parameters()]:
        parameter.grad = None
    logprobs, values = forward(policy, data.rollout, rows, temperature=0.9, train_trunk=False)
    total = sum(
        -(logprob - old).exp() * advantage + 0.3 * 0.5 * (value - target) ** 2
        for i, row in enumerate(rows.tolist())
        for logprob, old, advantage, value, target in zip(
            logprobs[i], data.rollout.old_logprobs[row], data.advantages[row], values[i],
            data.returns[row], strict=True,
        )
        if advantage != 0  # whitening puts 0 on padding only
    )  # fmt: skip
    (total / sum(lengths[rows].tolist())).backward()
    for name, gradient in found.items():
        expected = dict(policy.lm.named_parameters())[name].grad
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(
        value_slope, policy.value_head.net[-1].bias.grad, rtol=1e-4, atol=1e-7
    )


def test_shared_layers_give_the_gradient_of_the_whole_model():
    shared, whole = tiny_policy(first_layer=2), tiny_policy(first_layer=2)
    object.__setattr__(whole, "shared_layers", 0)
    results = []
    for policy in (shared, whole):
        data = data_for(policy)
        rows = torch.arange(len(data.advantages))
        logprobs, _ = forward(policy, data.rollout, rows, temperature=0.9, train_trunk=False)
        (logprobs * data.advantages).sum().backward()
        results.append({n: p.grad for n, p in policy.lm.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-3, atol=2e-5)


def test_a_policy_that_is_not_the_sampler_is_stopped_by_the_ratio_gate():
    policy = tiny_policy()
    data = data_for(policy)
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    with pytest.raises(TrainingDiverged, match="ratio gate"):
        update(policy, data)


def test_the_value_loss_reaches_the_trunk_only_when_asked():
    for train_trunk in (False, True):
        policy = tiny_policy()
        data = data_for(policy)
        rows = torch.arange(len(data.advantages))
        _, values = forward(policy, data.rollout, rows, temperature=0.9, train_trunk=train_trunk)
        values.sum().backward()
        moved = [
            p.grad is not None and bool(p.grad.any())
            for n, p in policy.lm.named_parameters()
            if "lora" in n
        ]
        assert any(moved) == train_trunk
        assert policy.value_head.net[-1].weight.grad is not None


def test_a_minibatch_beyond_the_kl_limit_is_not_applied_and_ends_the_epoch():
    """Only the first of four minibatches passes: the weights are those of one step by hand."""
    from tether.update import _accumulate, _epochs, _step

    ppo = PPOConfig(minibatches=4, epochs=3, learning_rate=0.05, max_approx_kl_old=1e-6)
    policy, by_hand = tiny_policy(), tiny_policy()
    metrics = update(policy, data_for(policy), ppo)
    assert metrics["policy/minibatches_skipped"] == 11
    assert metrics["policy/approx_kl_old_max"] > 1e-6
    data, optimizer = data_for(by_hand), make_optimizer(by_hand, ppo, CriticConfig())
    first = next(_epochs(data, ppo, 0))[0]
    _accumulate(by_hand, data, first, ppo=ppo, critic=CriticConfig(), temperature=0.9)
    _step(by_hand, optimizer, ppo.max_gradient_norm)
    expected = dict(by_hand.lm.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, [1.0]), (2, [1.0, 0.1]), (4, [1.0, 0.7, 0.4, 0.1])]
)
def test_the_learning_rates_reach_their_final_fraction_at_the_last_step(steps, expected):
    ppo = PPOConfig(learning_rate=2.0, final_learning_rate_fraction=0.1)
    critic = CriticConfig(learning_rate=3.0)
    optimizer = make_optimizer(tiny_policy(), ppo, critic)
    for step, factor in enumerate(expected, start=1):
        set_learning_rates(optimizer, ppo, critic, step=step, steps=steps)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([2.0 * factor, 3.0 * factor], rel=1e-12, abs=0)
