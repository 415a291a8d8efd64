"""Reads a run folder as it is: finished, running, or dead in the middle of a line."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tether.errors import DataError
from tether.metrics import read_jsonl

Rows = list[dict[str, Any]]
Kind = Callable[[Any], bool]
Kinds = Mapping[str, Kind]


def is_number(value: Any) -> bool:
    """A finite number; true and false are none."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and abs(value) <= sys.float_info.max


def is_number_or_none(value: Any) -> bool:
    """A finite number, or null where there was nothing to measure."""
    return value is None or is_number(value)


def is_count(value: Any) -> bool:
    """A whole number, 0 or more."""
    return is_number(value) and isinstance(value, int) and value >= 0


def is_text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def are_numbers(value: Any) -> bool:
    """A list of finite numbers."""
    return isinstance(value, list) and all(is_number(item) for item in value)


METRICS: Kinds = {"step": is_count, "kl/ref_nats_per_response": is_number}
LEDGER: Kinds = {"step": is_count, "nats": is_number, "reward_gained": is_number}
RESULT: Kinds = {"steps": is_count, "seconds": is_number, "stopped_by": is_text}
SAMPLES: Kinds = {
    "step": is_count, "prompt": is_text, "reference": is_text, "response": is_text,
    "score": is_number, "reference_score": is_number, "kl": are_numbers, "kl_nats": is_number,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What lies in a run folder; what was not written yet is empty.

    Attributes:
        name: name of the folder.
        config_text: config.yaml as it stands.
        steps_planned: steps that the configuration asks for.
        environment: environment.json.
        metrics: rows of metrics.jsonl, one a step.
        samples: rows of samples.jsonl.
        ledger: rows of ledger.jsonl, one a step.
        result: result.json; None unless it is about all the steps.
    """

    name: str
    config_text: str
    steps_planned: int
    environment: dict[str, Any]
    metrics: Rows
    samples: Rows
    ledger: Rows
    result: dict[str, Any] | None


def read_run(run: Path) -> RunFiles:
    """Read everything that a report needs.

    Raises:
        DataError: there is no config.yaml, or a file is damaged; names file and line.
    """
    config = run / "config.yaml"
    if not config.is_file():
        raise DataError(f"{str(run)!r} is no run folder: it holds no config.yaml")
    steps = planned_steps(config)
    metrics = _read_rows(run / "metrics.jsonl", METRICS, others=is_number_or_none)
    result = _read_json(run / "result.json", RESULT)
    return RunFiles(
        name=run.resolve().name,
        config_text=config.read_text("utf-8"),
        steps_planned=steps,
        environment=_read_json(run / "environment.json", {}) or {},
        metrics=metrics,
        samples=_read_rows(run / "samples.jsonl", SAMPLES),
        ledger=_read_rows(run / "ledger.jsonl", LEDGER),
        # a run that was continued has more steps than its old result
        result=result if result and result["steps"] == len(metrics) else None,
    )


def last_samples(samples: Rows) -> Rows:
    """The samples of the newest step that has some."""
    newest = max((row["step"] for row in samples), default=None)
    return [row for row in samples if row["step"] == newest]


def planned_steps(config: Path) -> int:
    """The steps that a config.yaml asks for.

    Raises:
        DataError: it is damaged or names none.
    """
    problem = "not the configuration of a run; it names no steps"
    try:
        steps = yaml.safe_load(config.read_text("utf-8"))["steps"]
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise DataError(f"{config}: {problem}") from error
    if not is_count(steps):
        raise DataError(f"{config}: {problem}, it has {steps!r}")
    return steps


def _read_rows(path: Path, needed: Kinds, others: Kind | None = None) -> Rows:
    """The rows of a log, each with what a report reads in it."""
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        _require(row, needed, others, f"{path}:{number}")
    return rows


def _read_json(path: Path, needed: Kinds) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{path}: not a JSON object; the file is damaged") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: not a JSON object; the file is damaged")
    _require(found, needed, None, str(path))
    return found


def _require(row: dict[str, Any], needed: Kinds, others: Kind | None, place: str) -> None:
    """Raise unless the needed entries are there and every entry is of its kind."""
    for name, kind in needed.items():
        if name not in row or not kind(row[name]):
            raise DataError(f"{place}: {name}: got {_got(row, name)}; the file is damaged")
    for name, value in row.items():
        if name not in needed and others is not None and not others(value):
            raise DataError(f"{place}: {name}: got {_got(row, name)}; the file is damaged")


def _got(row: dict[str, Any], name: str) -> str:
    return repr(row[name])[:60] if name in row else "nothing"
