"""Known ways to be wrong, each put into production for as long as the self-test looks.

A sabotage replaces a production function wherever a module of tether holds it and always puts it
back. Production has no switch for any of this. What is compared with lies outside the reach: the
oracle calls none of the functions that are replaced here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """One way to be wrong.

    Attributes:
        name: short, unique.
        switched_on: a context in which production is wrong in this way.
        worth_training: True where the checks that train are repeated too.
    """

    name: str
    switched_on: Callable[[], AbstractContextManager[None]]
    worth_training: bool = False


def _holders(original: object, within: str, apart_from: str) -> list[tuple[ModuleType, str]]:
    """Every name under which a module inside `within` holds an object."""
    modules = [
        module
        for name, module in sys.modules.items()
        if f"{name}.".startswith(f"{within}.") and name != apart_from
    ]
    return [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if value is original
    ]


@contextmanager
def replaced(
    original: Callable[..., Any], substitute: Callable[..., Any], *, within: str = "tether"
) -> Iterator[None]:
    """Hold a substitute in the place of a function, and put the function back whatever happens.

    The substitute's own module keeps the original, which the substitute may call.

    Args:
        original: the production function.
        substitute: takes the same arguments.
        within: module or package whose modules get the substitute.

    Raises:
        LookupError: no module holds the function, so that nothing would be sabotaged.
    """
    holders = _holders(original, within, substitute.__module__)
    if not holders:
        raise LookupError(f"no module of {within} holds {original}")
    try:
        for module, name in holders:
            setattr(module, name, substitute)
        yield
    finally:
        for module, name in holders:
            setattr(module, name, original)
