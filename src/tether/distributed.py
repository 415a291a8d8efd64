"""The machine under the run: threads, device, memory and versions. One process for now."""

import os
import platform
import resource
import sys
from importlib.metadata import version

import torch

from tether import __version__
from tether.errors import ConfigError


def set_threads(threads: int) -> int:
    """Use this many CPU threads (0: the available cores) and return the number in force."""
    chosen = threads or available_cores()
    torch.set_num_threads(chosen)
    return chosen


def available_cores() -> int:
    """Cores this process may use; more threads than that make every product slower."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str) -> torch.device:
    """Resolve auto, cpu or cuda.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: got 'cuda', but no CUDA device is visible; use cpu or auto")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def peak_memory_mib(device: torch.device) -> float:
    """Highest memory so far, MiB: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def environment(device: torch.device, threads: int) -> dict[str, str | int]:
    """Versions and hardware that a run's numbers depend on; no names, paths or keys."""
    packages = ("torch", "transformers", "peft", "accelerate")
    return {
        "tether": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": threads,
    } | {package: version(package) for package in packages}
