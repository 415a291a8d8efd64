"""Commands keep the contract: exit codes, one line for a mistake, nothing written or mixed."""

import json
import subprocess
import sys
import types

import pytest

from tether.cli import main
from tether.config import Recipe, RewardConfig
from tether.errors import TrainingDiverged
from tether.metrics import append_jsonl
from tether.recipe_text import recipe_yaml

RECIPE = "reward: {function: my:reward}\n"
RESULT = {
    "run": "r", "steps": 2, "seconds": 61.7, "reward_gain": 0.42, "heldout_gain": 0.31,
    "heldout_interval": [0.2, 0.42], "kl_nats_per_response": 5.87, "kl_target": 6.0,
    "kl_coef": 0.1, "stopped_by": "steps", "report": "r/report.html",
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a recipe in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """`tether.run` replaced by one that records its calls; the loop has its own tests."""
    recorded = []

    def train(recipe, run, observer, *, resume=False):
        sys.stdout.write("a reward function that prints")
        recorded.append((recipe, run, resume))
        if recipe.seed == 3:
            raise TrainingDiverged("score/mean is nan; the step is not recorded as a result")
        if recipe.seed == 4:
            run.mkdir()
            (run / "config.yaml").write_text("steps: 40")
            raise KeyboardInterrupt
        if recipe.seed == 5:
            raise RuntimeError("our own mistake")
        return RESULT

    monkeypatch.setitem(sys.modules, "tether.run", types.SimpleNamespace(train=train))
    return recorded


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def begun_run(folder, **options):
    folder.mkdir()
    recipe = Recipe(run=str(folder), reward=RewardConfig(function=("my:reward",)), **options)
    (folder / "config.yaml").write_text(recipe_yaml(recipe))
    return folder


MISTAKES = {
    "no recipe": (["train"], "RECIPE.yaml: got none"),
    "missing recipe": (["train", "none.yaml"], "none.yaml: cannot read the recipe"),
    "misspelt flag": (["train", "recipe.yaml", "--kl.taget", "6"], "did you mean kl.target?"),
    "recipe after flags": (["train", "--kl.target", "6", "recipe.yaml"], "the recipe comes first"),
    "wrong type": (["train", "recipe.yaml", "--steps", "many"], "it must be a whole number"),
    "target 0": (["train", "recipe.yaml", "--kl.target", "0"], "above 0 nats per response"),
    "no reward": (["train", "recipe.yaml", "--reward.function"], "reward: got 'no term'"),
    "existing run": (["train", "recipe.yaml", "--run", "full"], "exists and is not empty"),
    "run is a file": (["train", "recipe.yaml", "--run", "recipe.yaml"], "exists and is not"),
    "resume nothing": (["train", "--resume", "none"], "it must be a run folder"),
    "resume no value": (["train", "--resume"], "--resume: got no value"),
    "resume and an option": (
        ["train", "--resume", "full", "--kl.target", "3"],
        "not with --resume",
    ),
    "resume another recipe": (["train", "recipe.yaml", "--resume", "full"], "differ in seed"),
    "reward without data": (["fit-reward", "recipe.yaml"], "reward.fit: got ''"),
    "reward and resume": (["fit-reward", "recipe.yaml", "--resume", "full"], "not for fit-reward"),
    "unknown command": (["trian"], "unknown command 'trian'; did you mean train?"),
    "nothing like it": (["zzz"], "tether --help lists the commands"),
    "run under a file": (["train", "recipe.yaml", "--run", "recipe.yaml/x"], "cannot be written"),
    "run with a long name": (["train", "recipe.yaml", "--run", "n" * 300], "cannot be written"),
    "run nowhere": (
        ["fit-reward", "recipe.yaml", "--reward.fit", "x.csv", "--run", "/proc/x/y"],
        "cannot be written",
    ),
    "resume a long name": (["train", "--resume", "n" * 300], "cannot be read"),
    "report of a binary configuration": (["report", "binary"], "config.yaml: not the config"),
    "show of a binary configuration": (["show", "binary"], "config.yaml: not the configuration"),
    "report of nothing": (["report", "none"], "it must be a run folder"),
    "report without run": (["report"], "required: RUN; see tether report --help"),
    "show with a wrong option": (["show", "full", "--jsn"], "unrecognized arguments: --jsn"),
    "show before a sample": (["show", "full"], "has no samples yet"),
    "show none": (["show", "full", "--count", "0"], "--count: got 0"),
    "escapes in a name": (["train", "a\x1b[2J\nb.yaml"], "a\\x1b[2J b.yaml: cannot read"),
}


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_exit_code_2_and_nothing_is_written(
    here, calls, capsys, arguments, expected
):
    begun_run(here / "full", seed=1)
    (begun_run(here / "binary") / "config.yaml").write_bytes(b"\xff\x00\x01")
    before = files_in(here)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert files_in(here) == before
    assert not calls


@pytest.mark.parametrize("arguments", [["train", "recipe.yaml", "--kl.taget", "6"], ["trian"]])
def test_a_mistake_in_a_real_process_is_one_line_without_traceback(here, arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tether", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_waits_for_nothing_heavy(arguments):
    code = (
        "import sys, tether.cli\n"
        f"code = tether.cli.main({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'jinja2', 'plotly', 'tyro'} & set(sys.modules)\n"
        "sys.exit(code or (str(heavy) if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_train_prints_one_line_of_gains_and_where_the_report_is(here, calls, capsys):
    assert main(["train", "recipe.yaml", "--kl.target", "3", "--run", "out"]) == 0
    recipe, run, resume = calls[0]
    assert (recipe.kl.target, str(run), resume) == (3.0, "out", False)
    out, err = capsys.readouterr()
    assert out == (
        "reward +0.42; held-out judge +0.31 sd [+0.2, +0.42]; "
        "KL 5.87 of 6 nats per response; 62 s\nreport: r/report.html\n"
    )
    assert "a reward function that prints" in err


def test_json_is_all_that_is_on_stdout(here, calls, capsys):
    assert main(["train", "--json", "recipe.yaml"]) == 0
    assert json.loads(capsys.readouterr().out) == RESULT
    assert str(calls[0][1]).startswith("runs/recipe-")


NOISY = """
import ctypes, os, subprocess, sys, types
import tether.cli
def train(recipe, run, observer, *, resume=False):
    print("by print")
    sys.__stdout__.write("by the original stream ")
    os.write(1, b"by descriptor ")
    subprocess.run(["echo", "by a process"], check=True)
    ctypes.CDLL(None).puts(b"by a library")
    return {"run": "r"}
sys.modules["tether.run"] = types.SimpleNamespace(train=train)
sys.exit(tether.cli.main(["train", "recipe.yaml", "--json"]))
"""


def test_nothing_that_a_reward_writes_gets_between_stdout_and_the_json(here):
    done = subprocess.run(
        [sys.executable, "-c", NOISY], capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"run": "r"})
    for part in ("print", "the original stream", "descriptor", "a process", "a library"):
        assert f"by {part}" in done.stderr


def test_resume_takes_the_runs_own_recipe_and_more_steps(here, calls):
    begun_run(here / "full", seed=0, steps=2)
    (here / "recipe.yaml").write_text(RECIPE + "steps: 2\n")
    assert main(["train", "--resume", "full", "--steps", "9"]) == 0
    assert main(["train", "recipe.yaml", "--resume=full"]) == 0  # the same recipe changes nothing
    assert [(c[0].steps, str(c[1]), c[2]) for c in calls] == [(9, "full", True), (2, "full", True)]


def test_exit_codes_tell_a_gate_an_interrupt_and_our_own_mistake_apart(here, calls, capsys):
    assert main(["train", "recipe.yaml", "--seed", "3"]) == 3
    assert capsys.readouterr().err.endswith(
        "error: score/mean is nan; the step is not recorded as a result\n"
    )
    assert main(["train", "recipe.yaml", "--seed", "4", "--run", "my run"]) == 130
    assert "continue with: tether train --resume 'my run'\n" in capsys.readouterr().err
    assert main(["train", "recipe.yaml", "--seed", "5"]) == 1
    assert "RuntimeError: our own mistake" in capsys.readouterr().err


def test_fit_reward_says_how_often_it_agrees_with_people(here, monkeypatch, capsys):
    found = {"path": "out", "accuracy": 0.712, "accuracy_interval": [0.69, 0.73], "pairs": 400}
    module = types.SimpleNamespace(fit_reward=lambda recipe, folder, observer: found)
    monkeypatch.setitem(sys.modules, "tether.prepare", module)
    arguments = ["fit-reward", "recipe.yaml", "--reward.fit", "pairs.jsonl", "--run", "out"]
    assert main(arguments) == 0
    assert "71.2 % of 400 held-out pairs as people did [69.0, 73.0]" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def sample(step, response):
    return {
        "step": step, "prompt": "The [bold]plot[/bold]", "response": response,
        "reference": "was thin", "ids": [1], "score": 1.0, "reference_score": 0.5, "kl": [0.2],
        "kl_nats": 0.2,
    }  # fmt: skip


def test_show_prints_the_newest_samples_as_text(here, capsys):
    run = begun_run(here / "full")
    rows = [sample(5, "old"), sample(10, "[red]new[/red] \x1b[31m"), sample(10, "hidden")]
    append_jsonl(run / "samples.jsonl", rows)
    assert main(["show", "full", "--count", "1"]) == 0
    out = capsys.readouterr().out
    assert "The [bold]plot[/bold]" in out
    assert "[red]new[/red] \\x1b[31m" in out
    assert "1 of 2 samples" in out
    assert not {"old", "hidden", "\x1b"} & set(out.split() + list(out))
    assert main(["show", "full", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "full", "samples": rows[1:]}


def test_report_writes_the_page_and_says_where(here, capsys):
    begun_run(here / "full")
    assert main(["report", "full"]) == 0
    assert capsys.readouterr().out == "report: full/report.html\n"
    assert main(["report", "full", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": "full/report.html"}
    assert "<html" in (here / "full" / "report.html").read_text("utf-8")
