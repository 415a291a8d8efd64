"""The production sampler, rollout, reference pass, KL and update on table models, unchanged."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tether.config import CriticConfig, ModelConfig, PPOConfig
from tether.core.advantages import gae
from tether.core.masking import whiten
from tether.core.shaping import shape_rewards
from tether.exact.enumerate import kl, rao_blackwell, read_table, sequence_logprobs
from tether.exact.languages import bandit, eight_tokens, letters
from tether.exact.table_lm import TableConfig, TableLM, state_numbers
from tether.generation.sampler import sample
from tether.models.load import load_base
from tether.models.trunk import final_hidden
from tether.models.usable import check_parts
from tether.rollout import collect_rollout, measure_kl, read_reference
from tether.update import make_optimizer, training_data, update_policy

LANGUAGES = {"bandit": bandit, "letters": letters, "eight tokens": eight_tokens}


def random_lm(*, vocab: int, order: int, dtype=torch.float64, seed=0) -> TableLM:
    lm = TableLM(TableConfig(vocab_size=vocab, order=order, eos_token_id=2)).to(dtype).eval()
    torch.nn.init.normal_(lm.lm_head.weight, generator=torch.Generator().manual_seed(seed))
    return lm.requires_grad_(requires_grad=False)


def roll(language, policy, *, count: int, seed: int = 0):
    rollout = collect_rollout(
        policy, language.prompts(), responses_per_prompt=count, max_new_tokens=language.length,
        temperature=1.0, seed=seed, reward_layer=None, recompute_logprobs=False, memory_gib=2.0,
    )  # fmt: skip
    reference = read_reference(policy, rollout, reward_layer=None, memory_gib=2.0)
    return rollout, measure_kl(policy, rollout, reference, temperature=1.0)


def moved(language):
    """A policy at the language's `policy` model, its reference still the reference."""
    policy = language.policy()
    policy.lm.lm_head.weight.data.copy_(language.others["policy"].lm_head.weight)
    return policy


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_state_is_a_number_of_the_last_tokens_and_padding_is_nothing(order):
    tokens = torch.tensor([[0, 2, 1, 0]])
    got = state_numbers(tokens + 1, vocab_size=3, order=order)[0].tolist()
    digits = [0] * (order - 1) + (tokens[0] + 1).tolist()
    expected = [sum(d * 4 ** (order - 1 - j) for j, d in enumerate(digits[i : i + order]))
                for i in range(4)]  # fmt: skip
    assert got == expected


@pytest.mark.parametrize("order", [1, 2, 4])
def test_left_padding_changes_no_logit(order):
    lm = random_lm(vocab=4, order=order)
    row = torch.tensor([[3, 0, 1]])
    padded = torch.tensor([[2, 1, 3, 0, 1]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert torch.equal(
        lm(input_ids=padded, attention_mask=mask).logits[:, 2:], lm(input_ids=row).logits
    )


@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_cache_gives_what_one_pass_gives_and_can_be_cropped_and_selected(order):
    lm = random_lm(vocab=4, order=order)
    tokens = torch.tensor([[3, 0, 1, 1, 2], [1, 1, 0, 3, 3]])
    whole = lm(input_ids=tokens).logits
    read = lm(input_ids=tokens[:, :3], use_cache=True)
    cache = read.past_key_values
    one = lm(input_ids=tokens[:, 3:4], past_key_values=cache).logits
    torch.testing.assert_close(one, whole[:, 3:4], rtol=0, atol=0)
    cache.crop(-1)
    rest = lm(input_ids=tokens[:, 3:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 3:], rtol=0, atol=0)
    cache.crop(-2)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    second = lm(input_ids=tokens[1:, 3:].repeat(2, 1), past_key_values=cache).logits
    torch.testing.assert_close(second, whole[1:, 3:].repeat(2, 1, 1), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_table_loads_through_transformers_bit_for_bit(tmp_path, dtype):
    lm = random_lm(vocab=4, order=2, dtype=dtype)
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    tokens = torch.tensor([[3, 0, 1]])
    assert again.dtype == dtype
    assert again.config.order == 2
    assert torch.equal(again(input_ids=tokens).logits, lm(input_ids=tokens).logits)


def test_production_loads_a_saved_language_with_its_tokenizer(tmp_path):
    language = letters()
    language.reference.save_pretrained(tmp_path)
    language.base(language.reference).tokenizer.save_pretrained(tmp_path)
    base = load_base(ModelConfig(name=str(tmp_path), dtype="float32"), device=torch.device("cpu"))
    assert base.eos_tokens.tolist() == [2]
    assert base.tokenizer.encode("a b") == [0, 1]


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_trunk_can_be_run_in_parts(name):
    language = LANGUAGES[name]()
    check_parts(language.reference)


@pytest.mark.parametrize("name", ["bandit", "letters"])
def test_the_sampler_draws_responses_with_their_exact_probability(name):
    language, count = LANGUAGES[name](), 6000
    lm, tree = language.others["policy"], language.tree
    rollout = sample(
        language.base(lm), language.prompts(), responses_per_prompt=count,
        max_new_tokens=language.length, temperature=1.0, seed=3,
    )  # fmt: skip
    table = read_table(lm, tree, prompt=language.prompt)
    exact = dict(zip(map(tuple, tree.tokens[:, : tree.length].tolist()),
                     sequence_logprobs(table, tree).exp().tolist(), strict=True))  # fmt: skip
    counts = dict.fromkeys(exact, 0)
    for row, real in zip(rollout.response_tokens, rollout.response_mask, strict=True):
        seen = row[real].tolist()
        counts[tuple(seen + [0] * (tree.length - len(seen)))] += 1
    assert sum(counts.values()) == count
    for key, p in exact.items():
        assert abs(counts[key] / count - p) <= 4.5 * math.sqrt(p * (1 - p) / count) + 1e-9, key


def test_sampler_and_trainer_agree_in_float64_and_the_measured_kl_is_rao_blackwell():
    language = letters()
    policy = moved(language)
    rollout, drift = roll(language, policy, count=300)
    mask, tree = rollout.response_mask, language.tree
    assert rollout.old_logprobs.dtype == torch.float64
    plain = policy.lm(
        input_ids=torch.cat([rollout.generation.prompt_tokens, rollout.response_tokens], 1)
    )
    logp = plain.logits[:, :-1].log_softmax(-1).gather(-1, rollout.response_tokens[..., None])
    torch.testing.assert_close(logp[..., 0][mask], rollout.old_logprobs[mask], rtol=0, atol=1e-13)
    tables = [read_table(m, tree, prompt=language.prompt) for m in (policy.lm, language.reference)]
    value = dict(zip(map(tuple, tree.tokens.tolist()), rao_blackwell(*tables, tree).tolist(),
                     strict=True))  # fmt: skip
    for row, real, got in zip(rollout.response_tokens, mask, drift.kl, strict=True):
        key = tuple((row[real].tolist() + [0] * 4)[:4])
        torch.testing.assert_close(got.sum().item(), value[key], rtol=0, atol=1e-12)
    error = drift.kl.sum(1).std().item() / math.sqrt(300)
    assert abs(drift.kl.sum(1).mean().item() - kl(*tables, tree).item()) < 4.5 * error


@pytest.mark.parametrize("name", LANGUAGES)
def test_one_production_step_raises_the_reward_and_passes_the_ratio_gate(name):
    """Ratio gate at float64's floor of 1e-9: sampler, trainer and cache agree in every digit."""
    language = LANGUAGES[name]()
    policy, scores = language.policy(), []
    ppo, critic = PPOConfig(learning_rate=0.05, minibatches=1), CriticConfig()
    optimizer = make_optimizer(policy, ppo, critic)
    for step in range(8):
        rollout, drift = roll(language, policy, count=200, seed=step)
        mask = rollout.response_mask
        score = language.reward(rollout.response_tokens, mask)
        rewards = shape_rewards(score, rollout.old_logprobs, drift.ref_logprobs, mask, kl_coef=0.1)
        estimate = gae(rewards, rollout.values, mask, gamma=1.0, gae_lambda=1.0)
        data = training_data(rollout, estimate, whiten(estimate.advantages, mask))
        stats = update_policy(
            policy, optimizer, data, ppo=replace(ppo, epochs=2), critic=critic, temperature=1.0,
            seed=step,
        )  # fmt: skip
        assert stats["policy/ratio_first_max_deviation"] < 1e-9
        scores.append(score.mean().item())
    assert scores[-1] > scores[0] + 0.1
    assert drift.kl.sum(1).mean() > 0.01


def test_only_the_table_is_trained_and_the_reference_stays():
    language = bandit()
    policy = language.policy()
    trained = [n for n, p in policy.lm.named_parameters() if p.requires_grad]
    assert trained == ["lm_head.weight"]
    policy.lm.lm_head.weight.data += 1.0
    assert torch.equal(policy.frozen_copy.lm_head.weight, language.reference.lm_head.weight)


def test_hidden_states_are_one_hot():
    language = letters()
    tokens = torch.tensor([[2, 0, 1, 0]])
    hidden = final_hidden(language.reference, tokens, torch.ones_like(tokens, dtype=torch.bool))
    assert hidden.dtype == torch.float64
    assert (hidden.sum(-1) == 1).all()
    assert (hidden.amax(-1) == 1).all()
