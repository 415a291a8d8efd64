import math
from functools import partial

import pytest
import torch

from tether.core.controllers import ControllerState, initial_kl_coef, step_fixed, step_target

toy_step = partial(step_target, kl_target=1.0, rate=0.2, coef_min=1e-4, coef_max=10.0)


def test_a_fixed_coefficient_never_moves():
    state = ControllerState(kl_coef=0.3)
    for measured in (0.0, 5.0, 100.0):
        state = step_fixed(state, measured)
    assert state.kl_coef == 0.3
    assert state.recent_kl == (0.0, 5.0, 100.0)


def test_above_target_beta_rises_by_the_clipped_relative_error():
    state = ControllerState(kl_coef=0.2, recent_kl=(9.0,) * 3)
    up = step_target(state, 9.0, kl_target=6.0, rate=0.1, coef_min=1e-4, coef_max=10.0)
    assert math.isclose(up.kl_coef, 0.2 * math.exp(0.1 * 0.5), rel_tol=1e-12)
    far = step_target(state, 600.0, kl_target=6.0, rate=0.1, coef_min=1e-4, coef_max=10.0)
    assert math.isclose(far.kl_coef, 0.2 * math.exp(0.1), rel_tol=1e-12)
    assert far.saturated


def test_a_rising_kl_is_braked_before_it_crosses_the_target():
    rising = ControllerState(kl_coef=0.2, recent_kl=(1.0, 2.0, 3.0, 4.0))
    braked = step_target(rising, 5.0, kl_target=6.0, rate=0.1, coef_min=1e-4, coef_max=10.0)
    assert math.isclose(braked.kl_coef, 0.2 * math.exp(0.1 * (10 / 6 - 1)), rel_tol=1e-12)
    falling = ControllerState(kl_coef=0.2, recent_kl=(9.0, 8.0, 7.0))
    after = step_target(falling, 6.0, kl_target=6.0, rate=0.1, coef_min=1e-4, coef_max=10.0)
    assert after.kl_coef == 0.2  # it will be below the target soon, but has not settled yet


def test_below_target_beta_falls_only_when_the_kl_has_settled():
    rising = ControllerState(kl_coef=0.2, recent_kl=tuple(i / 5 for i in range(5)))
    held = step_target(rising, 1.0, kl_target=6.0, rate=0.1, coef_min=1e-4, coef_max=10.0)
    assert held.kl_coef == 0.2
    assert held.saturated
    flat = ControllerState(kl_coef=0.2, recent_kl=(3.0,) * 4)
    young = step_target(
        ControllerState(kl_coef=0.2, recent_kl=(3.0,) * 3), 3.0,
        kl_target=6.0, rate=0.1, coef_min=1e-4, coef_max=10.0,
    )  # fmt: skip
    assert young.kl_coef == 0.2
    lower = step_target(flat, 3.0, kl_target=6.0, rate=0.1, coef_min=1e-4, coef_max=10.0)
    assert math.isclose(lower.kl_coef, 0.2 * math.exp(-0.05), rel_tol=1e-12)


@pytest.mark.parametrize("measured", [math.nan, math.inf, -0.1])
def test_without_a_usable_measurement_nothing_is_steered_and_it_is_said(measured):
    state = ControllerState(kl_coef=0.2, recent_kl=(1.0,))
    after = toy_step(state, measured)
    assert after.kl_coef == 0.2
    assert after.error is None
    assert "KL measured" in after.note


def test_a_bound_that_is_met_is_reported():
    state = ControllerState(kl_coef=9.9, recent_kl=(5.0,))
    after = toy_step(state, 50.0)
    assert after.kl_coef == 10.0
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
    policy, state, peak = ref.clone(), ControllerState(kl_coef=start), 0.0
    for _ in range(400):
        kl = (policy.exp() * (policy - ref)).sum().item()
        peak = max(peak, kl)
        state = toy_step(state, max(kl, 0.0))
        policy = (policy + 0.05 * (rewards - state.kl_coef * (policy - ref))).log_softmax(-1)
    assert abs(kl - 1.0) < 0.05
    assert abs(state.kl_coef - 0.847468) < 0.05 * 0.847468
    assert peak < (1.1 if start >= 0.76 else 6.0)
