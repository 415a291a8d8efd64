"""How a run begins, saves itself and goes on: settings, checkpoints, logs cut where they belong.

Everything that a resumed run reads is checked before it is believed; what is missing, damaged or
changed is named, never replaced.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from tether.baseline import first_controller
from tether.checkpoint import damaged, load_checkpoint, save_checkpoint, write_atomically
from tether.config import Recipe
from tether.core.controllers import ControllerState
from tether.errors import CheckpointError, ConfigError
from tether.metrics import read_jsonl
from tether.models.load import policy_parameters
from tether.observer import Observer
from tether.prepare import Prepared, store_prepared
from tether.provenance import fingerprints, require_unchanged
from tether.recipe_text import recipe_yaml
from tether.report.read import planned_steps, read_run
from tether.run_folder import checkpoints
from tether.update import rate_factor

LOGS = ("metrics.jsonl", "ledger.jsonl", "samples.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: the last step done; 0 before the first.
        controller: β for the next step.
        seconds: spent so far.
    """

    step: int
    controller: ControllerState
    seconds: float


def can_resume(run: Path, observer: Observer) -> bool:
    """True where there is a checkpoint; False where nothing was done yet, so that it starts anew.

    Raises:
        DataError: a row of a log cannot be one of ours.
        CheckpointError: steps were logged, but their checkpoints are gone.
    """
    logged = read_run(run).metrics
    if checkpoints(run):
        return True
    if logged:
        raise CheckpointError(
            f"--resume: {str(run)!r} has {len(logged)} steps in metrics.jsonl but no checkpoint; "
            "put checkpoints/ back or start the run anew in another folder"
        )
    observer.note("--resume: the run was stopped before its first checkpoint; it starts anew")
    return False


def begin(
    run: Path, ready: Prepared, optimizer: torch.optim.Optimizer, observer: Observer, facts: dict
) -> Progress:
    """Write config.yaml, from which a run can be resumed, then all the rest; return step 0."""
    controller = first_controller(ready.recipe, ready.baseline, observer)
    write_atomically(run / "config.yaml", recipe_yaml(ready.recipe))
    store_prepared(run, ready)
    facts = facts | {"seed": ready.recipe.seed, "reference_sha256": ready.baseline.fingerprint}
    text = json.dumps(facts | {"sha256": fingerprints(ready)}, indent=2, ensure_ascii=False)
    write_atomically(run / "environment.json", text + "\n")
    start = Progress(step=0, controller=controller, seconds=0.0)
    save(run, ready, optimizer, start)
    return start


def _trained(ready: Prepared) -> dict[str, nn.Parameter]:
    """All trained parameters by name, in the optimiser's order."""
    value = ready.policy.value_head.named_parameters(prefix="value_head")
    return policy_parameters(ready.policy) | dict(value)


def save(run: Path, ready: Prepared, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write a checkpoint with the length of every log, so that a resumed run cuts them there."""
    lengths = {name: len(read_jsonl(run / name)) for name in LOGS}
    save_checkpoint(
        run,
        step=progress.step,
        parameters=_trained(ready),
        optimizer=optimizer,
        state={
            "controller": asdict(progress.controller),
            "seconds": progress.seconds,
            "log_lines": lengths,
        },
    )


def restore(
    run: Path, ready: Prepared, optimizer: torch.optim.Optimizer, observer: Observer
) -> Progress:
    """Load the newest checkpoint; drop log lines written after it; note another number of steps.

    Raises:
        CheckpointError: something is damaged, missing or not what the run began with.
        ConfigError: more steps are done than asked for.
    """
    require_unchanged(run, ready)
    state = load_checkpoint(run, parameters=_trained(ready), optimizer=optimizer)
    try:
        fields = dict(state["controller"])
        fields["recent_kl"] = tuple(fields["recent_kl"])
        controller = ControllerState(**fields)
        progress = Progress(step=state["step"], controller=controller, seconds=state["seconds"])
        lengths = {name: int(state["log_lines"][name]) for name in LOGS}
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(run, f"state.json: {type(error).__name__} {error}") from error
    _take_steps(run, ready.recipe, progress.step, observer)
    kept = {name: _first_rows(run / name, lines) for name, lines in lengths.items()}
    for name, rows in kept.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(run / name, text)
    return progress


def _first_rows(path: Path, lines: int) -> list[dict]:
    rows = read_jsonl(path)
    if len(rows) < lines:
        raise CheckpointError(
            f"--resume: {str(path)!r} has {len(rows)} rows, but {lines} were written before the "
            "newest checkpoint; put the whole file back or start the run anew"
        )
    return rows[:lines]


def _take_steps(run: Path, recipe: Recipe, done: int, observer: Observer) -> None:
    """Write another number of steps to config.yaml, and say what it does to the learning rate."""
    if recipe.steps < done:
        raise ConfigError(f"steps: got {recipe.steps}, but {done} are done; it must be more")
    before = planned_steps(run / "config.yaml")
    if before == recipe.steps:
        return
    write_atomically(run / "config.yaml", recipe_yaml(recipe))
    fraction = recipe.ppo.final_learning_rate_fraction
    old, new = (rate_factor(fraction, step=done + 1, steps=n) for n in (before, recipe.steps))
    observer.note(
        f"steps: {before} before, {recipe.steps} now; the learning rate falls over all "
        f"{recipe.steps}: step {done + 1} takes {new:.3g} of the first step's"
        + (f" instead of {old:.3g}" if done < before else "")
    )
