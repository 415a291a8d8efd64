"""What a lesson is: text, a formula, tables of exact numbers, one figure, what to remember."""

import importlib
import math
from dataclasses import dataclass

from matplotlib.figure import Figure

from tether.study.lessons import require_known

Cell = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        name: with the unit where there is one.
        format: format specification of its numbers, e.g. '.4f' or '+.2f'; text cells ignore it.
    """

    name: str
    format: str = ""

    def show(self, cell: Cell) -> str:
        """The cell as a person reads it."""
        if isinstance(cell, str):
            return cell
        if math.isinf(cell):
            return "∞" if cell > 0 else "−∞"
        shown = format(cell, self.format)
        zero = not shown.strip("-0.")  # a rounding error must not print as −0.0000
        return shown.replace("-", "" if zero else "−")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers that carry the lesson.

    Attributes:
        caption: what the rows are.
        columns: names and formats.
        rows: one cell a column.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.caption

    @property
    def shown(self) -> list[list[str]]:
        """The cells as text."""
        return [
            [column.show(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    @property
    def numeric(self) -> list[bool]:
        """True for each column that holds a number; those are set to the right."""
        return [any(not isinstance(row[i], str) for row in self.rows) for i in range(self.width)]

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One page. Text is plain; a `name` between backticks is set as code.

    Attributes:
        name: as in `tether lesson NAME`.
        title: the claim, in one line.
        text: paragraphs.
        formula: unicode lines.
        tables: exact numbers.
        figure: the picture, with labels and units.
        figure_caption: what the picture shows, also for those who cannot see it.
        remember: a few sentences.
    """

    name: str
    title: str
    text: tuple[str, ...]
    formula: str
    tables: tuple[Table, ...]
    figure: Figure
    figure_caption: str
    remember: tuple[str, ...]


def load(name: str) -> Lesson:
    """Make a lesson: its numbers are computed now.

    Raises:
        ConfigError: there is no such lesson; the nearest name is given.
    """
    require_known(name)
    return importlib.import_module(f"tether.study.lessons.{name}").lesson()
