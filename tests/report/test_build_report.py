"""The report is built from the run folder alone, asks nobody for anything, and escapes all text."""

import json
import math
import random
import re
from html.parser import HTMLParser

import pytest

from tether.config import Recipe
from tether.errors import DataError
from tether.metrics import append_jsonl, check_row, read_jsonl
from tether.recipe_text import recipe_yaml
from tether.report import build_report, headline
from tether.report.build import script_json
from tether.report.headline import summary
from tether.report.text import visible

PAYLOADS = (
    "</script><script>alert(1)</script>",
    '<img src=x onerror="alert(2)">',
    "{{ 7 * 7 }}{% raw %}",
    "a\x1b[31mred\u202eabc",
)


def metrics_row(step: int, steps: int, noise: random.Random) -> dict:
    """What a healthy run might write at a step, held-out checks every tenth one."""
    done = step / steps
    kl = 6 * (1 - math.exp(-5 * done)) + noise.gauss(0, 0.25)
    row = {
        "step": step, "responses": 32 * step,
        "score/mean": 1.8 * (1 - math.exp(-3 * done)) + noise.gauss(0, 0.06), "score/std": 1.0,
        "kl/ref_nats_per_response": kl, "kl/ref_standard_error": 0.2,
        "kl/ref_nats_per_token": kl / 24, "controller/kl_target": 6.0,
        "controller/kl_coef": 0.12 * math.exp(0.8 * math.sin(5 * done)),
        "controller/error": kl / 6 - 1, "controller/saturated": 0.0,
        "rollout/response_tokens_mean": 24 + noise.gauss(0, 1), "rollout/tokens_per_second": 800.0,
        "rollout/entropy_nats_per_token": 3.4 - 0.8 * done, "rollout/distinct_2": 0.9 - 0.1 * done,
        "time/generate_s": 1.4, "time/reference_s": 0.5, "time/score_s": 0.1, "time/update_s": 1.1,
        "time/step_s": 3.2,
    }  # fmt: skip
    if step % 10 == 0 or step == steps:
        gain = 0.9 * done + noise.gauss(0, 0.05)
        row |= {
            "heldout/score_gain": 1.7 * done, "heldout/judge_gain": gain, "time/heldout_s": 2.0,
            "heldout/judge_gain_low": gain - 0.2, "heldout/judge_gain_high": gain + 0.2,
        }  # fmt: skip
    check_row(row)
    return row


def sample_row(step: int, i: int, noise: random.Random, text: str) -> dict:
    kl = [max(0.0, noise.gauss(0.2, 0.3)) for _ in range(24)]
    return {
        "step": step, "prompt": f"{text} prompt {i}", "response": f"{text} a good film, {i}",
        "reference": f"{text} a film, {i}", "ids": list(range(24)), "score": 1.0 + i / 10,
        "reference_score": 0.2, "kl": kl, "kl_nats": sum(kl),
    }  # fmt: skip


def fake_run(folder, *, steps=60, text="The", config=None):
    """A run folder without a run: everything in it is made up."""
    noise = random.Random(3)
    folder.mkdir(parents=True)
    recipe = recipe_yaml(Recipe(steps=steps)) if config is None else config
    (folder / "config.yaml").write_text(recipe)
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "device": text}))
    rows = [metrics_row(step, steps, noise) for step in range(1, steps + 1)]
    append_jsonl(folder / "metrics.jsonl", rows)
    ledger = [
        {"step": r["step"], "nats": r["kl/ref_nats_per_response"], "reward_gained": r["score/mean"]}
        for r in rows
    ]
    append_jsonl(folder / "ledger.jsonl", ledger)
    for step in (steps // 2, steps):
        append_jsonl(
            folder / "samples.jsonl", [sample_row(step, i, noise, text) for i in range(16)]
        )
    result = summary(rows) | {"steps": steps, "seconds": 212.4, "stopped_by": "steps"}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


class Page(HTMLParser):
    """Elements and attributes of a page, and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.inside = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.inside = tag if tag in {"script", "style"} else ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        self.text += "" if self.inside else data


@pytest.fixture
def run(tmp_path):
    return fake_run(tmp_path / "run")


def test_the_report_names_reward_held_out_gain_and_kl_against_its_target(run):
    page = Page(build_report(run).read_text("utf-8"))
    numbers = json.loads((run / "result.json").read_text())
    low, high = numbers["heldout_interval"]
    for part in (
        f"{numbers['reward_gain']:+.3g}", f"{numbers['heldout_gain']:+.3g} sd",
        f"[{low:+.3g}, {high:+.3g}]", f"{numbers['kl_nats_per_response']:.3g} of 6",
        "60 steps in 212 s", "literature calls this order the reverse KL",
    ):  # fmt: skip
        assert part in page.text


def test_the_page_asks_nobody_for_anything(run):
    page = Page(build_report(run).read_text("utf-8"))
    policy = next(v for t, n, v in page.attributes if t == "meta" and v and "default-src" in v)
    assert policy.startswith("default-src 'none'")
    assert not [a for a in page.attributes if a[1] in {"src", "href", "action", "srcset"}]
    assert page.tags.count("script") == 3  # plotly once, the figures, the three lines that draw
    assert "link" not in page.tags


def test_nothing_a_model_or_a_person_wrote_becomes_markup(tmp_path):
    payload = " ".join(PAYLOADS)
    config = f"steps: 60\nrun: {json.dumps(payload)}\n# {PAYLOADS[0]}\n"
    folder = fake_run(tmp_path / "<img src=y>", text=payload, config=config)
    text = build_report(folder).read_text("utf-8")
    page = Page(text)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert "<script>alert(1)" in page.text  # shown as text, several times
    assert "{{ 7 * 7 }}" in page.text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[31mred\\u202eabc" in page.text


def test_json_in_a_script_cannot_close_it():
    document = {"name": "</script><!--"}
    text = script_json(document)
    assert "<" not in text
    assert json.loads(text) == document


def test_a_report_of_a_run_that_died_in_the_middle_of_a_line_leaves_that_line_out(run):
    (run / "result.json").unlink()
    (run / "samples.jsonl").unlink()
    text = (run / "metrics.jsonl").read_text().split("\n")
    (run / "metrics.jsonl").write_text("\n".join(text[:7]) + '\n{"step": 8, "sco')
    page = Page(build_report(run).read_text("utf-8"))
    assert "7 of 60 steps so far; not finished" in page.text
    assert "not measured" in page.text  # no held-out check yet
    assert "No samples yet" in page.text


def test_a_report_before_the_first_step_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 4\n")
    page = Page(build_report(tmp_path).read_text("utf-8"))
    assert "No step yet" in page.text
    assert "script" not in page.tags


def test_the_report_replaces_the_old_one_whole(run):
    first = build_report(run).read_text("utf-8")
    assert build_report(run).read_text("utf-8") == first
    assert not list(run.glob("*.writing"))


def test_an_old_result_is_not_shown_for_a_run_that_went_on(run):
    noise = random.Random(0)
    append_jsonl(run / "metrics.jsonl", [metrics_row(61, 70, noise)])
    assert "not finished" in Page(build_report(run).read_text("utf-8")).text


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "samples.jsonl", "result.json"])
def test_a_damaged_file_is_named(run, name):
    (run / name).write_text("{broken\n")
    with pytest.raises(DataError, match=re.escape(name)):
        build_report(run)


ROW = '{"step": 1, "kl/ref_nats_per_response": 1.0%s}'
SAMPLE = '{"step": 1, "prompt": "a", "reference": "b", "response": "c", "score": 1, %s}'
BAD_ROWS = {
    "empty metrics": ("metrics.jsonl", "{}", "step: got nothing"),
    "text for a step": ("metrics.jsonl", '{"step": "x"}', "step: got 'x'"),
    "a list": ("metrics.jsonl", "[]", "not a JSON object"),
    "pairs": ("metrics.jsonl", '[["step", 1]]', "not a JSON object"),
    "no KL": ("metrics.jsonl", '{"step": 1}', "kl/ref_nats_per_response: got nothing"),
    "text for a number": ("metrics.jsonl", ROW % ', "score/mean": "x"', "score/mean: got 'x'"),
    "NaN": ("metrics.jsonl", ROW % ', "score/mean": NaN', "score/mean: got nan"),
    "infinite": ("metrics.jsonl", ROW % ', "score/mean": 1e999', "score/mean: got inf"),
    "too large": ("metrics.jsonl", ROW % f', "score/mean": 1{"0" * 400}', "score/mean: got 1000"),
    "true": ("metrics.jsonl", ROW % ', "score/mean": true', "score/mean: got True"),
    "nested": ("metrics.jsonl", "[" * 100_000, "not a JSON object"),
    "empty ledger": ("ledger.jsonl", "{}", "step: got nothing"),
    "null in the ledger": ("ledger.jsonl", '{"step": 1, "nats": null}', "nats: got None"),
    "empty samples": ("samples.jsonl", "{}", "step: got nothing"),
    "half a sample": ("samples.jsonl", SAMPLE % '"kl": []', "reference_score: got nothing"),
    "KL of text": (
        "samples.jsonl", SAMPLE % '"reference_score": 0, "kl": ["x"]', "kl: got ['x']"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "row", "says"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_row_that_is_none_of_ours_is_named_with_its_line(run, name, row, says):
    lines = (run / name).read_text().split("\n")
    (run / name).write_text("\n".join([lines[0], row, *lines[1:]]))
    with pytest.raises(DataError, match=re.escape(f"{name}:2: {says}")) as caught:
        build_report(run)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.yaml", b"\xff\x00\x01"),
        ("config.yaml", b"steps: 1e400"),
        ("config.yaml", b"steps: -1"),
        ("config.yaml", b"[1, 2]"),
        ("config.yaml", b"[" * 5000),
        ("result.json", b"\xff"),
        ("result.json", b'{"steps": 60}'),
        ("environment.json", b"[1]"),
        ("environment.json", b"[" * 100_000),
    ],
)
def test_settings_and_results_that_are_damaged_are_named(run, name, data):
    (run / name).write_bytes(data)
    with pytest.raises(DataError, match=re.escape(name)):
        build_report(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"config\.yaml"):
        build_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_line_separators_inside_a_text_do_not_end_a_row(tmp_path):
    append_jsonl(tmp_path / "rows.jsonl", [{"text": "a\u2028b\x85c"}, {"text": "d"}])
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"text": "a\u2028b\x85c"}, {"text": "d"}]


def test_the_summary_averages_kl_over_the_last_third_and_takes_the_last_check():
    rows = [{"kl/ref_nats_per_response": float(k), "controller/kl_target": None} for k in range(9)]
    rows[4] |= {"heldout/score_gain": 0.5}
    numbers = summary(rows)
    assert numbers["kl_nats_per_response"] == pytest.approx(7.0, rel=1e-12, abs=0)
    line = headline(numbers)
    assert line == "reward +0.5; held-out judge not measured; KL 7 nats per response (no target)"


def test_text_is_kept_but_what_moves_a_cursor_is_spelled_out():
    assert visible("naïve 漢字 👩‍🚀\n\tok") == "naïve 漢字 👩‍🚀\n\tok"
    assert visible("\x1b]0;t\x07\r\x9b\u2066") == "\\x1b]0;t\\x07\\x0d\\x9b\\u2066"
