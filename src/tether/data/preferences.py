"""Preference pairs: for one prompt, the answer a person chose and the one rejected.

A prompt or an answer is a string or a list of messages {role, content}. Out flow three strings,
so that `prompt + chosen` is what a model reads; tokens are deliberately absent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tether.data.readers import Row, require_column, require_text
from tether.errors import DataError

Messages = list[dict[str, str]]
Render = Callable[[Messages], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """One comparison.

    Attributes:
        prompt: what both answers follow, chat template applied where the source had messages.
        chosen: the answer that was preferred, without the prompt.
        rejected: the other answer, without the prompt.
        row: where the source has it, counted from 1; None where it has no rows.
    """

    prompt: str
    chosen: str
    rejected: str
    row: int | None = field(default=None, compare=False)


def load_preferences(rows: list[Row], field: str, render: Render) -> list[Preference]:
    """Read pairs from the columns prompt, chosen and rejected.

    An answer may hold the whole conversation; then the prompt is taken off: for messages in each
    row that repeats it, for strings only where both answers of every row begin with their prompt,
    because a single answer may begin so by chance.

    Args:
        rows: rows of the source.
        field: the option that named the source, for messages.
        render: turns the messages of a prompt into text, the generation prompt included.

    Raises:
        DataError: naming the row and what to change.
    """
    for column in ("prompt", "chosen", "rejected"):
        require_column(rows, column, field)
    repeated = all(_repeats_prompt(row) for row in rows)
    pairs = []
    for number, row in enumerate(rows, 1):
        place = f"{field}: row {number}"
        lead, chosen, rejected = _three_parts(row, number, field)
        prompt = _rendered(lead, render, place) if isinstance(lead, list) else lead
        if repeated:
            chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
        chosen = require_text(chosen, number, "chosen", field)
        rejected = require_text(rejected, number, "rejected", field)
        if chosen == rejected:
            raise DataError(f"{place}: chosen and rejected are the same text; remove the row")
        pairs.append(Preference(prompt=prompt, chosen=chosen, rejected=rejected, row=number))
    return pairs


def require_messages(value: Any, row: int, column: str, field: str) -> Messages:
    """The value as a non-empty list of messages with a role and a content.

    Raises:
        DataError: naming the row, the column and what was there instead.
    """
    place = f"{field}: row {row}, {column!r}"
    if not isinstance(value, list):
        kind = type(value).__name__
        raise DataError(f"{place}: got {kind}; it must be a string or a list of messages")
    if not value:
        raise DataError(f"{place}: got an empty list; remove the row or fill it")
    messages = []
    for message in value:
        entries = message if isinstance(message, dict) else {}
        role, content = entries.get("role"), entries.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            keys = ", ".join(entries) or type(message).__name__
            raise DataError(f"{place}: a message needs strings role and content; got {keys}")
        messages.append({"role": role, "content": content})
    return messages


def _repeats_prompt(row: Row) -> bool:
    prompt, answers = row["prompt"], (row["chosen"], row["rejected"])
    return isinstance(prompt, str) and all(
        isinstance(answer, str) and answer.startswith(prompt) for answer in answers
    )


def _three_parts(row: Row, number: int, field: str) -> tuple[str | Messages, str, str]:
    """Prompt and both answers, answers as strings; messages that repeat the prompt are split."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        require_text(prompt, number, "prompt", field)
    else:
        prompt = require_messages(prompt, number, "prompt", field)
    (chosen_lead, chosen), (rejected_lead, rejected) = (
        _split_answer(row[column], prompt, number, column, field)
        for column in ("chosen", "rejected")
    )
    if chosen_lead != rejected_lead:
        raise DataError(f"{field}: row {number}: chosen and rejected follow different prompts")
    return chosen_lead, chosen, rejected


def _split_answer(
    value: Any, prompt: str | Messages, row: int, column: str, field: str
) -> tuple[str | Messages, str]:
    """The prompt that an answer follows, and the answer's text.

    A string prompt with message answers is the last turn of their lead (system messages first),
    or the user's only turn where the answers come without a lead.
    """
    if isinstance(value, str):
        return prompt, value
    *lead, answer = require_messages(value, row, column, field)
    if answer["role"] != "assistant":
        got = answer["role"]
        raise DataError(f"{field}: row {row}, {column!r}: the last role is {got!r}, not assistant")
    if isinstance(prompt, list):
        same = lead in ([], prompt)
        lead = prompt
    else:
        lead = lead or [{"role": "user", "content": prompt}]
        same = lead[-1]["content"] == prompt
    if not same:
        allowed = "one answer, alone or after exactly the prompt"
        raise DataError(f"{field}: row {row}, {column!r}: its messages must be {allowed}")
    return lead, answer["content"]


def _rendered(messages: Messages, render: Render, place: str) -> str:
    try:
        return render(messages)
    except DataError:
        raise
    except Exception as error:  # a chat template may refuse roles with any exception
        reason = " ".join(str(error).split())
        raise DataError(f"{place}: the chat template refuses the prompt: {reason}") from error
