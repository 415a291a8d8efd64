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
from tether.study.lessons import LESSONS, encoded_again, page, render
from tether.study.lessons.page import Column, Lesson, Table, load
from tether.study.lessons.style import panels, styled, svg

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"[−-]?\d+(?:\.\d+)?(?:e[−-]?\d+)?")


@cache
def made(name: str) -> Lesson:
    """Computed once for all tests; SmolLM2 is too slow for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoded_again, "REAL", {"builtin:glassllm": "glassllm"})
        return load(name)


def table(name: str, number: int = 0) -> Table:
    return made(name).tables[number]


def column(of: Table, name: str) -> list:
    i = [c.name for c in of.columns].index(name)
    return [row[i] for row in of.rows]


def close(values, expected, atol=5.1e-5):
    exact = [torch.tensor(numbers, dtype=torch.float64) for numbers in (values, expected)]
    torch.testing.assert_close(*exact, rtol=0, atol=atol)


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


@pytest.mark.parametrize("name", [name for name in LESSONS if name != "tokens"])
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


@pytest.mark.slow
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


# clipping


def test_clipping_never_leaves_the_trust_region_and_walks_to_the_end():
    walks = table("clipping", 1)
    assert max(column(walks, "largest |ρ − 1|")) <= 0.2 + 1e-12
    assert max(column(walks, "largest KL(new‖old)")) < 0.02
    free, held, tight = walks.rows
    assert (free[-1], held[-1], tight[-1]) == ("3 3 3 3 3 3", "1 2 3 4 5 6", "1 2 3 4 5 6")
    reward, kl = (column(walks, n) for n in ("reward", "KL(π‖π_ref) at the end"))
    close(reward, [6.0, 2.3803, 1.5448], atol=1e-4)
    close(kl[1:], [3.0100, 0.7298], atol=1e-4)
    close(kl[0], 23.08, atol=5.1e-3)  # −log π_ref(3 3 3 3 3 3), the article's fluency
    assert kl[0] > 40 * column(walks, "sum of KL(new‖old)")[0]


def test_clipping_stops_paying_outside_the_range():
    close(column(table("clipping"), "slope, Â = +1"), [1, 1, 1, 1, 0], atol=1e-12)
    close(column(table("clipping"), "slope, Â = −1"), [0, -1, -1, -1, -1], atol=1e-12)


# estimators


def test_estimators_have_their_means_and_deviations():
    values = table("estimators")
    close(
        column(values, "mean"), [0.214830, 0.209602, 0.214830, 0.254988, 0.214830, 0.214830], 5.1e-7
    )
    variances = torch.tensor(column(values, "sd")) ** 2
    close(variances.tolist(), [0.4638, 0.0129, 0.0130, 0.0671, 0.0316, 0.0068])
    close(column(table("estimators", 1), "variance")[::2], [0.440, 17.59], atol=5.1e-3)


def test_estimators_say_what_is_refused_and_where_it_ends():
    ends = table("estimators", 2)
    assert column(ends, "`kl.placement`")[:3] == [
        "`reward`, the default",
        "`exact`",
        "`token_loss`",
    ]
    assert set(column(ends, "`kl.placement`")[3:]) == {"refused"}
    close(
        column(ends, "error of E[gradient]"), [0, 0, 0.134, 0.177, 1, 0.933, 0.986, 0.891], 5.1e-4
    )
    close(column(ends, "J* − J")[:3], [0, 0, 1.68e-2], atol=2e-4)
    close(column(ends, "KL, nats")[:2], [2.404318] * 2, atol=1e-5)
    close(column(ends, "KL, nats")[4:], [5.121644] * 4, atol=1e-5)


# tokens


def test_tokens_encoded_again_are_other_ids_and_no_ratio_is_one():
    exact = made("tokens").tables[1].rows[0]
    assert exact[0] == "a, b, ab: exact"
    lesson, _ = encoded_again.small()
    on = lesson.changed > 0
    assert (lesson.log_ratio[on].abs() > 1e-3).all()
    close(lesson.log_ratio[~on].tolist(), [0.0] * int((~on).sum()), atol=1e-12)
    close(lesson.weights.sum().item(), 1.0, atol=1e-12)
    first, second, texts, again = column(made("tokens").tables[0], "nats per response")
    close(first, second, atol=1e-12)
    assert texts < first  # merging outcomes loses KL
    assert again < texts - 0.1


def test_tokens_of_a_real_tokenizer_change_too():
    row = made("tokens").tables[1].rows[1]
    assert row[0] == "glassllm"
    assert 0.02 < row[2] < 0.6


# direction


def test_direction_says_which_is_infinite_when():
    rows = table("direction").rows
    assert [[x == float("inf") for x in row[3:]] for row in rows[:2]] == [
        [False, True],
        [True, False],
    ]


def test_direction_seeks_a_mode_or_covers_both():
    mean, sd = (column(table("direction", 1), name) for name in ("mean", "sd"))
    close(mean[:2], [-2.0, 2.5], atol=0.01)
    close([mean[2], sd[2]], [mean[3], sd[3]], atol=0.01)  # the moments of the reference
    valley = column(table("direction", 1), "mass in the valley")
    assert valley[2] > 10 * valley[3]


def test_direction_is_free_one_way_only():
    costs = table("direction", 2)
    close(column(costs, "KL(π‖π_ref), nats"), [0.171897, 0.726215, 2.404318, 4.454901], 1e-6)
    there, back = (column(costs, f"answers for {n}") for n in ("KL(π‖π_ref)", "KL(π_ref‖π)"))
    assert there == sorted(there, reverse=True)
    assert back[2] > 1000 * there[2]


# information


def test_information_the_excess_length_is_the_kl():
    lengths = table("information")
    excess, error, kl = (
        column(lengths, n) for n in ("excess, measured", "± se", "KL(π‖π_ref), exact")
    )
    close(kl, [0.1673, 0.8153, 3.0470, 8.9961])
    assert all(abs(e - k) < 3 * s for e, k, s in zip(excess, kl, error, strict=True))
    assert all(0 < x < 1e-3 for x in column(lengths, "more than −log π"))


def test_information_beta_is_the_slope_of_the_frontier():
    rates = table("information", 1)
    close(column(rates, "slope dR/dKL"), column(rates, "β"), atol=1e-5)
