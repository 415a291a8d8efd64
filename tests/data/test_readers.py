"""Files of every format give the same rows, and a bad one is named in a line."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tether.data.builtin import GLASSLLM_PROMPTS, read_source
from tether.data.readers import read_rows, require_column
from tether.errors import DataError

ROWS = [{"prompt": "café", "n": "1"}, {"prompt": 'a, "quoted"\nline', "n": "2"}]


def write(path: Path, text: str) -> str:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def fails(source: str) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(source, "prompts.source")
    message = str(caught.value)
    assert message.startswith("prompts.source: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "A.JSONL"])
def test_json_lines_are_read_with_mark_crlf_and_blank_lines(tmp_path, name):
    lines = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    assert read_rows(write(tmp_path / name, "\ufeff" + lines + "\r\n"), "f") == ROWS


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
def test_a_json_list_is_read(tmp_path, name):
    text = " \n" + json.dumps(ROWS, indent=2)
    assert read_rows(write(tmp_path / name, text), "f") == ROWS


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_csv_is_read_with_quotes_and_line_breaks_inside_cells(tmp_path, name):
    text = '\ufeffprompt,n\r\ncafé,1\r\n\r\n"a, ""quoted""\nline",2\r\n'
    assert read_rows(write(tmp_path / name, text), "f") == ROWS


def test_parquet_is_read_with_lists_of_messages(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(str(tmp_path / "a.parquet"), "f") == rows


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path):
    text = '{"prompt": "a\u2028b\u0085c"}'
    assert read_rows(write(tmp_path / "a.jsonl", text), "f") == [{"prompt": "a\u2028b\u0085c"}]


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    write(tmp_path / "prompts.jsonl", "{}")
    message = fails(str(tmp_path / "promts.jsonl"))
    assert "no such file" in message
    assert "prompts.jsonl'" in message


def test_a_directory_and_what_is_no_file_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").mkdir()
    for name in (str(tmp_path), "prompts"):  # the second could be a hub name
        assert "it is a directory; name a file in it" in fails(name)
    assert "it is no regular file" in fails("/dev/null")


@pytest.mark.parametrize("name", ["n" * 300 + ".csv", "n" * 300, "~nobody-of-this-name/x.csv"])
def test_a_path_that_the_system_cannot_look_for_is_named(name):
    assert "it cannot be read: " in fails(name)


def test_a_whole_character_written_as_two_escapes_is_read(tmp_path):
    assert read_rows(write(tmp_path / "a.jsonl", '{"a": "\\ud83d\\ude00"}'), "f") == [{"a": "😀"}]


def test_a_misspelt_name_without_ending_is_told_that_it_was_taken_for_a_hub_name(
    tmp_path, monkeypatch, caplog
):
    def load(name, split):
        raise OSError("not on the hub")

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "prompts.jsonl", "{}")
    with caplog.at_level("INFO", logger="tether"):
        message = fails("prompts.json1")
    assert "so it is taken for a hub name" in caplog.text
    assert "no such file; did you mean 'prompts.jsonl'" in message
    assert "datasets hub name with a 'train' split it cannot be loaded (not on the hub)" in message


def test_a_missing_folder_is_named(tmp_path):
    assert "no folder" in fails(str(tmp_path / "no" / "x.jsonl"))


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.jsonl", "", "no rows"),
        ("a.csv", "prompt\n", "no rows"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"a": 1}\n7\n', "a.jsonl:2: got a int"),
        ("a.json", "[1]", "item 1: got a int"),
        ("a.json", "[1", "not JSON"),
        ("a.csv", "a,b\n1,2\n1\n", "a.csv:3: 1 cells, the header 2"),
        ("a.csv", 'a\n"open\n', "not CSV"),
        ("a.txt", "text", "must end in"),
        ("a.parquet", "text", "cannot be read"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "[" * 100_000, "a.jsonl:2: nested too deeply"),
        ("a.json", '[{"a": "[,"}, {"a": ' + "[" * 100_000, "a.json: item 2: nested too deeply"),
        ("a.jsonl", '{"a": 1}\n{"a": {"b": ["\\ud800"]}}\n', "a.jsonl:2: holds \\ud800, half of"),
        ("a.json", '[{"\\udfff": 1}]', "item 1: holds \\udfff, half of"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path, name, text, part):
    assert part in fails(write(tmp_path / name, text))


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    whole = gzip.compress(json.dumps({"a": "b" * 999}).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-9])
    assert "cannot be read" in fails(str(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "latin.csv").write_bytes("a\ncaf\xe9\n".encode("latin-1"))
    assert "not UTF-8" in fails(str(tmp_path / "latin.csv"))


def test_a_wrong_column_names_those_that_exist_and_the_nearest():
    with pytest.raises(
        DataError, match=r"row 2 .*'prompt'; it has promt, n; .*'promt'\?"
    ) as caught:
        require_column([{"prompt": "x"}, {"promt": "x", "n": 1}], "prompt", "prompts.column")
    assert str(caught.value).startswith("prompts.column: ")


def test_a_hub_name_is_loaded_and_its_failure_is_one_line(monkeypatch):
    def load(name, split):
        if name == "someone/rows" and split == "train":
            return ROWS
        raise OSError("cannot\nreach it")

    monkeypatch.setattr("datasets.load_dataset", load)
    assert read_rows("someone/rows", "f") == ROWS
    assert "cannot reach it" in fails("someone/else")


def test_built_in_prompts_are_rows_and_an_unknown_name_lists_them():
    rows = read_source("builtin:glassllm-prompts", "f")
    assert [row["prompt"] for row in rows] == list(GLASSLLM_PROMPTS)
    assert len(set(GLASSLLM_PROMPTS)) == 128
    with pytest.raises(DataError, match=r"f: .*did you mean 'builtin:glassllm-prompts'"):
        read_source("builtin:glasslm-prompt", "f")
