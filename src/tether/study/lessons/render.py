"""A lesson as JSON, as a page of HTML with the figure inside, and as Markdown beside an SVG.

All text is escaped, also where it comes from a tokenizer or a sample. The terminal's rendering is
the command's affair.
"""

import html
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.report.text import visible
from tether.study.lessons import LESSONS
from tether.study.lessons.page import Cell, Lesson, Table
from tether.study.lessons.style import svg

TEMPLATE = Path(__file__).parent / "lesson.html.j2"
CODE = re.compile(r"`([^`]+)`")
MARKDOWN = re.compile(r"[*\[\]\\]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown would read as markup: an underscore inside a word is none."""


def as_json(lesson: Lesson) -> dict[str, Any]:
    """The lesson without its figure; numbers are not rounded, infinities are text."""
    return {
        "name": lesson.name,
        "title": lesson.title,
        "text": list(lesson.text),
        "formula": lesson.formula,
        "tables": [
            {
                "caption": table.caption,
                "columns": [column.name for column in table.columns],
                "rows": [[_json_cell(cell) for cell in row] for row in table.rows],
            }
            for table in lesson.tables
        ],
        "remember": list(lesson.remember),
    }


def _json_cell(cell: Cell) -> Cell:
    return cell if isinstance(cell, str) or math.isfinite(cell) else str(cell)


def _with_code(text: str, plain: Callable[[str], str], code: Callable[[str], str]) -> str:
    """Apply one function to the text and another to what stands between backticks."""
    parts = CODE.split(visible(text))  # odd places are code
    return "".join(code(p) if i % 2 else plain(p) for i, p in enumerate(parts))


def as_html(lesson: Lesson) -> str:
    """A self-contained page."""
    import jinja2  # noqa: PLC0415  # not needed for the other renderings
    from markupsafe import Markup  # noqa: PLC0415

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["prose"] = lambda text: Markup(
        _with_code(text, html.escape, lambda code: f"<code>{html.escape(code)}</code>")
    )
    environment.filters["visible"] = visible
    drawn = svg(lesson.figure)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        lesson=lesson, figure=Markup(drawn[drawn.index("<svg") :])
    )


def as_markdown(lesson: Lesson) -> str:
    """The page of the docs; its figure is NAME.svg beside it."""
    parts = [
        f"# {_prose(lesson.title)}",
        *(_prose(paragraph) for paragraph in lesson.text),
        f"```text\n{visible(lesson.formula)}\n```",
        f"![{_prose(lesson.figure_caption)}]({lesson.name}.svg)",
        f"*{_prose(lesson.figure_caption)}*",
        *(_markdown_table(table) for table in lesson.tables),
        "## What to remember",
        "\n".join(f"- {_prose(sentence)}" for sentence in lesson.remember),
        f"`tether lesson {lesson.name}` computes this page again.",
    ]
    return "\n\n".join(parts) + "\n"


def _prose(text: str) -> str:
    def plain(part: str) -> str:
        return MARKDOWN.sub(r"\\\g<0>", html.escape(part, quote=False))

    return _with_code(" ".join(text.split()), plain, lambda code: f"`{code}`")


def _markdown_table(table: Table) -> str:
    """Numbers to the right; a bar inside a cell would end it."""

    def row(cells: list[str]) -> str:
        return "| " + " | ".join(_prose(cell).replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("---:" if number else "---" for number in table.numeric) + "|"
    head = row([column.name for column in table.columns])
    return "\n".join([f"**{_prose(table.caption)}**", "", head, rule, *map(row, table.shown)])


def index_markdown(lessons: list[Lesson]) -> str:
    """The first page of the gallery."""
    parts = [
        "# Lessons",
        "Each page makes one point about the KL penalty with exact numbers and one figure. "
        "`tether lesson` lists them, `tether lesson NAME` computes one on your machine in seconds.",
    ]
    for lesson in lessons:
        parts += [
            f"## [{_prose(lesson.title)}]({lesson.name}.md)",
            _prose(f"`{lesson.name}`: {LESSONS[lesson.name]}."),
            f"![{_prose(lesson.figure_caption)}]({lesson.name}.svg)",
        ]
    return "\n\n".join(parts) + "\n"


def write(lesson: Lesson, folder: Path, *, page: bool = True) -> list[Path]:
    """Write NAME.html (unless `page` is False), NAME.md and NAME.svg; older ones are replaced.

    Raises:
        ConfigError: the folder cannot be written.
    """
    texts = {"html": as_html(lesson)} if page else {}
    texts |= {"md": as_markdown(lesson), "svg": svg(lesson.figure)}
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for ending, text in texts.items():
            path = folder / f"{lesson.name}.{ending}"
            path.write_text(text, encoding="utf-8", newline="\n")
            written.append(path)
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {str(folder)!r}: {error.strerror}") from error
    return written
