"""Each lesson's load-bearing numbers, its renderings, and the command that shows it."""

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib.figure import Figure

from tether.cli import main
from tether.study.lessons import LESSONS, page, render
from tether.study.lessons.page import Column, Lesson, Table, load
from tether.study.lessons.style import panels, styled, svg

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"[−-]?\d+(?:\.\d+)?(?:e[−-]?\d+)?")


@cache
def made(name: str) -> Lesson:
    """Computed once for all tests."""
    return load(name)


def table(name: str, number: int = 0) -> Table:
    return made(name).tables[number]


def column(of: Table, name: str) -> list:
    i = [c.name for c in of.columns].index(name)
    return [row[i] for row in of.rows]


def close(values, expected, atol=5.1e-5):
    torch.testing.assert_close(
        torch.tensor(values).double(), torch.tensor(expected).double(), rtol=0, atol=atol
    )


@styled
def drawing() -> Figure:
    figure, axes = panels()
    axes[0].plot([1, 2], [1, 4])
    axes[0].set_title("KL(π‖π_ref) < 1 & more")
    return figure


HOSTILE = "<script>alert('x')</script> *a* [b](c) | `d<e>|` \x1b[31m"


def hostile() -> Lesson:
    rows = ((HOSTILE, float("inf")), ("π_ref", -1e-9))
    columns = (Column(name="a <b>"), Column(name="n", format=".3f"))
    return Lesson(
        name="shaping", title=HOSTILE, text=(HOSTILE,), formula=HOSTILE,
        tables=(Table(caption=HOSTILE, columns=columns, rows=rows),),
        figure=drawing(), figure_caption=HOSTILE, remember=(HOSTILE,),
    )  # fmt: skip


class Page(HTMLParser):
    """Names of the elements and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.asks = [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.asks += [v for k, v in attrs if k in {"src", "href", "xlink:href"} and v[0] != "#"]


# Every lesson


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_has_everything_that_a_page_needs(name):
    lesson = made(name)
    assert lesson.name == name
    assert len(lesson.text) >= 2
    assert 2 <= len(lesson.remember) <= 5
    assert lesson.formula
    assert lesson.tables
    for axis in lesson.figure.axes:
        if axis.axison and axis.get_label() != "<colorbar>":
            assert axis.get_xlabel() or axis.get_xticklabels(), "an axis without a name"


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_one_json_document(name):
    document = json.loads(json.dumps(render.as_json(made(name)), allow_nan=False))
    assert list(document) == ["name", "title", "text", "formula", "tables", "remember"]
    for each in document["tables"]:
        assert list(each) == ["caption", "columns", "rows"]
        assert {len(row) for row in each["rows"]} == {len(each["columns"])}


@pytest.mark.parametrize("name", LESSONS)
def test_a_page_asks_nobody_for_anything(name):
    shown = Page()
    shown.feed(render.as_html(made(name)))
    assert shown.asks == []
    assert {"svg", "table", "pre", "li"} <= set(shown.names)
    assert "script" not in shown.names


@pytest.mark.parametrize("name", LESSONS)
def test_the_committed_page_is_the_one_that_is_computed(name):
    """`make gallery` writes it; another machine may differ in the last digits."""
    committed = (DOCS / "lessons" / f"{name}.md").read_text("utf-8")
    now = render.as_markdown(made(name))
    assert NUMBER.sub("#", committed) == NUMBER.sub("#", now)
    values = [
        [float(n.replace("−", "-")) for n in NUMBER.findall(text)] for text in (committed, now)
    ]
    torch.testing.assert_close(
        torch.tensor(values[0]), torch.tensor(values[1]), rtol=1e-3, atol=2e-4
    )
    assert (DOCS / "lessons" / f"{name}.svg").read_text("utf-8").endswith("</svg>\n")


def test_every_lesson_is_in_the_gallery_and_in_the_navigation():
    text = re.sub(r"!!python/\S+", "", (DOCS.parent / "mkdocs.yml").read_text("utf-8"))
    nav = next(part["Lessons"] for part in yaml.safe_load(text)["nav"] if "Lessons" in part)
    assert nav == ["lessons/index.md", *(f"lessons/{name}.md" for name in LESSONS)]
    index = (DOCS / "lessons" / "index.md").read_text("utf-8")
    assert re.findall(r"\]\((\w+)\.md\)", index) == list(LESSONS)


# The frame


def test_nothing_in_a_lesson_can_become_markup():
    text = render.as_html(hostile())
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<code>d&lt;e&gt;|</code>" in text
    assert "\x1b" not in text
    markdown = render.as_markdown(hostile())
    assert "<script" not in re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    assert "\\*a\\* \\[b\\](c)" in markdown
    cells = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in cells} == {3}
    assert "| π_ref | 0.000 |" in markdown
    assert "| ∞ |" in markdown


def test_equal_figures_give_equal_svg_without_a_date():
    first, second = svg(drawing()), svg(drawing())
    assert first == second
    assert "<dc:date>" not in first


def test_a_number_is_shown_as_a_person_reads_it():
    shown = Column(name="n", format="+.2f").show
    assert [shown(x) for x in (-0.5, 0.001, -0.001, float("-inf"), "x")] == [
        "−0.50", "+0.00", "0.00", "−∞", "x",
    ]  # fmt: skip
    assert json.loads(json.dumps(render.as_json(hostile())))["tables"][0]["rows"][0][1] == "inf"


# The command


def test_the_lessons_are_listed(capsys):
    assert main(["lesson"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name:<12}{about}\n" in listed for name, about in LESSONS.items())
    assert main(["lesson", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["lessons"]]
    assert names == list(LESSONS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["shapping"], "NAME: got 'shapping', which is no lesson; did you mean shaping?"),
        (["zzz"], "tether lesson lists them"),
        (["--out", "x"], "--out needs NAME or all"),
        (["shaping", "--out", "a-file"], "cannot write to 'a-file'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "load", made)
    (tmp_path / "a-file").touch()
    assert main(["lesson", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err.splitlines()[-1]


def test_a_lesson_is_printed_whole_and_as_json(monkeypatch, capsys):
    monkeypatch.setattr(page, "load", made)
    assert main(["lesson", "shaping"]) == 0
    shown = capsys.readouterr().out
    assert made("shaping").title in shown
    assert "tether lesson shaping --out DIR" in shown
    assert "2.158580" in shown
    assert main(["lesson", "shaping", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "shaping"


def test_text_of_a_lesson_is_no_markup_of_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(page, "load", lambda _: hostile())
    assert main(["lesson", "shaping"]) == 0
    shown = capsys.readouterr().out
    assert "[b](c)" in shown
    assert "\x1b" not in shown


def test_all_pages_are_written_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "load", made)
    assert main(["lesson", "all", "--out", str(tmp_path), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["lessons"]
    assert [document["name"] for document in written] == list(LESSONS)
    files = {Path(f).name for document in written for f in document["files"]}
    assert files == {f"{n}.{end}" for n in LESSONS for end in ("html", "md", "svg")}
    assert {p.name for p in tmp_path.iterdir()} == files


# shaping


def test_shaping_works_the_example():
    hand = table("shaping")
    close(column(hand, "log-ratio, nats"), [0.7, -0.7, 1.2, -0.9, 1.2, -0.7, 0.8])
    close(column(hand, "shaped r̃ₜ"), [-0.35, 0.35, -0.6, 0.45, -0.6, 1.15, 0.4])
    close(column(hand, "score"), [0, 0, 0, 0, 0, 0.8, 0.8])
    close(column(hand, "Âₜ at λ = 1")[:-1], [0.4, 0.75, 0.4, 1.0, 0.55, 1.15])


def test_shaping_at_the_optimum_every_return_is_the_same():
    returns = column(table("shaping", 1), "shaped return")
    close(returns, [2.158580] * len(returns), atol=5.1e-7)
