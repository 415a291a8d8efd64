"""Reads a run folder as it is: finished, running, or dead in the middle of a line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tether.errors import DataError
from tether.metrics import read_jsonl

Rows = list[dict[str, Any]]


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
        DataError: there is no config.yaml, or a file is damaged.
    """
    config = run / "config.yaml"
    if not config.is_file():
        raise DataError(f"{str(run)!r} is no run folder: it holds no config.yaml")
    text = config.read_text("utf-8")
    metrics = read_jsonl(run / "metrics.jsonl")
    result = _read_json(run / "result.json")
    return RunFiles(
        name=run.resolve().name,
        config_text=text,
        steps_planned=_steps(text, config),
        environment=_read_json(run / "environment.json") or {},
        metrics=metrics,
        samples=read_jsonl(run / "samples.jsonl"),
        ledger=read_jsonl(run / "ledger.jsonl"),
        # a run that was continued has more steps than its old result
        result=result if result and result.get("steps") == len(metrics) else None,
    )


def last_samples(samples: Rows) -> Rows:
    """The samples of the newest step that has some."""
    newest = max((row["step"] for row in samples), default=None)
    return [row for row in samples if row["step"] == newest]


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not a JSON object; the file is damaged") from error


def _steps(text: str, path: Path) -> int:
    try:
        return int(yaml.safe_load(text)["steps"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not the configuration of a run; it names no steps") from error
