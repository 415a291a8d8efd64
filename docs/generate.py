"""Write the pages that are generated from the code: docs/metrics.md and docs/configuration.md."""

from pathlib import Path

from tether.cli.pages import configuration_page
from tether.metrics import metrics_page

PAGES = {"metrics.md": metrics_page, "configuration.md": configuration_page}


def main() -> None:
    """Write every generated page beside this file."""
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
