"""A resumed run finds what it began with, or one line says what is damaged, gone or changed."""

# ruff: noqa: F811  (fixtures are arguments)

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import tiny_tokenizer
from test_run import VOCAB, SilentObserver, Stopper, folder, kill, recipe  # noqa: F401

from tether.cli import main
from tether.config import RewardConfig
from tether.errors import CheckpointError, ConfigError, DataError, TetherError
from tether.metrics import read_jsonl
from tether.recipe_text import recipe_yaml
from tether.run import train
from tether.run_folder import run_lock


class Notes(SilentObserver):
    """Keeps what is said."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folder of a run that was killed in its last step, filled by the first test that asks."""
    return tmp_path_factory.mktemp("killed") / "run"


@pytest.fixture
def run(recipe, killed, tmp_path):
    """A run of 4 steps with checkpoints at 0 and 2, killed after step 3."""
    if not killed.exists():
        with pytest.raises(RuntimeError, match="killed"):
            train(replace(recipe, run=str(killed)), killed, Stopper(3, kill))
    shutil.copytree(killed, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(recipe_yaml(recipe))
    return tmp_path / "run"


@pytest.fixture
def put_back(folder):
    """Whatever a test does to the folder is undone after it."""
    shutil.copytree(folder, folder.with_name("kept"))
    yield folder
    shutil.rmtree(folder)
    folder.with_name("kept").rename(folder)


def refused(recipe, run, error=CheckpointError) -> str:
    """The message, after a refusal that changed nothing in the run folder."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(error) as caught:
        train(recipe, run, SilentObserver(), resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite_prompts(folder):
    rows = [{"prompt": f"w{j} w{i}"} for i in range(3, 10) for j in range(10, 13)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(r) for r in rows))


def give_a_template(folder):
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder / "model")


def edit_reward(folder):
    with (folder / "toy_rewards.py").open("a") as file:
        file.write("LIKES = 'w6'\n")


CHANGES = {
    "prompts": (rewrite_prompts, "held-out prompts, training prompts"),
    "tokenizer": (give_a_template, "began: tokenizer"),
    "reward function": (edit_reward, "source of toy_rewards:many_w5"),
}


@pytest.mark.parametrize(("change", "named"), CHANGES.values(), ids=CHANGES.keys())
def test_resume_refuses_what_changed_outside_the_run_folder(recipe, run, put_back, change, named):
    change(put_back)
    message = refused(recipe, run)
    assert named in message
    assert "put the original back" in message


def test_resume_refuses_another_reward_model_or_judge_than_it_began_with(recipe, tmp_path, folder):
    rows = [
        {"text": f"w{i} w{j} w{k}", "score": i} for i in range(3, 9) for j in range(9) for k in range(4)
    ]  # fmt: skip
    (folder / "rated.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    fit = RewardConfig(
        fit=str(folder / "rated.jsonl"), layer=1, hidden_units=0, epochs=3, max_texts=40
    )
    ready = replace(recipe, reward=fit)
    for name in ("first", "second"):
        seeded = replace(ready, seed=ready.seed + (name == "second"))
        with pytest.raises(RuntimeError, match="killed"):
            train(seeded, tmp_path / name, Stopper(2, kill))
    given = replace(recipe, reward=RewardConfig(model=str(tmp_path / "first" / "reward_model")))
    with pytest.raises(RuntimeError, match="killed"):
        train(given, tmp_path / "given", Stopper(2, kill))
    train(given, tmp_path / "given", SilentObserver(), resume=True)  # unchanged, it goes on
    for part in ("reward_model", "judge"):
        shutil.rmtree(tmp_path / "first" / part)
        shutil.copytree(tmp_path / "second" / part, tmp_path / "first" / part)
    assert "began: reward model, judge;" in refused(ready, tmp_path / "first")
    assert "began: reward model;" in refused(given, tmp_path / "given")


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def drop_field(path):
    state = json.loads(path.read_text())
    del state["controller"]["multiplier"]
    path.write_text(json.dumps(state))


NEWEST = "checkpoints/step-000002"
DAMAGES = {
    "weights cut": (f"{NEWEST}/weights.safetensors", cut),
    "weights flipped": (f"{NEWEST}/weights.safetensors", flip),
    "optimizer cut": (f"{NEWEST}/optimizer.safetensors", cut),
    "optimizer gone": (f"{NEWEST}/optimizer.safetensors", lambda path: path.unlink()),
    "state cut": (f"{NEWEST}/state.json", cut),
    "state binary": (f"{NEWEST}/state.json", lambda path: path.write_bytes(b"\xff\x00")),
    "state a list": (f"{NEWEST}/state.json", lambda path: path.write_text("[1]")),
    "state nested": (f"{NEWEST}/state.json", lambda path: path.write_text("[" * 100_000)),
    "state without a field": (f"{NEWEST}/state.json", drop_field),
    "reference cut": ("reference.json", cut),
    "reference gone": ("reference.json", lambda path: path.unlink()),
    "reference empty": ("reference.json", lambda path: path.write_text("{}")),
    "environment gone": ("environment.json", lambda path: path.unlink()),
    "environment cut": ("environment.json", cut),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES.keys())
def test_resume_names_what_is_damaged_and_falls_back_to_nothing(recipe, run, name, damage):
    damage(run / name)
    message = refused(recipe, run, TetherError)
    if name.startswith(NEWEST):
        assert f"{NEWEST}' is damaged" in message
        assert "remove that folder to continue from step-000000" in message
    else:
        assert name in message


def test_the_older_checkpoint_continues_once_the_damaged_one_is_removed(recipe, run):
    shutil.rmtree(run / NEWEST)
    assert train(recipe, run, SilentObserver(), resume=True)["steps"] == 4
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "samples.jsonl"])
def test_resume_refuses_a_log_that_is_shorter_than_its_checkpoint(recipe, run, name):
    lines = (run / name).read_text().splitlines(keepends=True)
    (run / name).write_text(lines[0])
    assert f"{name}' has 1 rows, but" in refused(recipe, run)


@pytest.mark.parametrize("row", ["{}", '{"step": "x"}', '{"step": NaN}', "[]", "7"])
def test_resume_names_a_row_that_is_none_of_ours(recipe, run, row):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], row, *lines[2:]]) + "\n")
    assert "metrics.jsonl:2: " in refused(recipe, run, DataError)


def test_a_run_killed_before_its_first_checkpoint_starts_anew(recipe, run):
    shutil.rmtree(run / "checkpoints")
    assert "3 steps in metrics.jsonl but no checkpoint" in refused(recipe, run)
    for name in ("metrics.jsonl", "ledger.jsonl", "samples.jsonl", "reference.json"):
        (run / name).unlink()
    notes = Notes()
    assert train(recipe, run, notes, resume=True)["steps"] == 4
    assert "stopped before its first checkpoint; it starts anew" in notes.said[0]
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_more_steps_are_written_down_said_and_taken(recipe, run):
    notes = Notes()
    train(replace(recipe, steps=6), run, notes, resume=True)
    said = next(text for text in notes.said if text.startswith("steps: "))
    assert said.startswith(
        "steps: 4 before, 6 now; the learning rate falls over all 6: step 3 takes"
    )
    assert "0.64 of the first step's instead of 0.4" in said
    assert "steps: 6\n" in (run / "config.yaml").read_text()
    assert "6 steps in" in (run / "report.html").read_text()
    rates = [row["policy/learning_rate"] for row in read_jsonl(run / "metrics.jsonl")]
    assert rates[-1] == pytest.approx(0.1 * recipe.ppo.learning_rate, rel=1e-9, abs=0)
    with pytest.raises(ConfigError, match="steps: got 3, but 6 are done"):
        train(replace(recipe, steps=3), run, SilentObserver(), resume=True)


@pytest.mark.parametrize("steps", ["1", "2"])
def test_steps_that_are_done_already_are_refused_before_anything_is_loaded(run, capsys, steps):
    assert main(["train", "--resume", str(run), "--steps", steps]) == 2
    assert (
        capsys.readouterr().err
        == f"error: --steps: got {steps}; it must be above the 2 steps done\n"
    )


def test_nothing_is_written_while_another_process_holds_the_run(recipe, run, tmp_path):
    for place, resume in ((run, True), (tmp_path / "new", False)):
        with run_lock(place):
            before = sorted(place.rglob("*"))
            with pytest.raises(CheckpointError, match="another process is writing"):
                train(recipe, place, SilentObserver(), resume=resume)
            assert sorted(place.rglob("*")) == before


def test_a_fresh_run_is_not_written_over_another_that_came_first(recipe, run):
    with pytest.raises(ConfigError, match="exists and is not empty"):
        train(recipe, run, SilentObserver())


def test_two_processes_at_once_are_one_run_and_one_refusal(recipe, folder):
    (folder / "slow.yaml").write_text(recipe_yaml(replace(recipe, run="both", steps=2)))
    command = [sys.executable, "-m", "tether", "train", "slow.yaml", "--json"]
    pair = [
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    ends = [(*process.communicate(), process.returncode) for process in pair]
    assert sorted(code for *_, code in ends) == [0, 2]
    lost = next(err.decode() for _, err, code in ends if code == 2)
    assert "another process is writing" in lost or "not empty" in lost
    assert [row["step"] for row in read_jsonl(folder / "both" / "metrics.jsonl")] == [1, 2]
    shutil.rmtree(folder / "both")
