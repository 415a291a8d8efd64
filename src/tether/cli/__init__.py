"""The command line: one module a command, imported when it is called.

To add a command, write `cli/<name>.py` with `run(arguments) -> exit code` and name it in
`COMMANDS`. Exit codes: 0 done; 1 our fault; 2 the user's input is wrong; 3 a gate or limit
stopped the run; 130 interrupted. This module imports nothing heavy: `tether --help` is instant.
"""

import difflib
import importlib
import os
import sys
import traceback

from tether import __version__
from tether.errors import ConfigError, TetherError, TrainingDiverged

COMMANDS = {
    "train": "train by a recipe; --resume RUN continues a run",
    "fit-reward": "fit the reward model of a recipe and measure it on held-out pairs",
    "toy": "the eight-token language: what reward costs in KL, beside the exact frontier",
    "report": "write RUN/report.html again from what lies in the run folder",
    "show": "show a run's answers beside the reference's, in the terminal",
    "selftest": "prove on this machine that gradients, ratios, masks and optimum are right",
    "lesson": "why the penalty is there: pages of exact numbers, computed in seconds",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; a person's mistake is one line on stderr.

    Args:
        arguments: without the program's name; None reads `sys.argv`.
    """
    # Read when torch is imported. Threads that spin while they wait make a run several times slower
    # as soon as another program wants one of the cores; asleep they cost next to nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _dispatch(sys.argv[1:] if arguments is None else arguments)
    except TrainingDiverged as error:
        return _fail(error, code=3)
    except TetherError as error:
        return _fail(error, code=2)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130
    except BrokenPipeError:  # the reader, e.g. head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:  # the one place where our own mistakes become an exit code
        traceback.print_exc()
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help"}:
        sys.stdout.write(help_text())
        return 0
    name, *rest = arguments
    if name == "--version":
        sys.stdout.write(f"tether {__version__}\n")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "tether --help lists the commands"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    module = importlib.import_module(f"tether.cli.{name.replace('-', '_')}")
    return module.run(rest)


def _fail(error: TetherError, *, code: int) -> int:
    """One line, whatever the message holds: a file's name may contain line ends or escapes."""
    from tether.report.text import visible

    sys.stderr.write(f"error: {visible(' '.join(str(error).split()))}\n")
    return code


def help_text() -> str:
    """The text of `tether --help`."""
    rows = [f"  {name:<12}{summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tether COMMAND ...",
            "",
            "RLHF with a KL budget: the distance to the reference is measured exactly, and held.",
            "",
            *rows,
            "",
            "tether COMMAND --help explains a command; tether --version prints the version.",
            "--json prints one JSON document on stdout and nothing else; progress goes to stderr.",
            "",
        ]
    )
