"""One look for all figures of the lessons, and SVG text that is the same on every run.

Colours are those of Okabe and Ito, told apart by every kind of colour vision; they are the
report's. Lines also differ in dash or marker wherever two could be confused.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY, INK = "#CC79A7", "#56B4E9", "#6b7280", "#111827"

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.9,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "tether",
}
MARGIN = 0.06
"""Inches around the drawing."""

Given = ParamSpec("Given")


@contextmanager
def look() -> Iterator[None]:
    """Matplotlib's defaults and our style, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)  # type: ignore[arg-type]
        yield


def styled(draw: Callable[Given, Figure]) -> Callable[Given, Figure]:
    """Draw in the common look."""

    @wraps(draw)
    def inside(*args: Given.args, **kwargs: Given.kwargs) -> Figure:
        with look():
            return draw(*args, **kwargs)

    return inside


def panels(count: int = 1, *, height: float = 3.4, width: float = 9.0) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, inches; call it inside a `styled` function."""
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(1, count, squeeze=False)[0]
    return figure, list(axes)


def svg(figure: Figure) -> str:
    """The figure as SVG: no date, no random ids, equal figures give equal text."""
    stream = io.StringIO()
    with look():
        figure.savefig(
            stream, format="svg", bbox_inches="tight", pad_inches=MARGIN,
            metadata={"Date": None, "Creator": None},
        )  # fmt: skip
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
