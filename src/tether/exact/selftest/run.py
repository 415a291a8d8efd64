"""Run every check, then run them again under every sabotage."""

import time
from collections.abc import Sequence

import torch

from tether.exact.selftest.bench import Bench
from tether.exact.selftest.check import Check, run_check
from tether.exact.selftest.checks_gradients import GRADIENTS
from tether.exact.selftest.checks_training import TRAINING_CHECKS
from tether.exact.selftest.checks_values import VALUES
from tether.exact.selftest.result import Caught, Outcome, SelfTest
from tether.exact.selftest.sabotage import Sabotage
from tether.observer import Observer

CHECKS = (*VALUES, *GRADIENTS, *TRAINING_CHECKS)
"""Every check, in the order in which they are shown."""


def run_checks(checks: Sequence[Check], bench: Bench) -> tuple[Outcome, ...]:
    """All checks on one bench; the state of the random numbers outside stays as it was."""
    devices = [bench.device] if bench.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        return tuple(run_check(check, bench) for check in checks)


def caught(
    sabotage: Sabotage, checks: Sequence[Check], *, device: torch.device, dtype: torch.dtype
) -> Caught:
    """Which of some checks fail under a sabotage; everything they use is made under it."""
    chosen = [check for check in checks if sabotage.worth_training or not check.costly]
    with sabotage.switched_on():
        outcomes = run_checks(chosen, Bench(device=device, dtype=dtype))
    return Caught(
        name=sabotage.name, caught_by=tuple(one.name for one in outcomes if not one.passed)
    )


def run_selftest(
    device: torch.device,
    dtype: torch.dtype,
    observer: Observer,
    *,
    checks: Sequence[Check],
    sabotages: Sequence[Sabotage],
) -> SelfTest:
    """Prove on this machine that production does what it says, and that a mistake would show.

    Args:
        device: where the models live.
        dtype: precision of their weights and states.
        observer: told of the progress.
        checks: what is proved.
        sabotages: mistakes that must be seen.
    """
    began = time.monotonic()
    observer.stage("checks", 1 + len(sabotages))
    outcomes = run_checks(checks, Bench(device=device, dtype=dtype))
    observer.advance()
    passed = {one.name for one in outcomes if one.passed}
    sound = [check for check in checks if check.name in passed]
    seen = []
    for sabotage in sabotages:
        seen.append(caught(sabotage, sound, device=device, dtype=dtype))
        observer.advance()
    return SelfTest(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        seconds=time.monotonic() - began,
        checks=outcomes,
        sabotage=tuple(seen),
    )
