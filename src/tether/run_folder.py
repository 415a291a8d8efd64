"""The run folder before anything is written to it: may it be used, and by nobody else at once.

A folder counts as begun when it holds more than the lock. Imports no torch.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tether.errors import CheckpointError, ConfigError

LOCK = ".lock"
UNBEGUN = {LOCK, "config.yaml.writing"}
"""What a process that was killed before config.yaml was whole may leave; it holds nothing."""

_CHECKPOINT = re.compile(r"step-\d+")


def require_empty(run: Path) -> None:
    """Raise unless a new run may be written here.

    Raises:
        ConfigError: something lies there already; nothing is ever overwritten.
    """
    try:
        taken = run.exists() and (not run.is_dir() or {p.name for p in run.iterdir()} - UNBEGUN)
    except (OSError, ValueError) as error:
        raise _unusable(run, error) from error
    if taken:
        raise ConfigError(
            f"run: got {str(run)!r}, which exists and is not empty; name another folder with "
            "--run, or continue a run with tether train --resume"
        )


def _unusable(run: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"run: got {str(run)!r}, which cannot be written ({reason}); name a folder that can be "
        "made and written, with --run"
    )


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[bool]:
    """Hold the run folder for this process; made where missing, gone again if nothing was written.

    The lock is the operating system's, on RUN/.lock: it ends with the process, however that ends.

    Yields:
        False where there are no such locks, so that two processes could write at once.

    Raises:
        ConfigError: the folder cannot be made or written.
        CheckpointError: another process holds it.
    """
    made: list[Path] = []
    try:
        try:
            made += [folder for folder in (run, *run.parents) if not folder.exists()]
            run.mkdir(parents=True, exist_ok=True)
            file, held = _acquire(run)
        except (OSError, ValueError) as error:
            raise _unusable(run, error) from error
        try:
            yield held
        finally:
            (run / LOCK).unlink(missing_ok=True)  # before the release, so that no second one waits
            os.close(file)
    finally:
        for folder in made:
            with contextlib.suppress(OSError, ValueError):  # it holds the run, or was never made
                folder.rmdir()


def _acquire(run: Path) -> tuple[int, bool]:
    """The open lock file and whether it is locked; one that was removed meanwhile is no lock."""
    path = run / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        held = _lock(file, run)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file)):
            return file, held
        os.close(file)


def _lock(file: int, run: Path) -> bool:
    """Lock an open file at once; False where the system or the file system cannot."""
    try:
        fcntl = importlib.import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise CheckpointError(
            f"run: another process is writing to {str(run)!r}; wait for it to end, or name "
            "another folder with --run"
        ) from error
    except (ImportError, OSError):
        return False
    return True


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, the oldest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if _is_checkpoint(path)]
    return sorted(found, key=checkpoint_step)


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and _CHECKPOINT.fullmatch(path.name) is not None


def checkpoint_step(path: Path) -> int:
    """The step that a checkpoint's folder is named for."""
    return int(path.name.removeprefix("step-"))
