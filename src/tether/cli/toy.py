"""`tether toy`: the eight-token language, trained rightly or as published, beside its frontier."""

import argparse
import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any

from tether.checks import require
from tether.cli.arguments import parser, print_json

ABOUT = """\
Trains a language of eight tokens, small enough that everything about it is known exactly: the
reward of a response of six tokens is how often token 3 occurs in it. Says what each policy's reward
cost in KL, and the least that it could have cost.
"""
MOST_SEEDS = 100


def run(arguments: list[str]) -> int:
    """Train every row, print the table; 0 when done."""
    given = _arguments(arguments)
    began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        document = _compute(given)
    document["seconds"] = time.monotonic() - began
    if given.json:
        print_json(document)
    else:
        from tether.cli.toy_table import show

        show(document)
    return 0


def _arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the arguments; everything that can be wrong is wrong here."""
    options = parser("toy", ABOUT)
    options.add_argument(
        "--objective", choices=("tether", "article"), default="tether",
        help="tether: PPO with the KL in the reward (default); article: the objective as it was "
        "published, kept here alone to show what it does",
    )  # fmt: skip
    options.add_argument(
        "--seeds", type=int, default=1, metavar="N",
        help="train every row with N seeds and show mean ± standard deviation (default: 1)",
    )  # fmt: skip
    options.add_argument(
        "--coefs", type=float, nargs="+", metavar="COEF",
        help="β of each row, reward per nat (tether: 1 0.5 0.3 0.2 0.1), or the article's "
        "coefficient (0 1 3 6 20)",
    )  # fmt: skip
    options.add_argument(
        "--figure", type=Path, metavar="PATH",
        help="draw reward against KL as PATH.png and PATH.svg; trains the other objective's rows "
        "too",
    )  # fmt: skip
    options.add_argument("--json", action="store_true", help="print the result as JSON")
    given = options.parse_args(arguments)
    require(1 <= given.seeds <= MOST_SEEDS, "--seeds", given.seeds, f"1 to {MOST_SEEDS}")
    for coef in given.coefs or ():
        _check_coef(coef, given.objective)
    if given.figure is not None:
        _check_figure(given.figure)
    return given


def _check_coef(coef: float, objective: str) -> None:
    """β is above 0 and not so small or large that nothing can be told apart in float64."""
    if objective == "tether":
        require(0.02 <= coef <= 100, "--coefs", coef, "0.02 to 100 reward per nat")
    else:
        require(math.isfinite(coef) and coef >= 0, "--coefs", coef, "0 or above")


def _check_figure(path: Path) -> None:
    """The folder exists and the ending is one that is written."""
    require(path.suffix in {"", ".png", ".svg"}, "--figure", str(path), "a .png or .svg file")
    require(bool(path.stem), "--figure", str(path), "a file's name")
    require(path.parent.is_dir(), "--figure", str(path), "in a folder that exists")
    for ending in (".png", ".svg"):
        require(not path.with_suffix(ending).is_dir(), "--figure", str(path), "not a folder")


def _compute(given: argparse.Namespace) -> dict[str, Any]:
    """Train what was asked for; with a figure, the other objective's rows too."""
    from tether.cli.display import display
    from tether.distributed import set_threads
    from tether.study import toy, toy_article
    from tether.study.toy_ground import ground
    from tether.study.toy_result import article_document, tether_document

    set_threads(1)  # tensors this small only wait for each other on more
    wanted = {
        "tether": (tether_document, toy.COEFS),
        "article": (article_document, toy_article.COEFS),
    }
    known, documents = ground(), {}
    with display() as observer:
        for name, (make, usual) in wanted.items():
            asked = name == given.objective
            if asked or given.figure is not None:
                coefs = given.coefs if asked and given.coefs else usual
                documents[name] = make(
                    known, coefs, seeds=given.seeds if asked else 1, observer=observer
                )
    document = documents[given.objective]
    if given.figure is not None:
        from tether.study.toy_figure import draw_figure

        document["figure"] = draw_figure(known, **documents, path=given.figure)
    return document
