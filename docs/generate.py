"""Write the pages that are generated from the code: metrics.md, configuration.md, the lessons.

`python docs/generate.py` writes the first two; `python docs/generate.py lessons` the gallery in
docs/lessons/, whose numbers are computed while it runs.
"""

import sys
from pathlib import Path

from tether.cli.pages import configuration_page
from tether.metrics import metrics_page
from tether.study.lessons import LESSONS
from tether.study.lessons.page import load
from tether.study.lessons.render import index_markdown, write

DOCS = Path(__file__).parent
PAGES = {"metrics.md": metrics_page, "configuration.md": configuration_page}


def main(arguments: list[str]) -> None:
    """Write the generated pages beside this file."""
    if arguments == ["lessons"]:
        write_lessons()
        return
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8", newline="\n")


def write_lessons() -> None:
    """Compute every lesson and write its page and its figure, and the page that lists them."""
    made = []
    for name in LESSONS:
        sys.stderr.write(f"{name}\n")
        made.append(load(name))
        write(made[-1], DOCS / "lessons", page=False)
    (DOCS / "lessons" / "index.md").write_text(index_markdown(made), "utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
