"""The text of docs/configuration.md, from the same table as `tether train --help`."""

import html
import json

from tether.cli.schema import Option, options, section_docs

_HEAD = """# Configuration

Generated from `tether.config`. A recipe is a YAML file with these names, and every name is also
a flag: `kl: {target: 6}` is `--kl.target 6`, and the flag wins. A name that is not here, or a value
out of range, is an error before anything is loaded.
"""


def configuration_page() -> str:
    """The text of docs/configuration.md: every option with its values, default and meaning."""
    parts = [_HEAD]
    for section, about in section_docs().items():
        own = [option for option in options().values() if _section(option) == section]
        rows = [_row(option) for option in own]
        head = ["| option | value | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {section or 'run'}", "", about, "", *head, *rows, ""]))
    return "\n".join(parts)


def _section(option: Option) -> str:
    return option.name.rpartition(".")[0]


def _row(option: Option) -> str:
    """One line of the table; a bar inside a cell would end it, a `<` would begin a tag."""
    default = "none" if option.default is None else json.dumps(option.default)
    cells = option.placeholder, option.doc
    value, meaning = (html.escape(cell, quote=False).replace("|", "\\|") for cell in cells)
    return f"| `{option.name}` | {value} | `{default}` | {meaning} |"
