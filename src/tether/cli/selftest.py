"""`tether selftest`: prove on this machine that gradients, ratios, masks and optimum are right."""

import sys

from rich.console import Console
from rich.table import Table

from tether.cli.arguments import parser, print_json
from tether.errors import ConfigError
from tether.exact.selftest.result import SelfTest

NARROWEST = 100
"""Columns of the tables where stdout is no terminal."""


def run(arguments: list[str]) -> int:
    """Run the self-test; 3 where a check fails or a known mistake is not seen."""
    options = parser(
        "selftest",
        "Prove on this machine, with the code that trains, that estimators, gradients, ratios, "
        "masks, sampler, controller and optimum are right, and that known mistakes would be seen.",
    )
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it runs")
    options.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32",
        help="precision of the models; bfloat16 has tolerances of its own",
    )  # fmt: skip
    options.add_argument("--json", action="store_true", help="print the result as JSON")
    options.add_argument(
        "--show-sabotage", action="store_true", help="say which check saw which mistake"
    )
    given = options.parse_args(arguments)
    result = _run(given.device, given.dtype)
    if given.json:
        print_json(result.document())
    else:
        show(result, sabotage=given.show_sabotage)
    return 0 if result.passed else 3


def _run(device: str, dtype: str) -> SelfTest:
    import torch

    from tether.cli.display import display
    from tether.exact.selftest.known import SABOTAGES
    from tether.exact.selftest.run import CHECKS, run_selftest

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: got cuda; PyTorch finds no CUDA device here, use cpu")
    with display() as observer:
        return run_selftest(
            torch.device(device), getattr(torch, dtype), observer,
            checks=CHECKS, sabotages=SABOTAGES,
        )  # fmt: skip


def show(result: SelfTest, *, sabotage: bool) -> None:
    """Print the tables, what is wrong, and one last line."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NARROWEST)
    console.print(_checks_table(result))
    if sabotage:
        console.print(_sabotage_table(result))
    for line in result.defects():
        console.print(line, style="red", markup=False)
    sys.stdout.write(f"{result.headline()}\n")


def _checks_table(result: SelfTest) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("check", "measured", "expected", "tolerance", ""):
        table.add_column(name, justify="left" if name in {"check", ""} else "right")
    for one in result.checks:
        measured = "–" if one.measured is None else f"{one.measured:.6g}"
        expected = "–" if one.expected is None else f"{one.expected:.6g}"
        verdict = "[green]passed[/]" if one.passed else "[bold red]FAILED[/]"
        table.add_row(one.name, measured, expected, f"{one.tolerance:g}", verdict)
    return table


def _sabotage_table(result: SelfTest) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title="Sabotage")
    table.add_column("switched on")
    table.add_column("caught by", overflow="fold")
    for one in result.sabotage:
        table.add_row(one.name, "; ".join(one.caught_by) or "[bold red]NOTHING[/]")
    return table
