"""What the commands share: their own arguments, the run folder, and how results are printed."""

import argparse
import json
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from tether.config import Recipe
from tether.errors import ConfigError
from tether.run_folder import require_empty, run_lock


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, like everybody else's."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def parser(command: str, about: str) -> Parser:
    """A parser for one command; long names only in full."""
    return Parser(prog=f"tether {command}", description=about, allow_abbrev=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeArguments:
    """The arguments of a command that takes a recipe.

    Attributes:
        recipe: path of the recipe file, or None.
        flags: what belongs to the recipe, untouched.
        resume: run folder to continue, or None.
        json: True where the result is wanted as JSON.
        help: True where the help is wanted.
    """

    recipe: str | None
    flags: list[str]
    resume: str | None
    json: bool
    help: bool


def split_arguments(arguments: list[str]) -> RecipeArguments:
    """Take a command's own arguments out; the rest are options of the recipe."""
    rest, resume = list(arguments), None
    wants_help = bool({"-h", "--help"} & set(rest))
    as_json = "--json" in rest
    rest = [token for token in rest if token not in {"-h", "--help", "--json"}]
    for i, token in enumerate(rest):
        if token == "--resume":
            if i + 1 == len(rest) or rest[i + 1].startswith("--"):
                raise ConfigError("--resume: got no value; it must be a run folder")
            resume = rest[i + 1]
            del rest[i : i + 2]
            break
        if token.startswith("--resume="):
            resume = rest.pop(i).partition("=")[2]
            break
    recipe = rest.pop(0) if rest and not rest[0].startswith("--") else None
    return RecipeArguments(recipe=recipe, flags=rest, resume=resume, json=as_json, help=wants_help)


def new_folder(recipe: Recipe, recipe_path: str) -> Path:
    """Choose the folder that a command will write: the recipe's, or runs/<recipe>-<date>.

    Raises:
        ConfigError: there is something in it already, or it cannot be written.
        CheckpointError: another process is writing to it.
    """
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    folder = Path(recipe.run or f"runs/{Path(recipe_path).stem}-{stamp}")
    require_empty(folder)
    with run_lock(folder):  # made and gone again: it can be written, and nobody else does
        return folder


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def existing_run(path: str) -> Path:
    """The folder of a run that was begun.

    Raises:
        ConfigError: there is no such run.
    """
    run = Path(path)
    try:
        begun = (run / "config.yaml").is_file()
    except OSError as error:
        raise ConfigError(f"RUN: got {path!r}, which cannot be read: {error.strerror}") from error
    if not begun:
        raise ConfigError(f"RUN: got {path!r}; it must be a run folder, one with config.yaml in it")
    return run
