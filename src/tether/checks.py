"""The checks that options go through, each with the same one-line message."""

from dataclasses import fields

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


def require_at_most(section: str, config: object, **largest: int) -> None:
    """Raise unless each of these fields is at most so much: more could not be held in memory."""
    for name, most in largest.items():
        value = getattr(config, name)
        require(value <= most, f"{section}{name}", value, f"at most {most}")


def require_default(section: str, config: object, *names: str, unless: str) -> None:
    """Raise where one of these fields was changed although it has no effect.

    Args:
        section: ends with a dot or is empty.
        config: the section's dataclass.
        names: fields without effect.
        unless: what would give them one, e.g. "model.trainable is lora".
    """
    defaults = {field.name: field.default for field in fields(config)}  # type: ignore[arg-type]
    for name in names:
        value = getattr(config, name)
        allowed = f"left at {defaults[name]!r} unless {unless}: it would change nothing"
        require(value == defaults[name], f"{section}{name}", value, allowed)


def require_not_negative(section: str, config: object, *names: str) -> None:
    """Raise unless each of these fields is 0 or above."""
    for name in names:
        value = getattr(config, name)
        require(value >= 0, f"{section}{name}", value, "0 or above")
