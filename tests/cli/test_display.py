"""The display counts, estimates and shows; text from a model is never markup or an escape."""

import io

from rich.console import Console

from tether.cli import display as shown
from tether.cli.display import LiveDisplay, PlainDisplay, StepTable, duration
from tether.observer import SilentObserver


def row(step, **more):
    return {
        "step": step, "score/mean": 1.25, "kl/ref_nats_per_response": 5.5,
        "controller/kl_coef": 0.125, "controller/kl_target": 6.0,
        "rollout/entropy_nats_per_token": 3.25, "time/step_s": 2.0,
        "rollout/response_tokens_mean": 24.5, "rollout/tokens_per_second": 812.3,
    } | more  # fmt: skip


def test_a_step_shows_every_number_and_the_time_left():
    table = StepTable()
    table.cells(row(1), 10)
    cells = table.cells(row(2, **{"time/heldout_s": 6.0, "heldout/judge_gain": 0.5}), 10)
    assert cells == {
        "step": "2/10", "ETA": "40 s", "reward": "1.25", "held-out gain": "+0.5",
        "KL nats": "5.5 of 6", "β": "0.125", "entropy": "3.25", "length": "24.5", "tokens/s": "812",
    }  # fmt: skip
    later = table.cells(row(3, **{"controller/kl_target": None}), 10)
    assert later["held-out gain"] == "+0.5"  # the last check stays
    assert later["KL nats"] == "5.5"


def test_durations_are_said_as_people_say_them():
    assert [duration(s) for s in (0.4, 59.4, 59.6, 185, 7440)] == [
        "0 s", "59 s", "1 min 00 s", "3 min 05 s", "2 h 04 min",
    ]  # fmt: skip


def test_without_a_terminal_there_is_one_line_a_step():
    stream = io.StringIO()
    plain = PlainDisplay(Console(file=stream))
    plain.stage("loading \x1b[2J", None)
    plain.note("β₀ = 0.1")
    plain.step(row(1), 10)
    plain.sample("a\nprompt", "before", "after \x1b[31m")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading \\x1b[2J"
    assert lines[1] == "β₀ = 0.1"
    assert lines[2].startswith("step 1/10  ETA 18 s  reward 1.25")
    assert [line.split(":")[0].strip() for line in lines[3:]] == ["prompt", "reference", "policy"]
    assert "\x1b" not in stream.getvalue()


def test_a_long_stage_says_how_far_it_is_now_and_then(monkeypatch):
    clock = iter([0.0, 0.0, 1.0, 6.0, 7.0])
    monkeypatch.setattr(shown.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    plain = PlainDisplay(Console(file=stream))
    plain.stage("reading", 100)
    plain.advance(10)
    plain.advance(20)
    plain.advance(10)
    assert stream.getvalue().splitlines() == ["reading", "reading: 30/100, ETA 14 s"]


def live_text(act):
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    live = LiveDisplay(console)
    act(live)
    console.print(live.render())
    return console.file.getvalue()


def test_the_live_table_keeps_the_last_rows_and_a_sample_as_text():
    def act(live):
        for step in range(1, 10):
            live.step(row(step), 40)
        live.sample("[bold]p[/bold]", "r", "[link=x]y[/link] \x1b]0;title\x07")

    text = live_text(act)
    assert "9/40" in text
    assert "4/40" in text
    assert "3/40" not in text
    assert "[bold]p[/bold]" in text
    assert "[link=x]y[/link] \\x1b]0;title\\x07" in text
    assert "\x1b]" not in text


def test_the_live_display_names_the_stage_before_the_first_step():
    def act(live):
        live.stage("fitting the reward model", 4)
        live.advance(2)

    assert "fitting the reward model … 2/4, ETA" in live_text(act)


def test_the_silent_observer_takes_what_the_others_take():
    silent = SilentObserver()
    silent.stage("x", None)
    silent.advance()
    silent.note("x")
    silent.step({}, 1)
    silent.sample("p", "r", "s")
