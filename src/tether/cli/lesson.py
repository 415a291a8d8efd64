"""`tether lesson`: list the lessons, print one, or write their pages."""

import sys
from pathlib import Path
from typing import Any

from tether.cli.arguments import parser, print_json
from tether.study.lessons import LESSONS, require_known

WIDTH = 100
"""Columns of text where there is no terminal."""


def run(arguments: list[str]) -> int:
    """List, print or write lessons."""
    options = parser("lesson", "Why the penalty is there, with exact numbers computed in seconds.")
    options.add_argument(
        "name", metavar="NAME", nargs="?", help="a lesson, or all; without it they are listed"
    )
    options.add_argument("--out", metavar="DIR", help="write NAME.html, NAME.md and NAME.svg there")
    options.add_argument("--json", action="store_true", help="print the numbers as JSON")
    given = options.parse_args(arguments)
    if given.name is None:
        if given.out is not None:
            options.error("--out needs NAME or all")
        _list(as_json=given.json)
        return 0
    if given.name != "all":
        require_known(given.name)
    names = list(LESSONS) if given.name == "all" else [given.name]
    documents = _make(names, given.out, as_json=given.json)
    if given.json:
        print_json({"lessons": documents} if given.name == "all" else documents[0])
    return 0


def _list(*, as_json: bool) -> None:
    if as_json:
        print_json({"lessons": [{"name": n, "summary": about} for n, about in LESSONS.items()]})
        return
    rows = [f"  {name:<12}{about}" for name, about in LESSONS.items()]
    head = "tether lesson NAME prints one; tether lesson all --out DIR writes every page:"
    sys.stdout.write("\n".join([head, "", *rows, ""]))


def _make(names: list[str], out: str | None, *, as_json: bool) -> list[dict[str, Any]]:
    """Make the lessons one after the other; what was asked for appears as soon as it is there."""
    from tether.cli.display import display
    from tether.study.lessons import render
    from tether.study.lessons.page import load

    documents = []
    for i, name in enumerate(names, start=1):
        with display() as observer:
            observer.stage(f"lesson {name}" + (f" ({i}/{len(names)})" * (len(names) > 1)), None)
            lesson = load(name)
        document = render.as_json(lesson)
        if out is not None:
            document["files"] = [str(path) for path in render.write(lesson, Path(out))]
        documents.append(document)
        if not as_json:
            _show(lesson) if out is None else sys.stdout.write(f"{document['files'][0]}\n")
    return documents


def _show(lesson: Any) -> None:
    """Print a lesson: text, formula, tables, what to remember."""
    from rich.console import Console, Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console()
    wide = Console(width=console.width if console.is_terminal else WIDTH)
    parts: list[Any] = [_text(lesson.title, style="bold cyan"), Text()]
    for paragraph in lesson.text:
        parts += [_text(paragraph), Text()]
    parts += [Panel(_text(lesson.formula), border_style="dim"), Text()]
    for table in lesson.tables:
        grid = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for column, number in zip(table.columns, table.numeric, strict=True):
            grid.add_column(
                Text(column.name), justify="right" if number else "left", overflow="fold"
            )
        for row in table.shown:
            grid.add_row(*(_text(cell) for cell in row))
        parts += [_text(table.caption, style="italic"), grid, Text()]
    parts.append(Text("What to remember", style="bold"))
    parts += [Padding(_text(f"• {line}"), (0, 0, 0, 1)) for line in lesson.remember]
    parts += [Text(), Text(f"The figure: tether lesson {lesson.name} --out DIR", style="dim")]
    wide.print(Group(*parts))


def _text(text: str, *, style: str = "") -> Any:
    """Text, never markup; what stands between backticks is coloured instead."""
    from rich.text import Text

    from tether.report.text import visible

    shown = Text(style=style)
    for i, part in enumerate(visible(text).split("`")):
        shown.append(part, style="green" if i % 2 else None)
    return shown
