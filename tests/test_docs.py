"""The generated pages are those in docs/, and they leave nothing out."""

from pathlib import Path

import pytest

from tether.cli.pages import configuration_page
from tether.cli.schema import options
from tether.metrics import REGISTRY, metrics_page

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("name", "page"), [("metrics.md", metrics_page), ("configuration.md", configuration_page)]
)
def test_a_generated_page_is_up_to_date(name, page):
    """`python docs/generate.py` writes it."""
    assert (DOCS / name).read_text(encoding="utf-8") == page()


def test_every_option_and_every_metric_is_one_row_of_its_page():
    for name, page in [*((o, configuration_page()) for o in options()),
                       *((key, metrics_page()) for key in REGISTRY)]:  # fmt: skip
        assert page.count(f"| `{name}` |") == 1, name


def test_no_cell_of_the_configuration_ends_early():
    rows = [line for line in configuration_page().splitlines() if line.startswith("| `")]
    bars = {row.replace("\\|", "").count("|") for row in rows}
    assert bars == {5}
    assert not any("<" in row for row in rows)
