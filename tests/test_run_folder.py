"""One process a run folder, and no folder where nothing was written."""

import os
import subprocess
import sys

import pytest

from tether.errors import CheckpointError, ConfigError
from tether.run_folder import checkpoints, require_empty, run_lock

HOLDER = """
import sys, time
from pathlib import Path
from tether.run_folder import run_lock
with run_lock(Path(sys.argv[1])):
    sys.stdout.write("held\\n")
    sys.stdout.flush()
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds a run folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_stale_lock(holder, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match="another process is writing to"), run_lock(run):
        pass
    assert (run / ".lock").exists()  # the refused one has not removed the holder's lock
    holder.kill()
    holder.wait()
    require_empty(run)  # what the killed process left is no run
    with run_lock(run) as locked:
        assert locked


def test_a_folder_in_which_nothing_was_written_is_gone_again_with_those_above_it(tmp_path):
    with run_lock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / ".lock").exists()
    assert not list(tmp_path.iterdir())
    (tmp_path / "own").mkdir()
    with run_lock(tmp_path / "own"):
        pass
    assert not list((tmp_path / "own").iterdir())
    with run_lock(tmp_path / "kept"):
        (tmp_path / "kept" / "config.yaml").write_text("steps: 1")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["config.yaml"]


def test_a_lock_file_that_was_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    path, calls = tmp_path / ".lock", []
    really = os.open

    def open_late(name, *options):
        file = really(name, *options)
        if not calls:
            path.unlink()  # its holder ends between the opening and the locking
        calls.append(name)
        return file

    monkeypatch.setattr(os, "open", open_late)
    with run_lock(tmp_path):
        assert len(calls) == 2
        with pytest.raises(CheckpointError), run_lock(tmp_path):
            pass


def test_without_file_locks_the_caller_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on a system that has none
    with run_lock(tmp_path / "run") as locked:
        assert not locked


@pytest.mark.parametrize("place", ["file/run", "n" * 300, "file", "/proc/run", "/proc/a/b", "a\0b"])
def test_a_place_that_cannot_be_written_is_named_and_left_alone(tmp_path, place):
    (tmp_path / "file").write_text("text")
    with (
        pytest.raises(ConfigError, match=r"^run: got .*--run") as caught,
        run_lock(tmp_path / place),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_new_run_wants_an_empty_folder(tmp_path):
    require_empty(tmp_path / "absent")
    (tmp_path / ".lock").touch()
    (tmp_path / "config.yaml.writing").touch()
    require_empty(tmp_path)
    (tmp_path / "notes.txt").touch()
    for taken in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match="exists and is not empty"):
            require_empty(taken)


def test_checkpoints_are_in_the_order_of_their_numbers(tmp_path):
    names = ["step-1000000", "step-000002", "step-999999"]
    for name in [*names, "step-000003 (copy)", "step-x", ".writing-000005"]:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in checkpoints(tmp_path)] == [names[1], names[2], names[0]]
