"""The checks that options go through, each with the same one-line message."""

from tether.errors import ConfigError


def require(condition: bool, name: str, got: object, allowed: str) -> None:
    """Raise unless the condition holds.

    Raises:
        ConfigError: naming the option, what was got and what is allowed.
    """
    if not condition:
        raise ConfigError(f"{name}: got {got!r}; it must be {allowed}")


def require_positive(section: str, config: object, *names: str) -> None:
    """Raise unless each of these fields is above 0; `section` ends with a dot or is empty."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}{name}", value, "above 0")


def require_not_negative(section: str, config: object, *names: str) -> None:
    """Raise unless each of these fields is 0 or above."""
    for name in names:
        value = getattr(config, name)
        require(value >= 0, f"{section}{name}", value, "0 or above")
