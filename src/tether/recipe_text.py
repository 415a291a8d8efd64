"""A recipe as the YAML text that gives it back."""

from dataclasses import asdict

import yaml

from tether.config import Recipe


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe with every value written out; reading it gives an equal recipe."""
    return yaml.safe_dump(asdict(recipe), sort_keys=False, allow_unicode=True)
