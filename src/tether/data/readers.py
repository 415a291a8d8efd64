"""Rows out of a file or a `datasets` name: dictionaries, their values as they were stored.

JSON Lines, JSON (a list of objects), CSV and Parquet; the text formats may be gzipped and may
start with a byte-order mark. `field` is the recipe's option, so that an error names it. What the
columns mean is deliberately absent: prompts, ratings and preferences each decide that.
"""

import csv
import difflib
import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.errors import DataError

Row = dict[str, Any]

logger = logging.getLogger(__name__)

_TEXT_FORMATS = (".jsonl", ".json", ".csv")
_FORMATS = (*_TEXT_FORMATS, *(f"{name}.gz" for name in _TEXT_FORMATS), ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_rows(source: str, field: str) -> list[Row]:
    """Read all rows of a local file or of the `train` split of a `datasets` hub name.

    Args:
        source: path ending in .jsonl, .json, .csv (each also with .gz) or .parquet, or a hub name.
        field: the option that named the source, for messages.

    Raises:
        DataError: no such file, unknown format, a line that cannot be parsed, or no row.
    """
    path = _local_path(source, field)
    if path.is_file():
        rows = _read_file(path, source, field)
    elif path.exists():
        what = (
            "a directory; name a file in it"
            if path.is_dir()
            else "no regular file; copy it into one"
        )
        raise DataError(f"{field}: got {source!r}; it is {what}")
    elif _looks_like_file(source):
        raise DataError(f"{field}: got {source!r}; no such file{_nearest_file(path)}")
    else:
        logger.info("%s: there is no file %r, so it is taken for a hub name", field, source)
        rows = _read_hub(source, path, field)
    if not rows:
        raise DataError(f"{field}: got {source!r}; it has no rows, at least one is needed")
    return rows


def require_column(rows: list[Row], column: str, field: str) -> None:
    """Raise unless every row has the column; the message names those that exist.

    Raises:
        DataError: naming the first row without it, the columns there and the nearest of them.
    """
    for number, row in enumerate(rows, 1):
        if column in row:
            continue
        near = difflib.get_close_matches(column, list(row), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names = ", ".join(row) or "none"
        raise DataError(f"{field}: row {number} has no column {column!r}; it has {names}{hint}")


def require_text(value: Any, row: int, column: str, field: str) -> str:
    """The value if it is a string with something in it.

    Raises:
        DataError: naming the row (counted from 1), the column and what was there instead.
    """
    if not isinstance(value, str):
        kind = type(value).__name__
        raise DataError(f"{field}: row {row}, {column!r}: got {kind}; it must be a string")
    if not value.strip():
        raise DataError(f"{field}: row {row}, {column!r} is empty; remove the row or fill it")
    return value


def _local_path(source: str, field: str) -> Path:
    """The path that a source would be, if the system can look for it."""
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long, not permitted, no such home folder
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{field}: got {source[:60]!r}; it cannot be read: {reason}") from error
    return path


def _looks_like_file(source: str) -> bool:
    named = source.lower().endswith(_FORMATS)
    return named or source.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(source)


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" and no folder {str(path.parent)!r}; check the path"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else "; check the path"


def _read_file(path: Path, source: str, field: str) -> list[Row]:
    name = path.name.lower()
    if not name.endswith(_FORMATS):
        raise DataError(f"{field}: got {source!r}; the file must end in one of {_FORMATS}")
    try:
        if name.endswith(".parquet"):
            return _read_parquet(path)
        with _open_text(path) as file:
            if name.removesuffix(".gz").endswith(".csv"):
                return list(_csv_rows(file, source, field))
            return list(_json_rows(file, source, field))
    except UnicodeDecodeError as error:
        raise DataError(f"{field}: got {source!r}; not UTF-8 ({error}); convert it") from error
    except (OSError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{field}: got {source!r}; it cannot be read: {reason}") from error


def _open_text(path: Path) -> Any:
    # newline="" leaves line ends alone, as csv wants; json ignores them.
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa  # noqa: PLC0415  (slow to import, needed by this format only)
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        return pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise OSError(str(error)) from error


def _json_rows(file: Any, source: str, field: str) -> Iterator[Row]:
    """Objects of a JSON list or of JSON Lines: the first character tells which."""
    text = file.read()
    if text.lstrip().startswith("["):
        values = _parse(text, source, field, listed=True)
        for number, value in enumerate(values, 1):
            yield _require_object(value, f"{source}: item {number}", field)
        return
    # Not splitlines(): U+2028 and its like may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        value = _parse(line, f"{source}:{number}", field)
        yield _require_object(value, f"{source}:{number}", field)


def _parse(text: str, place: str, field: str, *, listed: bool = False) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        place = f"{place}: item {_deep_item(text)}" if listed else place
        raise DataError(f"{field}: {place}: nested too deeply for a row of data") from error
    except ValueError as error:
        raise DataError(f"{field}: {place}: not JSON: {error}") from error


def _deep_item(text: str) -> int:
    """Which item of a JSON list is nested too deeply, counted from 1."""
    decoder, at, number = json.JSONDecoder(), text.index("[") + 1, 1
    while True:
        try:
            _, at = decoder.raw_decode(text, len(text) - len(text[at:].lstrip()))
        except RecursionError:
            return number
        at, number = text.index(",", at) + 1, number + 1


def _require_object(value: Any, place: str, field: str) -> Row:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"{field}: {place}: got a {kind}; each row must be an object {{...}}")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(
            f"{field}: {place}: holds {half}, half of a character (a lone surrogate); write the "
            "whole character or remove it"
        ) from error
    return value


def _csv_rows(file: Any, source: str, field: str) -> Iterator[Row]:
    reader = csv.reader(file, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = cells
                continue
            if len(cells) != len(header):
                place = f"{source}:{reader.line_num}"
                raise DataError(f"{field}: {place}: {len(cells)} cells, the header {len(header)}")
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        place = f"{source}:{reader.line_num}"
        raise DataError(f"{field}: {place}: not CSV: {error}") from error


def _read_hub(name: str, path: Path, field: str) -> list[Row]:
    import datasets  # noqa: PLC0415  (slow to import, needed by hub names only)

    try:
        return [dict(row) for row in datasets.load_dataset(name, split="train")]
    except Exception as error:  # the library raises a dozen unrelated classes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{field}: got {name!r}; no such file{_nearest_file(path)}; and as a datasets hub "
            f"name with a 'train' split it cannot be loaded ({reason:.200})"
        ) from error
