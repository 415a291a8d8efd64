"""The recipe: frozen dataclasses, the unit of each field in its docstring. Imports no torch.

YAML keys and flags are these names: `kl: {target: 6}` is `--kl.target 6`. Every value is checked
here, where it enters; nothing is clamped or filled in later.
"""

from tether.config.inputs import GenerationConfig, ModelConfig, PromptsConfig, RewardConfig
from tether.config.kl import KLConfig
from tether.config.recipe import Recipe
from tether.config.training import AdvantagesConfig, CriticConfig, HeldoutConfig, PPOConfig

__all__ = [
    "AdvantagesConfig",
    "CriticConfig",
    "GenerationConfig",
    "HeldoutConfig",
    "KLConfig",
    "ModelConfig",
    "PPOConfig",
    "PromptsConfig",
    "Recipe",
    "RewardConfig",
]
