"""Temporary."""


def resolve_model(name: str) -> str:
    """Return the name."""
    return name
