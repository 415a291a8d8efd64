"""The life gate: a policy that is still its reference is stopped, a slow or unlucky one is not."""

import pytest
import torch
from conftest import tiny_policy, tiny_prompts

from tether.errors import TrainingDiverged
from tether.guard.gates import EQUAL_SCORES, check_alive, has_moved, probed_kl
from tether.rollout import collect_rollout, measure_kl, read_reference

SCORES = torch.tensor([0.0, 1.0, 2.0])


def rolled(policy, temperature=0.9):
    return collect_rollout(
        policy, tiny_prompts(), responses_per_prompt=1, max_new_tokens=5, temperature=temperature,
        seed=0, reward_layer=None, recompute_logprobs=False, memory_gib=2.0,
    )  # fmt: skip


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_a_policy_that_has_not_moved_is_stopped_only_where_its_scores_differ(trainable):
    policy = tiny_policy(trainable=trainable, first_layer=0, stirred=False)
    rollout = rolled(policy)
    assert not has_moved(policy)
    with pytest.raises(TrainingDiverged, match="no trained weight has moved"):
        check_alive(policy, rollout, SCORES, step=1, temperature=0.9)
    equal = torch.zeros(3)
    for step in (1, 2, EQUAL_SCORES // 3):
        check_alive(policy, rollout, equal, step=step, temperature=0.9)
    with pytest.raises(TrainingDiverged, match="all 3 scores are 0, as before"):
        check_alive(policy, rollout, equal, step=EQUAL_SCORES // 3 + 1, temperature=0.9)


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_weights_that_move_without_effect_are_found_at_the_second_step(trainable):
    policy = tiny_policy(trainable=trainable, first_layer=0, stirred=False)
    trained = [p for n, p in policy.lm.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(1e-12)
            parameter[parameter == 0] = 1e-12
    rollout = rolled(policy)
    assert has_moved(policy)
    check_alive(policy, rollout, SCORES, step=1, temperature=0.9)
    with pytest.raises(TrainingDiverged, match=r"step 2 KL.* is .* nats"):
        check_alive(policy, rollout, SCORES, step=2, temperature=0.9)


@pytest.mark.parametrize("first_layer", [0, 2])
def test_the_probe_measures_the_kl_of_the_responses(first_layer):
    policy = tiny_policy(first_layer=first_layer)
    rollout = rolled(policy)
    reference = read_reference(policy, rollout, reward_layer=None, memory_gib=2.0)
    drift = measure_kl(policy, rollout, reference, temperature=0.9)
    expected = drift.kl[rollout.response_mask].sum().item()
    found = probed_kl(policy, rollout, temperature=0.9)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found > 0.01
    check_alive(policy, rollout, SCORES, step=2, temperature=0.9)


def test_an_unmoved_policy_has_a_kl_of_exactly_nothing():
    policy = tiny_policy(stirred=False)
    assert probed_kl(policy, rolled(policy), temperature=0.9) == 0
