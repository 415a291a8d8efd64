"""Checkpoints: written aside and renamed, safetensors and JSON only.

Random numbers and data order follow from the seed and the step, so neither has to be saved; a
resumed run on a CPU is bit-equal to one that was never stopped.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tether.errors import CheckpointError
from tether.run_folder import checkpoints

KEPT = 2
"""Checkpoints kept; the older one stays until the newer one is whole."""

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, whole."""
    aside = path.with_name(path.name + ".writing")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the bytes of tensors in order, to tell whether weights are the same ones."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def flatten_optimizer(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The optimiser's state as named tensors, `parameter|key`, in the order of its groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{name}|{key}": value.clone()
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], state: dict[str, Tensor]
) -> None:
    """Put back what `flatten_optimizer` took.

    Raises:
        CheckpointError: some parameters have a state and others have none.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stated = {key.split("|")[0] for key in state}
    if stated and stated != set(names):
        missing = sorted(set(names) - stated)[:1]
        raise CheckpointError(f"--resume: the optimiser's state of {missing} is missing")
    for name, parameter in zip(names, parameters, strict=True):
        entries = {k.split("|")[1]: v for k, v in state.items() if k.split("|")[0] == name}
        for key, value in entries.items():
            # AdamW counts its steps on the CPU; its moments live with the parameter
            place = value.device if key == "step" else parameter.device
            optimizer.state[parameter][key] = value.to(place)


def save_checkpoint(
    run: Path,
    *,
    step: int,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: dict,
) -> Path:
    """Write `RUN/checkpoints/step-N`, whole or not at all, and drop all but the last two."""
    folder = run / "checkpoints"
    target, aside = folder / f"step-{step:06d}", folder / f".writing-{step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file({n: p.detach().contiguous() for n, p in parameters.items()}, aside / WEIGHTS)
    save_file(flatten_optimizer(optimizer, list(parameters)), aside / OPTIMIZER)
    digests = {name: _digest(aside / name) for name in (WEIGHTS, OPTIMIZER)}
    whole = {"step": step, "sha256": digests} | state
    write_atomically(aside / "state.json", json.dumps(whole, indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    for old in checkpoints(run)[:-KEPT]:
        shutil.rmtree(old)
    return target


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damaged(run: Path, reason: str) -> CheckpointError:
    """The newest checkpoint cannot be used: why, and what a person can do; nothing is guessed."""
    newest, older = checkpoints(run)[-1], checkpoints(run)[:-1]
    way = (
        f"remove that folder to continue from {older[-1].name}"
        if older
        else "there is no older one; start the run anew"
    )
    return CheckpointError(f"--resume: {str(newest)!r} is damaged ({reason}); {way}")


def load_checkpoint(
    run: Path, *, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict:
    """Load the newest checkpoint into parameters and optimiser; return its state.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another recipe.
    """
    found = checkpoints(run)
    if not found:
        raise CheckpointError(f"--resume: {str(run)!r} holds no checkpoint; start the run anew")
    state, weights, moments = _read(run, found[-1])
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        raise CheckpointError(
            f"--resume: {str(found[-1])!r} holds other parameters than this recipe trains"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    restore_optimizer(optimizer, list(parameters), moments)
    return state


def _read(run: Path, newest: Path) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    """State, weights and optimiser of a checkpoint, each what was written or an error."""
    try:
        state = dict(json.loads((newest / "state.json").read_text("utf-8")))
        for name in (WEIGHTS, OPTIMIZER):
            if _digest(newest / name) != state["sha256"][name]:
                raise damaged(run, f"{name} is not what was written")
        return state, load_file(newest / WEIGHTS), load_file(newest / OPTIMIZER)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise damaged(run, reason) from error
