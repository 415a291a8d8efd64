import math
from functools import partial

import pytest
import torch

from tether.core.controllers import (
    ControllerState,
    initial_kl_coef,
    step_fixed,
    step_target,
    step_ziegler,
)

toy_step = partial(step_target, kl_target=1.0, rate=0.2, coef_min=1e-4, coef_max=10.0)


six = partial(step_target, kl_target=6.0, rate=0.1, coef_min=1e-4, coef_max=10.0)


def test_a_fixed_coefficient_never_moves():
    state = ControllerState(multiplier=0.3)
    for measured in (0.0, 5.0, 100.0):
        state = step_fixed(state, measured)
    assert state.kl_coef == 0.3
    assert state.recent_kl == (0.0, 5.0, 100.0)


def test_above_target_the_multiplier_rises_by_the_clipped_relative_error_and_the_brake_is_on():
    up = six(ControllerState(multiplier=0.2, recent_kl=(9.0,) * 3), 9.0)
    assert math.isclose(up.multiplier, 0.2 * math.exp(0.1 * 0.5), rel_tol=1e-12)
    assert math.isclose(up.kl_coef, 0.2 * math.exp(0.1 * 0.5 + 0.6 * 0.5), rel_tol=1e-12)
    assert not up.saturated
    far = six(ControllerState(multiplier=0.2, recent_kl=(9.0,) * 3), 600.0)
    assert math.isclose(far.multiplier, 0.2 * math.exp(0.1), rel_tol=1e-12)
    assert math.isclose(far.kl_coef, 0.2 * math.exp(0.7), rel_tol=1e-12)
    assert far.saturated


def test_the_brake_is_gone_with_the_error_and_the_multiplier_stays():
    braked = six(ControllerState(multiplier=0.2, recent_kl=(9.0,) * 3), 9.0)
    after = six(braked, 6.6)  # heading below the target: 6.6 - 4 * 2.4
    assert after.kl_coef == after.multiplier < braked.multiplier


def test_a_rising_kl_is_braked_before_it_crosses_the_target():
    braked = six(ControllerState(multiplier=0.2, recent_kl=(3.0, 4.0)), 5.0)
    error = (5 + 4) / 6 - 1
    assert math.isclose(braked.multiplier, 0.2 * math.exp(0.1 * error), rel_tol=1e-12)
    assert math.isclose(braked.kl_coef, braked.multiplier * math.exp(0.6 * error), rel_tol=1e-12)


def test_below_target_the_multiplier_falls_only_when_the_kl_has_settled():
    held = six(ControllerState(multiplier=0.2, recent_kl=(0.6, 0.8)), 1.0)
    assert held.kl_coef == 0.2
    assert held.saturated
    young = six(ControllerState(multiplier=0.2, recent_kl=(3.0,)), 3.0)
    assert young.kl_coef == 0.2
    lower = six(ControllerState(multiplier=0.2, recent_kl=(3.0, 3.0)), 3.0)
    assert math.isclose(lower.kl_coef, 0.2 * math.exp(-0.05), rel_tol=1e-12)


published = partial(step_ziegler, kl_target=6.0, horizon=10_000, responses=512)


@pytest.mark.parametrize(
    ("measured", "expected", "saturated"),
    [(9.0, 0.15 * (1 + 0.2 * 0.0512), True), (3.0, 0.15 * (1 - 0.2 * 0.0512), True),
     (6.6, 0.15 * (1 + 0.1 * 0.0512), False), (6.0, 0.15, False)],
)  # fmt: skip
def test_the_published_rule_moves_by_the_clipped_error(measured, expected, saturated):
    after = published(ControllerState(multiplier=0.15), measured)
    assert math.isclose(after.kl_coef, expected, rel_tol=1e-12)
    assert round(after.kl_coef, 6) in (0.151536, 0.148464, 0.150768, 0.15)
    assert after.saturated == saturated


def test_the_published_rule_takes_the_published_number_of_responses_to_halve_the_coefficient():
    """542 batches of 64 and 69 of 512 responses: always about 34,700."""
    for responses, batches in ((64, 542), (512, 68)):
        state = ControllerState(multiplier=1.0)
        for _ in range(batches):
            state = published(state, 0.0, responses=responses)
        assert 0.49 < state.kl_coef < 0.51


@pytest.mark.parametrize("measured", [math.nan, -0.1])
def test_the_published_rule_does_not_steer_by_a_number_that_is_no_kl(measured):
    after = published(ControllerState(multiplier=0.15), measured)
    assert (after.kl_coef, after.error) == (0.15, None)


@pytest.mark.parametrize("measured", [math.nan, math.inf, -0.1])
def test_without_a_usable_measurement_nothing_is_steered_and_it_is_said(measured):
    state = ControllerState(multiplier=0.2, recent_kl=(1.0,))
    after = toy_step(state, measured)
    assert after.kl_coef == 0.2
    assert after.error is None
    assert "KL measured" in after.note


def test_a_bound_that_is_met_is_reported():
    state = ControllerState(multiplier=9.9, recent_kl=(5.0,))
    after = toy_step(state, 50.0)
    assert after.kl_coef == after.multiplier == 10.0
    assert after.saturated
    assert "bound" in after.note


def test_the_start_value_is_the_gaussian_rule():
    for kappa, expected in ((1, 0.707), (6, 0.289), (10, 0.224), (20, 0.158), (50, 0.100)):
        assert abs(initial_kl_coef(1.0, float(kappa)) - expected) < 5e-4


def toy_two() -> tuple[torch.Tensor, torch.Tensor]:
    """Reference log-probabilities and rewards of all 31 sequences of the two-letter language."""
    prefixes, logps, rewards, queue = {(): 0}, [], [], [((), 0.0)]
    order = [()]
    for prefix in order:  # breadth-first numbering of EOS-free prefixes
        if len(prefix) < 3:
            for token in (0, 1):
                prefixes[(*prefix, token)] = len(prefixes)
                order.append((*prefix, token))
    while queue:
        prefix, logp = queue.pop(0)
        i = prefixes[prefix]
        logits = torch.tensor(
            [math.sin(1.7 * i + 0.9 * a) + (0.6, 0.3, 0.0)[a] for a in range(3)]
        ).double()
        step = logits.log_softmax(-1)
        for token in range(3):
            sequence = (*prefix, token)
            if token == 2 or len(sequence) == 4:
                n = len(logps)
                score = sequence.count(0) - 0.5 * sequence.count(1) + 0.25 * (token == 2)
                logps.append(logp + step[token])
                rewards.append(score + 0.3 * math.sin(3 * n))
            else:
                queue.append((sequence, logp + step[token]))
    return torch.stack(logps), torch.tensor(rewards).double()


@pytest.mark.parametrize("start", [0.05, 0.76, 3.0])
def test_the_closed_loop_on_the_exact_toy_settles_on_the_target_and_its_multiplier(start):
    """Natural-gradient ascent on the exact objective; the KL that is fed back is exact too."""
    ref, rewards = toy_two()
    torch.testing.assert_close((ref.exp() * rewards).sum().item(), 0.806278, rtol=0, atol=5e-7)
    policy, state, peak = ref.clone(), ControllerState(multiplier=start), 0.0
    for _ in range(400):
        kl = (policy.exp() * (policy - ref)).sum().item()
        peak = max(peak, kl)
        state = toy_step(state, max(kl, 0.0))
        policy = (policy + 0.05 * (rewards - state.kl_coef * (policy - ref))).log_softmax(-1)
    assert abs(kl - 1.0) < 0.05
    assert abs(state.kl_coef - 0.847468) < 0.05 * 0.847468
    assert peak < (1.1 if start >= 0.76 else 2.0)


@pytest.mark.parametrize(("start", "highest"), [(0.05, 2.0), (0.1, 1.3), (0.17, 1.1)])
@pytest.mark.parametrize("seed", range(5))
def test_a_plant_that_answers_late_is_held_too(start, highest, seed):
    """What SmolLM2 showed: the distance √(2 KL) moves with momentum, its measurement is noisy."""
    noise = torch.Generator().manual_seed(seed)
    state, distance, speed, kls = ControllerState(multiplier=start), 0.0, 0.0, []
    for step in range(60):
        kls.append(distance**2 / 2)
        measured = kls[-1] * (1 + 0.05 * torch.randn((), generator=noise).item())
        state = step_target(
            state, max(measured, 0.0), kl_target=3.0, rate=0.2, coef_min=1e-4, coef_max=10.0
        )
        speed = 0.8 * speed + 0.4 * (0.4 - state.kl_coef * distance)
        distance += (1 - step / 60) * speed
    assert abs(sum(kls[40:]) / 20 / 3.0 - 1) < 0.1
    assert max(kls) < highest * 3.0
