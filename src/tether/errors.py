"""The errors a person can meet: one root, five categories, each also its standard-library class.

A message says which field, what was got, what is allowed and what to do. To add a category,
subclass `TetherError` and the closest built-in error, and raise it where the input enters.
"""


class TetherError(Exception):
    """Root of every error whose cause lies outside tether."""


class ConfigError(TetherError, ValueError):
    """An option is missing, misspelt, out of range or contradicts another one."""


class DataError(TetherError, ValueError):
    """A file, row or column cannot be used as it is."""


class GenerationError(TetherError, RuntimeError):
    """Sampling did not return what the loop needs."""


class TrainingDiverged(TetherError, RuntimeError):
    """A gate failed or a number stopped being finite; training must not go on."""


class CheckpointError(TetherError, RuntimeError):
    """A checkpoint or run folder is missing, damaged or belongs to something else."""
