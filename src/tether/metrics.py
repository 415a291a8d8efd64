"""Every number a run writes: its key, unit and meaning, and the file it goes to.

Rows go to `metrics.jsonl`, one JSON object a step. A key that is not registered raises, so that
docs/metrics.md, which is generated from this table, is complete by construction.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.errors import DataError, TrainingDiverged

REGISTRY: dict[str, tuple[str, str]] = {
    "step": ("steps", "training step, counted from 1"),
    "responses": ("responses", "responses sampled since the start of the run"),
    "score/mean": ("reward", "mean score of the batch's responses, before any KL"),
    "score/std": ("reward", "standard deviation of the batch's scores"),
    "reward/shaped_mean": ("reward", "mean over responses of the summed shaped reward"),
    "kl/ref_nats_per_response": (
        "nats/response",
        "exact KL(π‖π_ref): full-vocabulary KL summed along each sampled response, averaged",
    ),
    "kl/ref_standard_error": (
        "nats/response",
        "standard error of kl/ref_nats_per_response; null for one response",
    ),
    "kl/ref_nats_per_token": ("nats/token", "exact KL divided by the number of response tokens"),
    "kl/k1_nats_per_response": (
        "nats/response",
        "mean of log π − log π_ref summed over the sampled tokens; unbiased, can be negative",
    ),
    "kl/k3_nats_per_response": (
        "nats/response",
        "mean of exp(−l) − 1 + l, l = log π − log π_ref, summed over the sampled tokens",
    ),
    "kl/sampler_bias_z": (
        "standard errors",
        "mean(k3 − k1) over its standard error; beyond 4 the sampler is not π; null without spread",
    ),
    "kl/surprisal_gap_z": (
        "standard errors",
        "mean(−log π(token) − entropy) over its error; beyond 4 not from π; null without spread",
    ),
    "controller/kl_coef": ("reward/nat", "β used in this step"),
    "controller/kl_target": ("nats/response", "the target the controller steers to; null if none"),
    "controller/error": (
        "ratio",
        "(KL + 4 · its last change)/target − 1, clipped to ±1; null if nothing was steered",
    ),
    "controller/saturated": ("0 or 1", "1 where the error was clipped, β met a bound or it held"),
    "rollout/response_tokens_mean": ("tokens", "mean response length, EOS included"),
    "rollout/eos_fraction": ("fraction", "responses that ended with EOS before the limit"),
    "rollout/entropy_nats_per_token": ("nats/token", "mean full-vocabulary entropy of the policy"),
    "rollout/tokens_per_second": ("tokens/s", "response tokens of the step over its seconds"),
    "rollout/distinct_2": ("fraction", "different word pairs over all word pairs in the batch"),
    "policy/loss": ("none", "clipped surrogate, mean per token"),
    "policy/clip_fraction": ("fraction", "tokens whose ratio left [1 − ε, 1 + ε] against them"),
    "policy/approx_kl_old": (
        "nats/token",
        "k3 estimate of KL(π_old‖π) on the minibatch before its step; never the reference",
    ),
    "policy/approx_kl_old_max": ("nats/token", "the largest approx_kl_old seen in the step"),
    "policy/minibatches_skipped": ("minibatches", "left out because approx_kl_old crossed its cap"),
    "policy/ratio_first_max_deviation": (
        "ratio",
        "largest |ratio − 1| at the first minibatch, before any step; the gate's number",
    ),
    "policy/gradient_norm": ("none", "norm of the policy's gradient before clipping, mean"),
    "policy/learning_rate": ("none", "learning rate of the policy in this step"),
    "value/loss": ("reward²", "half the squared error of the value function, mean per token"),
    "value/explained_variance": ("fraction", "1 − Var(returns − values)/Var(returns)"),
    "value/mean": ("reward", "mean value over response tokens"),
    "time/step_s": ("s", "the whole step"),
    "time/generate_s": ("s", "sampling"),
    "time/reference_s": ("s", "reference log-probs and exact KL"),
    "time/score_s": ("s", "rewards"),
    "time/update_s": ("s", "all optimiser steps"),
    "time/heldout_s": ("s", "held-out answers and their judging"),
    "memory/peak_mib": ("MiB", "highest memory of the process (or device) so far"),
    "heldout/score": ("reward", "mean training reward of the policy's held-out answers"),
    "heldout/score_gain": ("reward", "heldout/score minus the same of the reference's answers"),
    "heldout/judge_gain": (
        "judge units",
        "mean over held-out prompts of judge(policy) − judge(reference); unit: sd of the "
        "judge on reference answers",
    ),
    "heldout/judge_gain_low": ("judge units", "lower end of its 95 % interval over prompts"),
    "heldout/judge_gain_high": ("judge units", "upper end of its 95 % interval over prompts"),
    "heldout/win_rate": ("fraction", "prompts whose answer the judge prefers to the reference's"),
    "heldout/kl_nats_per_response": ("nats/response", "exact KL on held-out prompts"),
    "heldout/distinct_2": ("fraction", "different word pairs over all, across held-out answers"),
    "heldout/distinct_2_ratio": ("ratio", "heldout/distinct_2 over the reference's"),
    "heldout/top_trigram_count": ("answers", "answers holding the commonest word triple"),
    "heldout/prompt_dependence": (
        "nats",
        "log π_ref(answer | its prompt) minus the log of its mean over other prompts; 0 when "
        "answers no longer depend on their prompts",
    ),
    "heldout/judge_score_correlation": (
        "correlation",
        "Pearson correlation of judge and training reward over the policy's held-out answers",
    ),
}


def check_row(row: Mapping[str, float | int | None]) -> None:
    """Raise on an unregistered key or on a number that is not finite.

    Raises:
        KeyError: a key is not in `REGISTRY` (our own mistake).
        TrainingDiverged: a value is NaN or infinite; it is never repaired.
    """
    for key, value in row.items():
        if key not in REGISTRY:
            raise KeyError(f"metric {key!r} is not registered in metrics.REGISTRY")
        if value is not None and not math.isfinite(value):
            raise TrainingDiverged(f"{key} is {value}; the step is not recorded as a result")


def append_jsonl(path: Path, rows: list[dict]) -> None:
    """Append one JSON object a line and flush it to the file."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a missing file has none.

    A last line without its end is still being written (or its writer was killed) and is left out.

    Raises:
        DataError: any other line is no JSON object.
    """
    if not path.exists():
        return []
    # split at "\n" alone: a response may hold other line separators
    *whole, _unfinished = path.read_text("utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(whole, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a JSON object; the file is damaged") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: not a JSON object; the file is damaged")
        rows.append(row)
    return rows


def metrics_page() -> str:
    """The text of docs/metrics.md: every key with its unit and definition."""
    escaped = {key: (unit, text.replace("|", "\\|")) for key, (unit, text) in REGISTRY.items()}
    rows = [f"| `{key}` | {unit} | {text} |" for key, (unit, text) in escaped.items()]
    head = "# Metrics\n\nGenerated from `tether/metrics.py`; `metrics.jsonl` has one row a step."
    return "\n".join([head, "", "| key | unit | definition |", "|---|---|---|", *rows, ""])
