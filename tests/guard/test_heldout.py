"""Held-out checks against hand-made answers and plain passes of the reference."""

import math

import pytest
import torch
from conftest import tiny_policy, tiny_prompts

from tether.errors import TrainingDiverged
from tether.guard.gates import check_reference, check_sampler
from tether.guard.heldout import Answers, compare_answers, prompt_dependence
from tether.models.load import reference_of
from tether.rollout import collect_rollout, measure_kl, read_reference
from tether.update import RATIO_FLOOR


def made(responses, scores, judged) -> Answers:
    prompts = tuple(f"p{i}" for i in range(len(responses)))
    return Answers(
        prompts=prompts,
        responses=tuple(responses),
        scores=tuple(map(float, scores)),
        judged=tuple(judged),
    )


REFERENCE = made(["a b c", "d e f", "g h i", "j k l"], [0, 0, 1, 1], [0.0, 2.0, 4.0, 6.0])


def test_the_judges_gain_is_paired_and_in_units_of_its_spread_over_the_reference():
    policy = made(["a b c", "a b c", "a b c", "x y"], [1, 2, 3, 4], [1.0, 2.0, 6.0, 9.0])
    row = compare_answers(policy, REFERENCE)
    unit = math.sqrt(20 / 3)  # sd of 0, 2, 4, 6
    differences = [1.0, 0.0, 2.0, 3.0]
    spread = math.sqrt(sum((d - 1.5) ** 2 for d in differences) / 3) / unit
    assert math.isclose(row["heldout/judge_gain"], 1.5 / unit, rel_tol=1e-6)
    half = 1.96 * spread / 2
    assert math.isclose(row["heldout/judge_gain_low"], 1.5 / unit - half, rel_tol=1e-6)
    assert math.isclose(row["heldout/judge_gain_high"], 1.5 / unit + half, rel_tol=1e-6)
    assert row["heldout/win_rate"] == 3.5 / 4
    assert row["heldout/score_gain"] == 2.0
    assert row["heldout/top_trigram_count"] == 3
    assert math.isclose(row["heldout/distinct_2"], 3 / 7, rel_tol=1e-9)
    assert math.isclose(row["heldout/distinct_2_ratio"], 3 / 7, rel_tol=1e-9)


def test_the_correlation_of_judge_and_reward_is_left_out_where_it_is_undefined():
    same = made(["a b c"] * 4, [1, 1, 1, 1], [1.0, 2.0, 3.0, 4.0])
    assert "heldout/judge_score_correlation" not in compare_answers(same, REFERENCE)
    rising = made(["a b c"] * 4, [1, 2, 3, 4], [2.0, 4.0, 6.0, 8.0])
    found = compare_answers(rising, REFERENCE)["heldout/judge_score_correlation"]
    assert math.isclose(found, 1.0, rel_tol=1e-6)


def test_a_judge_without_a_spread_over_the_reference_leaves_no_metric():
    flat = made(["a b c", "d e f"], [0, 1], [0.1, 0.1])
    found = compare_answers(made(["a b c", "x y"], [1, 2], [1.0, 2.0]), flat)
    assert "heldout/score_gain" in found
    assert not [name for name in found if "judge" in name or name == "heldout/win_rate"]


def answered(policy, seed=0):
    rollout = collect_rollout(
        policy, tiny_prompts(), responses_per_prompt=1, max_new_tokens=5, temperature=0.9,
        seed=seed, reward_layer=None, recompute_logprobs=False, memory_gib=2.0,
    )  # fmt: skip
    reference = read_reference(policy, rollout, reward_layer=None, memory_gib=2.0)
    return rollout, measure_kl(policy, rollout, reference, temperature=0.9)


def logprob(lm, prompt, answer) -> float:
    """log π(answer | prompt) by one plain pass without padding."""
    ids = torch.cat([prompt, answer])[None]
    table = (lm(input_ids=ids).logits[0].double() / 0.9).log_softmax(-1)
    return sum(table[len(prompt) - 1 + t, token].item() for t, token in enumerate(answer.tolist()))


def test_prompt_dependence_equals_plain_passes_over_every_other_prompt():
    policy = tiny_policy()
    rollout, drift = answered(policy)
    generation = rollout.generation
    prompts = [
        tokens[mask]
        for tokens, mask in zip(generation.prompt_tokens, generation.prompt_mask, strict=True)
    ]
    gains = []
    with torch.no_grad(), reference_of(policy) as reference:
        for i, (tokens, mask) in enumerate(
            zip(generation.response_tokens, generation.response_mask, strict=True)
        ):
            answer = tokens[mask]
            others = [
                math.exp(logprob(reference, prompts[(i + s) % len(prompts)], answer))
                for s in range(1, min(4, len(prompts) - 1) + 1)
            ]
            own = logprob(reference, prompts[i], answer)
            gains.append(own - math.log(sum(others) / len(others)))
    found = prompt_dependence(policy, rollout, drift, temperature=0.9)
    assert math.isclose(found, sum(gains) / len(gains), rel_tol=1e-4, abs_tol=1e-4)
    assert abs(found) > 0.01


def test_the_kl_gate_passes_a_fresh_policy_and_stops_one_that_is_not_its_reference():
    fresh = tiny_policy(stirred=False)
    assert check_reference(fresh, *answered(fresh)) < 1e-4
    moved = tiny_policy(stirred=True)
    with pytest.raises(TrainingDiverged, match="KL gate: before any update"):
        check_reference(moved, *answered(moved))


def test_the_sampler_check_sees_another_temperature():
    policy = tiny_policy()
    rollout, _ = answered(policy)
    same = check_sampler(policy, rollout, temperature=0.9, memory_gib=2.0)
    assert same.matches
    assert same.deviation < RATIO_FLOOR[torch.float32] / 2
    other = check_sampler(policy, rollout, temperature=1.0, memory_gib=2.0)
    assert not other.matches
    assert other.deviation > 0.01
