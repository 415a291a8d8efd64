"""A whole run: prepare, step after step, held-out checks, checkpoints, results, report.

Everything a person or a program wants afterwards lies in the run folder; it is written as the
run goes, so that a run that was stopped at any moment can be read and resumed.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tether.baseline import sample_and_read
from tether.checkpoint import write_atomically
from tether.config import Recipe
from tether.core.controllers import ControllerState
from tether.core.ledger import ledger_row
from tether.data.splits import derived_seed
from tether.distributed import choose_device, environment, peak_memory_mib, set_threads
from tether.guard.heldout import answers, heldout_row, sample_rows
from tether.metrics import append_jsonl, check_row, read_jsonl
from tether.models.load import POLICY_ADAPTER
from tether.observer import Observer
from tether.prepare import Prepared, prepare
from tether.progress import Progress, begin, can_resume, restore, save
from tether.report import build_report
from tether.rewards import score
from tether.rollout import measure_kl
from tether.run_folder import require_empty, run_lock
from tether.summary import summarise
from tether.train import train_step
from tether.update import make_optimizer


def train(recipe: Recipe, run: Path, observer: Observer, *, resume: bool = False) -> dict:
    """Train by a recipe into a run folder.

    Args:
        recipe: what to do.
        run: the run folder; new, or with `resume` one that was stopped.
        observer: told about progress.
        resume: continue from the newest checkpoint.

    Returns:
        The result, as in result.json: gains, KL against target, seconds, where the report is.

    Raises:
        TetherError: bad input, a failed gate, or a number that is not finite.
        KeyboardInterrupt: asked to stop; the step was finished and a checkpoint written.
    """
    with run_lock(run) as locked:
        if not locked:
            observer.note("run: no file locks here; start no second process on this folder")
        if not resume:
            require_empty(run)
        return _train(recipe, run, observer, resume=resume and can_resume(run, observer))


def _train(recipe: Recipe, run: Path, observer: Observer, *, resume: bool) -> dict:
    """Train in a folder that is ours."""
    began = time.monotonic()
    threads = set_threads(recipe.threads)
    device = choose_device(recipe.device)
    ready = prepare(recipe, run, observer, device=device, resume=resume)
    optimizer = make_optimizer(ready.policy, recipe.ppo, recipe.critic)
    if resume:
        at = restore(run, ready, optimizer, observer)
    else:
        at = begin(run, ready, optimizer, observer, environment(device, threads))
    before, controller = at.seconds, at.controller
    with stop_after_step() as stopping:
        for step in range(at.step + 1, recipe.steps + 1):
            controller = _one_step(run, ready, optimizer, controller, observer, step=step)
            if stopping() or step % recipe.checkpoint_every == 0 or step == recipe.steps:
                spent = before + time.monotonic() - began
                at = Progress(step=step, controller=controller, seconds=spent)
                save(run, ready, optimizer, at)
            if stopping() and step < recipe.steps:
                build_report(run)
                raise KeyboardInterrupt
    return _finish(run, ready, seconds=before + time.monotonic() - began)


def _one_step(
    run: Path,
    ready: Prepared,
    optimizer: torch.optim.AdamW,
    controller: ControllerState,
    observer: Observer,
    *,
    step: int,
) -> ControllerState:
    """Train one step, check held-out prompts when due, and write everything down."""
    recipe, began = ready.recipe, time.monotonic()
    before = controller.note
    controller, row = train_step(ready, optimizer, controller, step=step)
    per_step = recipe.prompts.per_step * recipe.generation.responses_per_prompt
    row = {"step": step, "responses": step * per_step} | row
    seconds = time.monotonic() - began
    row["time/step_s"] = seconds
    row["rollout/tokens_per_second"] = row["rollout/response_tokens_mean"] * per_step / seconds
    if step % recipe.heldout.every == 0 or step == recipe.steps:
        row |= _heldout_check(run, ready, observer, step=step)
        row["time/heldout_s"] = time.monotonic() - began - seconds
    row["memory/peak_mib"] = peak_memory_mib(ready.policy.base.device)
    check_row(row)
    append_jsonl(run / "metrics.jsonl", [row])
    append_jsonl(run / "ledger.jsonl", [_ledger(ready, row)])
    if controller.note not in ("", before):
        observer.note(controller.note)
    observer.step(row, recipe.steps)
    return controller


def _heldout_check(run: Path, ready: Prepared, observer: Observer, *, step: int) -> dict:
    """Answer the held-out prompts; metrics against the reference's answers; keep the samples."""
    recipe, policy, reference = ready.recipe, ready.policy, ready.baseline.answers
    rollout, states = sample_and_read(
        recipe, policy, ready.reward, ready.heldout, seed=derived_seed(recipe.seed, "heldout")
    )
    drift = measure_kl(policy, rollout, states, temperature=recipe.generation.temperature)
    found = answers(rollout, score(ready.reward, policy.base, rollout, states), ready.judge)
    rows = sample_rows(step, rollout, drift, found, reference)
    append_jsonl(run / "samples.jsonl", rows)
    shown = rows[(step // recipe.heldout.every) % len(rows)]
    observer.sample(shown["prompt"], shown["reference"], shown["response"])
    return heldout_row(
        policy, rollout, drift, found, reference, temperature=recipe.generation.temperature
    )


def _ledger(ready: Prepared, row: dict) -> dict:
    return ledger_row(
        step=row["step"],
        nats=row["kl/ref_nats_per_response"],
        score=row["score/mean"],
        reference_score=ready.baseline.score_mean,
        heldout_gained=row.get("heldout/judge_gain"),
        kl_coef=row["controller/kl_coef"],
    )


@contextmanager
def stop_after_step() -> Iterator[Callable[[], bool]]:
    """Make the first SIGINT or SIGTERM a request that is met after the step; the second acts."""
    requests: list[int] = []

    def request(number: int, _frame: object) -> None:
        if requests:
            raise KeyboardInterrupt
        requests.append(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, request) for number in signals]
    try:
        yield lambda: bool(requests)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _finish(run: Path, ready: Prepared, *, seconds: float) -> dict:
    """Save the result: the adapter (or the model), result.json, the report."""
    policy = ready.policy
    if policy.adapter is not None:
        policy.adapter.save_pretrained(str(run / "adapter"), selected_adapters=[POLICY_ADAPTER])
    else:
        policy.lm.save_pretrained(str(run / "model"))
        policy.base.tokenizer.save_pretrained(str(run / "model"))
    rows = read_jsonl(run / "metrics.jsonl")
    result = {"run": str(run), "steps": len(rows), "seconds": round(seconds, 1)}
    result |= summarise(rows) | {"stopped_by": "steps"}
    result["report"] = str(run / "report.html")
    write_atomically(run / "result.json", json.dumps(result, indent=2) + "\n")
    build_report(run)
    return result
