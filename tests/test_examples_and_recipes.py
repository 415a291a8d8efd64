"""What the README points at works as it stands."""

import importlib.util
import runpy
from pathlib import Path

import pytest

from tether.cli.options import load_recipe
from tether.recipe_text import recipe_yaml
from tether.rewards import load_function

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_its_resolved_form_gives_it_back(path, tmp_path):
    recipe = load_recipe(str(path), [])
    recipe.require_reward()
    (tmp_path / "config.yaml").write_text(recipe_yaml(recipe))
    assert load_recipe(str(tmp_path / "config.yaml"), []) == recipe


def test_the_recipes_reward_function_counts_cheerful_words(monkeypatch):
    monkeypatch.chdir(ROOT)
    function = load_function("recipes.rewards:cheerful")
    assert function(["p"] * 3, ["Happy, happy joy!", "a sad cat", "a cat"]) == [3.0, -1.0, 0.0]


@pytest.mark.skipif(importlib.util.find_spec("glassllm") is None, reason="needs glassllm")
def test_the_one_step_example_moves_the_policy_away_from_its_reference(capsys):
    runpy.run_path(str(ROOT / "examples" / "one_step.py"))
    lines = capsys.readouterr().out.splitlines()
    nats = [float(line.split("KL ")[1].split(" ")[0]) for line in lines]
    assert len(lines) == 5
    assert abs(nats[0]) < 1e-3
    assert nats[-1] > 0.01
