"""The options of a recipe as a table, read from the dataclasses of `tether.config`.

In: `Recipe`. Out: name, type, default and docstring of every field; the text of --help; the
canonical spelling of a value. Kept apart from tyro, which takes half a second to print a help.
"""

import ast
import difflib
import inspect
import math
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from tether import config
from tether.config import Recipe
from tether.errors import ConfigError

PLACEHOLDERS = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}
ALLOWED = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of the recipe.

    Attributes:
        name: dotted path, e.g. kl.target.
        kind: type of one value.
        choices: the allowed words; empty where any value of the type will do.
        optional: True where null or none is allowed.
        many: True where any number of values is allowed.
        default: the value without the option.
        doc: its docstring, with the unit.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    many: bool
    default: object
    doc: str

    @property
    def allowed(self) -> str:
        """What a value must be, in words."""
        text = "one of " + ", ".join(self.choices) if self.choices else ALLOWED[self.kind]
        return f"{text} or none" if self.optional else text

    @property
    def placeholder(self) -> str:
        """What stands for the value in --help."""
        text = "|".join(self.choices) if self.choices else PLACEHOLDERS[self.kind]
        text = f"{text}|none" if self.optional else text
        return f"[{text} ...]" if self.many else text


def canonical(option: Option, text: str) -> str:
    """Spell one value as tyro reads it.

    Raises:
        ValueError: the text is no value of the option's type.
    """
    if option.choices:
        if text not in option.choices:
            raise ValueError(text)
    elif option.kind is bool:
        return {"true": "True", "false": "False"}.get(text.lower()) or _refuse(text)
    elif option.kind is int:
        int(text)
    elif option.kind is float and not math.isfinite(float(text)):
        raise ValueError(text)
    elif option.many and option.kind is str and text.startswith("-"):
        raise ValueError(text)  # it would be read as the next option
    return text


def _refuse(text: str) -> str:
    raise ValueError(text)


@cache
def options() -> dict[str, Option]:
    """Every option by name, in the order of the recipe."""
    docs = _docstrings()
    found = [_option(owner, item, prefix, docs) for owner, item, prefix in _leaves(Recipe, "")]
    return {option.name: option for option in found}


def section_docs() -> dict[str, str]:
    """What each section is about; '' is the recipe itself."""
    sections = {f.name: f.type for f in fields(Recipe) if isinstance(f.type, type)}
    nested = {n: str(t.__doc__) for n, t in sections.items() if is_dataclass(t)}
    return {"": "The run itself."} | nested


def nearest(name: str) -> str:
    """' did you mean …?' for a name that is no option, or how to list them."""
    known = [*options(), *(section for section in section_docs() if section)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    leaves = [n for n in options() if n.rpartition(".")[2] == name.rpartition(".")[2]]
    found = close or leaves
    return f"did you mean {found[0]}?" if found else "tether train --help lists the options"


def help_options() -> str:
    """The options part of `tether train --help`."""
    lines = []
    for section, about in section_docs().items():
        lines += ["", f"{section or 'run'}: {about.splitlines()[0]}"]
        for option in options().values():
            if option.name.rpartition(".")[0] == section:
                flag = "--" + option.name.replace("_", "-")
                lines.append(f"  {flag} {option.placeholder}  (default: {_shown(option.default)})")
                lines += textwrap.wrap(
                    option.doc, 96, initial_indent=" " * 6, subsequent_indent=" " * 6
                )
    return "\n".join(lines) + "\n"


def _shown(default: object) -> str:
    if default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else repr(default)


def _leaves(owner: type, prefix: str) -> Iterator[tuple[type, Any, str]]:
    """Every field that is no section, with its class and the path before it."""
    for item in fields(owner):
        if isinstance(item.type, type) and is_dataclass(item.type):
            yield from _leaves(item.type, f"{prefix}{item.name}.")
        else:
            yield owner, item, prefix


def _option(owner: type, item: Any, prefix: str, docs: dict[tuple[str, str], str]) -> Option:
    kind, optional, many = item.type, False, False
    if isinstance(kind, UnionType):
        kind, optional = next(t for t in get_args(kind) if t is not type(None)), True
    if get_origin(kind) is tuple:
        kind, many = get_args(kind)[0], True
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    default = item.default if item.default is not MISSING else item.default_factory()
    return Option(
        name=prefix + item.name, kind=str if choices else kind, choices=choices,
        optional=optional, many=many, default=default, doc=docs[owner.__name__, item.name],
    )  # fmt: skip


def _docstrings() -> dict[tuple[str, str], str]:
    """The string under each field of each class in `tether.config`."""
    owners = [getattr(config, name) for name in config.__all__]
    found = {}
    for owner in (ast.parse(inspect.getsource(item)).body[0] for item in owners):
        assert isinstance(owner, ast.ClassDef)
        for item, text in zip(owner.body, owner.body[1:], strict=False):
            if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr):
                if not isinstance(item.target, ast.Name) or not isinstance(
                    text.value, ast.Constant
                ):
                    raise ConfigError(f"config.{owner.name}: a field has no docstring")
                found[owner.name, item.target.id] = " ".join(str(text.value.value).split())
    return found
