"""`tether fit-reward`: fit the reward model of a recipe, say how good it is."""

import sys

from tether.checks import require
from tether.cli.arguments import new_folder, print_json, split_arguments
from tether.cli.options import load_recipe
from tether.cli.schema import help_options
from tether.cli.streams import results_only
from tether.errors import ConfigError

USAGE = """\
usage: tether fit-reward RECIPE.yaml [--section.field VALUE ...] [--json]

Fits the reward model on the judgements that reward.fit names, and measures on held-out pairs how
often it orders them as people did. Use it with reward.model: FOLDER.

  --json        print the result as one JSON document on stdout
"""


def run(arguments: list[str]) -> int:
    """Fit the reward model; 0 when done."""
    given = split_arguments(arguments)
    if given.help:
        sys.stdout.write(USAGE + help_options())
        return 0
    if given.resume is not None:
        raise ConfigError("--resume: not for fit-reward, which has no steps; leave it out")
    if given.recipe is None:
        raise ConfigError("RECIPE.yaml: got none; write tether fit-reward RECIPE.yaml")
    recipe = load_recipe(given.recipe, given.flags)
    require(bool(recipe.reward.fit), "reward.fit", recipe.reward.fit, "ratings or pairs to fit on")
    folder = new_folder(recipe, given.recipe)

    from tether.cli.display import display
    from tether.prepare import fit_reward

    with results_only(), display() as observer:
        result = fit_reward(recipe, folder, observer)
    if given.json:
        print_json(result)
        return 0
    low, high = result["accuracy_interval"]
    sys.stdout.write(
        f"orders {100 * result['accuracy']:.1f} % of {result['pairs']} held-out pairs as people "
        f"did [{100 * low:.1f}, {100 * high:.1f}]\nreward model: {result['path']}\n"
    )
    return 0
