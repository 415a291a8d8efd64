"""The toy's picture: reward against KL, with every exact frontier behind the measured points."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tether.exact.optimum import Point
from tether.study.toy_ground import Ground

BLACK, ORANGE, BLUE, GREEN, VERMILION, GREY, BROWN = (
    "#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#767676", "#7A5300",
)  # fmt: skip
"""Okabe and Ito's colours, told apart by colour-blind readers too; shapes differ as well.

Brown is orange dark enough for text."""
FRONTIER_COEFS = tuple(5.0 * 0.93**i for i in range(62))
MORE_BIGRAM_COEFS = (2.0, 0.7, 0.4, 0.25, 0.15)
"""β of the bigrams' frontier besides those of our rows."""
BEST_OF = (2, 4, 16, 64, 256, 1024)
TICKS = (0, 0.1, 0.5, 1, 2, 4, 6, 9, 12, 16, 20, 24)
FORMATS = (".png", ".svg")


def draw_figure(
    known: Ground, tether: dict[str, Any], article: dict[str, Any], path: Path
) -> list[str]:
    """Write the picture as PNG and SVG beside each other.

    Args:
        known: the language's exact facts.
        tether: the document of our rows.
        article: the document of the published objective's rows.
        path: where to; its ending is replaced by each format's.

    Returns:
        The files written.
    """
    figure = Figure(figsize=(8.6, 5.6), layout="constrained")
    axes = figure.add_subplot()
    _lines(axes, known, tether["rows"])
    _best_of(axes, [known.best_of(n) for n in BEST_OF])
    _rows(axes, article["rows"], "c", colour=VERMILION, marker="X", label="the published objective")
    _rows(axes, tether["rows"], "β", colour=BLUE, marker="o", label="tether, trained by PPO")
    axes.plot(
        0, tether["reference"]["exact_reward"], "D", color=GREY, markersize=8, clip_on=False,
        zorder=5, label="the reference",
    )  # fmt: skip
    _axes(axes)
    written = [str(path.with_suffix(ending)) for ending in FORMATS]
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "tether"}):
        for name in written:
            figure.savefig(name, dpi=160, metadata={"Date": None} if name.endswith("g") else None)
    return written


def _lines(axes: Axes, known: Ground, rows: Sequence[dict[str, Any]]) -> None:
    """What any policy and what any bigram can reach."""
    rewards, kls = _curve([known.optimum(c) for c in FRONTIER_COEFS], known)
    axes.plot(kls, rewards, color=BLACK, linewidth=2, label="exact frontier: no policy is above")
    bigrams = [known.best_bigram(c).point for c in MORE_BIGRAM_COEFS]
    bigrams += [
        Point(
            kl_coef=row["coefficient"], reward=row["best_bigram_reward"], kl=row["best_bigram_kl"]
        )
        for row in rows
    ]
    rewards, kls = _curve(sorted(bigrams, key=lambda point: point.kl), known)
    axes.plot(
        kls, rewards, color=GREEN, linewidth=1.8, linestyle=(0, (5, 2)),
        label="exact frontier of bigrams",
    )  # fmt: skip


def _curve(points: list[Point], known: Ground) -> tuple[list[float], list[float]]:
    """Rewards and KLs in order, from the reference on."""
    first = known.standing_reward(known.reference)
    return [first, *(p.reward for p in points)], [0.0, *(p.kl for p in points)]


def _best_of(axes: Axes, points: list[Point]) -> None:
    """Best-of-n: no training, n samples for each answer."""
    kls, rewards = [p.kl for p in points], [p.reward for p in points]
    axes.plot(kls, rewards, ":", color=ORANGE, linewidth=1.2)
    axes.plot(kls, rewards, "^", color=ORANGE, markersize=8, label="best-of-n, exact", zorder=3)
    for n, kl, reward in zip(BEST_OF, kls, rewards, strict=True):
        _note(axes, f"n={n}", kl, reward, (5, -13), BROWN)


def _rows(
    axes: Axes, rows: Sequence[dict[str, Any]], name: str, *, colour: str, marker: str, label: str
) -> None:
    """Every run's point, named by its coefficient."""
    runs = [run for row in rows for run in row["runs"]]
    axes.plot(
        [run["kl_nats_per_response"] for run in runs], [run["exact_reward"] for run in runs],
        marker, color=colour, markersize=9, markeredgecolor="white", label=label, zorder=4,
        clip_on=False,
    )  # fmt: skip
    places: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        run = row["runs"][0]
        place = (round(run["kl_nats_per_response"], 1), round(run["exact_reward"], 1))
        places.setdefault(place, []).append(f"{row['coefficient']:g}")
    for i, (kl, reward) in enumerate(sorted(places)):
        text = f"{name}={', '.join(places[kl, reward])}"
        if marker == "o":
            _note(axes, text, kl, reward, (-9, 9), colour, right=True)
        else:  # below its mark, in turns to the left and to the right
            _note(axes, text, kl, reward, ((-4, 4)[i % 2], -16), colour, right=i % 2 == 0)


def _note(
    axes: Axes,
    text: str,
    kl: float,
    reward: float,
    offset: tuple[int, int],
    colour: str,
    *,
    right: bool = False,
) -> None:
    axes.annotate(
        text, (kl, reward), xytext=offset, textcoords="offset points", color=colour, fontsize=9,
        ha="right" if right else "left", zorder=6,
    )  # fmt: skip


def _axes(axes: Axes) -> None:
    axes.set_xscale("function", functions=(_root, _square))
    axes.set_xlim(0, 25)
    axes.set_ylim(0.6, 6.3)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xlabel(r"KL(π‖π$_\mathrm{ref}$), nats per response (square-root scale)")
    axes.set_ylabel("expected reward: rewarded tokens in a response of six")
    axes.set_title("What a nat of KL buys in the eight-token language", loc="left", fontsize=12)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9.5)


def _root(kl: Any) -> Any:
    return abs(kl) ** 0.5


def _square(root: Any) -> Any:
    return root**2
