"""`tether train`: choose the run folder, train, say what came out."""

import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path

from tether.cli.arguments import (
    RecipeArguments,
    existing_run,
    new_folder,
    print_json,
    split_arguments,
)
from tether.cli.options import flag_settings, load_recipe
from tether.cli.schema import help_options
from tether.cli.streams import results_only
from tether.config import Recipe
from tether.errors import ConfigError
from tether.run_folder import checkpoint_step, checkpoints

USAGE = """\
usage: tether train RECIPE.yaml [--section.field VALUE ...] [--json]
       tether train --resume RUN [--steps N] [--json]

Trains by a recipe and writes a run folder with a report. RECIPE.yaml sets the options below
(kl: {target: 6} is --kl.target 6); what stands after it wins. true and false for switches.

  --resume RUN  continue a run that was stopped, or with --steps N one that shall take more
                steps; the learning rate then falls over all N
  --json        print the result as one JSON document on stdout
"""


def run(arguments: list[str]) -> int:
    """Train; 0 when done, 130 when interrupted."""
    given = split_arguments(arguments)
    if given.help:
        sys.stdout.write(USAGE + help_options())
        return 0
    recipe, folder = resumed(given) if given.resume is not None else fresh(given)
    try:
        result = _train(recipe, folder, resume=given.resume is not None)
    except KeyboardInterrupt:
        sys.stderr.write(_how_to_go_on(folder))
        return 130
    if given.json:
        print_json(result)
        return 0
    from tether.report import headline

    sys.stdout.write(f"{headline(result)}; {result['seconds']:.0f} s\n")
    sys.stdout.write(f"report: {result.get('report', folder / 'report.html')}\n")
    return 0


def fresh(given: RecipeArguments) -> tuple[Recipe, Path]:
    """The recipe and the new run folder."""
    if given.recipe is None:
        flag_settings(given.flags)  # a recipe after the flags is told so
        raise ConfigError("RECIPE.yaml: got none; write tether train RECIPE.yaml")
    recipe = load_recipe(given.recipe, given.flags)
    recipe.require_reward()
    return recipe, new_folder(recipe, given.recipe)


def resumed(given: RecipeArguments) -> tuple[Recipe, Path]:
    """The recipe of a run that was begun; only its number of steps may change.

    Raises:
        ConfigError: there is no such run, or another option or recipe is given.
    """
    folder = existing_run(str(given.resume))
    for setting in flag_settings(given.flags):
        if setting.name != "steps":
            raise ConfigError(
                f"{setting.where}: not with --resume; a run keeps its options, "
                "only --steps may change"
            )
    recipe = load_recipe(str(folder / "config.yaml"), given.flags)
    if given.recipe is not None:
        _require_same(
            replace(load_recipe(given.recipe, []), run=recipe.run, steps=recipe.steps), recipe
        )
    done = max((checkpoint_step(path) for path in checkpoints(folder)), default=0)
    if given.flags and recipe.steps <= done:
        raise ConfigError(f"--steps: got {recipe.steps}; it must be above the {done} steps done")
    return recipe, folder


def _require_same(other: Recipe, recipe: Recipe) -> None:
    """A recipe beside --resume must be the run's own: it would change nothing."""
    for field in fields(Recipe):
        if getattr(other, field.name) != getattr(recipe, field.name):
            raise ConfigError(
                f"--resume: RECIPE.yaml and the run differ in {field.name}; leave RECIPE.yaml out"
            )


def _train(recipe: Recipe, folder: Path, *, resume: bool) -> dict:
    from tether.cli.display import display
    from tether.run import train

    with results_only(), display() as observer:
        return train(recipe, folder, observer, resume=resume)


def _how_to_go_on(folder: Path) -> str:
    if (folder / "config.yaml").is_file():
        return f"stopped; continue with: tether train --resume {shlex.quote(str(folder))}\n"
    return "stopped before the run began; start it anew\n"
