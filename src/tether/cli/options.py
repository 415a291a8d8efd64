"""A recipe file and the flags after it become one `Recipe`.

The file is turned into the flags that a person would type; both go through one tyro call, the
last value of an option wins. Values travel as text, so that YAML's own ideas about `no`, `on` or
1e-5 never apply. Every mistake is one line that says where it is.
"""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tether.cli.schema import Option, canonical, nearest, options, section_docs
from tether.config import Recipe
from tether.errors import ConfigError, TetherError

SCALARS = ("str", "int", "float", "bool", "null", "timestamp", "value")
YAML_TAGS = {f"tag:yaml.org,2002:{name}" for name in SCALARS}
YAML_NULLS = {"", "~", "null", "Null", "NULL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One option as it was written.

    Attributes:
        name: dotted path with underscores.
        values: its values as text.
        where: file and line, or the flag, for messages.
        listed: True where the file gave a list.
        null: True where the file gave a plain null.
    """

    name: str
    values: tuple[str, ...]
    where: str
    listed: bool = False
    null: bool = False


def load_recipe(path: str, flags: list[str]) -> Recipe:
    """Read a recipe file, put the flags over it, and check everything.

    Args:
        path: the YAML file.
        flags: `--section.field VALUE`, `--section.field=VALUE`; hyphens are underscores.

    Raises:
        ConfigError: the file cannot be read, or an option is unknown, malformed or out of range.
    """
    merged: dict[str, list[str]] = {}
    for setting in [*read_settings(path), *flag_settings(flags)]:
        merged[setting.name] = _as_flag(setting)
    return _construct([token for tokens in merged.values() for token in tokens], path)


def read_settings(path: str) -> list[Setting]:
    """Every option that a recipe file sets, in order.

    Raises:
        ConfigError: the file is missing, no YAML, no mapping, empty, or sets something twice.
    """
    root = _compose(path)
    if root is None:
        raise ConfigError(f"{path}: empty recipe; set at least one option, e.g. kl: {{target: 6}}")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: got a {_what(root)}; a recipe is a mapping of options")
    found = list(_walk(root, "", path))
    seen: dict[str, Setting] = {}
    for setting in found:
        if setting.name in seen:
            before = seen[setting.name].where
            raise ConfigError(f"{setting.where}: {setting.name} is set twice, before in {before}")
        seen[setting.name] = setting
    return found


def _compose(path: str) -> yaml.Node | None:
    """The nodes of a YAML file with their lines; nothing is built from them."""
    try:
        return yaml.compose(Path(path).read_text("utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the recipe: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply for a recipe") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"{place}: not YAML: {problem}") from error


def _what(node: yaml.Node) -> str:
    """What a node is, in words."""
    if isinstance(node, yaml.ScalarNode):
        return "single value"
    return "list" if isinstance(node, yaml.SequenceNode) else "mapping"


def _walk(node: yaml.MappingNode, prefix: str, path: str) -> Iterator[Setting]:
    """The settings of a mapping; sections lead to more of them."""
    keys: set[str] = set()
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(
                f"{where}: got a {_what(key)} as a name; names are words such as kl.target"
            )
        name = prefix + key.value.replace("-", "_")
        if name in keys:
            raise ConfigError(f"{where}: {name} stands twice in the same mapping; keep one")
        keys.add(name)
        if name and name in section_docs():
            yield from _section(name, value, where, path)
        else:
            yield _leaf(_known(name, where).name, value, where)


def _section(name: str, node: yaml.Node, where: str, path: str) -> Iterator[Setting]:
    if isinstance(node, yaml.MappingNode):
        yield from _walk(node, f"{name}.", path)
    elif not _is_null(node):
        example = next(n for n in options() if n.startswith(f"{name}."))
        raise ConfigError(f"{where}: {name} is a section; set options in it, such as {example}")


def _leaf(name: str, node: yaml.Node, where: str) -> Setting:
    listed = isinstance(node, yaml.SequenceNode)
    items = node.value if listed else [node]
    for item in items:
        if not isinstance(item, yaml.ScalarNode) or item.tag not in YAML_TAGS:
            raise ConfigError(f"{where}: {name}: got a {_what(item)}; it must be {_allowed(name)}")
    null = _is_null(node) or any(_is_null(item) for item in items)
    return Setting(
        name=name, values=tuple(i.value for i in items), where=where, listed=listed, null=null
    )


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in YAML_NULLS


def _allowed(name: str) -> str:
    option = options()[name]
    return f"a list, each {option.allowed}" if option.many else option.allowed


def _known(name: str, where: str) -> Option:
    if name not in options():
        raise ConfigError(f"{where}: unknown option {name or repr(name)}; {nearest(name)}")
    return options()[name]


def flag_settings(flags: list[str]) -> list[Setting]:
    """The options that flags set; the last one wins where a flag is repeated.

    Raises:
        ConfigError: a flag is unknown, has no value, or something stands alone.
    """
    found, rest = [], list(flags)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            raise ConfigError(
                f"unexpected argument {token!r}; the recipe comes first, then --section.field VALUE"
            )
        flag, equals, value = token.partition("=")
        option = _known(flag[2:].replace("-", "_"), flag)
        values = [value] if equals else []
        while rest and not rest[0].startswith("--") and (option.many or not values):
            values.append(rest.pop(0))
        if not values and not option.many:
            raise ConfigError(f"{flag}: got no value; it must be {option.allowed}")
        found.append(Setting(name=option.name, values=tuple(values), where=flag))
    return found


def _as_flag(setting: Setting) -> list[str]:
    """The tokens that tyro gets for one setting, with its values checked."""
    option = options()[setting.name]
    flag = "--" + setting.name
    got = list(setting.values) if setting.listed else setting.values[0] if setting.values else ""
    if option.optional and not setting.listed and (setting.null or got in {"none", "None", "null"}):
        return [f"{flag}=None"]
    try:
        if setting.null or (setting.listed and not option.many):
            raise ValueError
        values = [canonical(option, text) for text in setting.values]
    except ValueError:
        place = (
            setting.where if setting.where.startswith("--") else f"{setting.where}: {option.name}"
        )
        got = "null" if setting.null else repr(got)
        raise ConfigError(f"{place}: got {got}; it must be {_allowed(option.name)}") from None
    return [flag, *values] if option.many else [f"{flag}={values[0]}"]


def _construct(tokens: list[str], path: str) -> Recipe:
    """Let tyro build the recipe; what a dataclass refuses comes out as the dataclass said it."""
    import tyro

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(
                Recipe, args=tokens, config=(tyro.conf.FlagConversionOff,), console_outputs=False
            )
    except SystemExit as stopped:
        cause: BaseException = stopped
        while not isinstance(cause, TetherError) and (cause.__cause__ or cause.__context__):
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        if isinstance(cause, TetherError):
            raise cause from None
        raise ConfigError(f"{path}: the options cannot be used: {cause}") from stopped
