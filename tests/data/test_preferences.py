"""Preference pairs come out as three strings whatever shape the answers had."""

from pathlib import Path

import pytest

from tether.data.preferences import Preference, load_preferences
from tether.data.readers import read_rows
from tether.errors import DataError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
USER = {"role": "user", "content": "Q"}
SYSTEM = {"role": "system", "content": "S"}
PAIR = Preference(prompt="<user>Q<assistant>", chosen="good", rejected="bad")


def render(messages):
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def answer(text):
    return {"role": "assistant", "content": text}


def load(*rows):
    return load_preferences([dict(row) for row in rows], "reward.fit", render)


def row(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    "given",
    [
        row([USER], "good", "bad"),
        row([USER], [answer("good")], [answer("bad")]),
        row([USER], [USER, answer("good")], [USER, answer("bad")]),
        row("Q", [answer("good")], [answer("bad")]),
        row("Q", [USER, answer("good")], [USER, answer("bad")]),
    ],
)
def test_messages_alone_or_after_their_prompt_give_the_same_pair(given):
    assert load(given) == [PAIR]


def test_a_system_message_in_the_answers_lead_belongs_to_the_prompt():
    given = row("Q", [SYSTEM, USER, answer("good")], [SYSTEM, USER, answer("bad")])
    assert load(given)[0].prompt == "<system>S<user>Q<assistant>"


def test_a_string_prompt_is_taken_off_where_every_answer_repeats_it():
    rows = row("Q: a? ", "Q: a? yes", "Q: a? no"), row("Q: b? ", "Q: b? no", "Q: b? yes")
    assert [(p.prompt, p.chosen, p.rejected) for p in load(*rows)] == [
        ("Q: a? ", "yes", "no"),
        ("Q: b? ", "no", "yes"),
    ]


def test_an_answer_that_happens_to_begin_with_its_prompt_is_left_whole():
    rows = row("The", "The dog", "The cat"), row("A", "boy", "girl")
    assert [p.chosen for p in load(*rows)] == ["The dog", "boy"]


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (row("Q", "same", "same"), "row 2: chosen and rejected are the same"),
        (row("Q", " ", "bad"), "row 2, 'chosen' is empty"),
        (row("Q", "good", ""), "row 2, 'rejected' is empty"),
        (row("", "good", "bad"), "row 2, 'prompt' is empty"),
        (row([], "good", "bad"), "row 2, 'prompt': got an empty list"),
        (row(3, "good", "bad"), "row 2, 'prompt': got int"),
        (row([{"from": "a", "value": "b"}], "good", "bad"), "row 2, 'prompt': .*from, value"),
        (row([USER], [SYSTEM, answer("a")], [SYSTEM, answer("b")]), "row 2, 'chosen': its mess"),
        (row([USER], [USER], [answer("b")]), "row 2, 'chosen': the last role is 'user'"),
        (row("Q", [USER, answer("a")], [SYSTEM, USER, answer("b")]), "row 2: .* different prom"),
        ({"prompt": "Q", "chosen": "a"}, "row 2 has no column 'rejected'"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(bad, part):
    with pytest.raises(DataError, match=part):
        load(row("P", "good", "bad"), bad)


def test_a_template_that_refuses_a_prompt_is_a_data_error_of_that_row():
    def refuse(messages):
        raise RuntimeError("roles must\nalternate")

    with pytest.raises(DataError, match=r"f: row 1: the chat template .*: roles must alternate"):
        load_preferences([row([USER], "a", "b")], "f", refuse)


@pytest.mark.parametrize(
    ("name", "pairs", "prompts"),
    [("fgrlhf-qa-dev.jsonl.gz", 2616, 500), ("hh-harmless-test.jsonl.gz", 2303, 2300)],
)
def test_public_preference_files_are_read_whole(name, pairs, prompts):
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not here")
    loaded = load_preferences(read_rows(str(SHARED / name), "f"), "f", render)
    # Counts alone in the assertion: a failure must not print the texts.
    assert len(loaded) == pairs
    count = len({pair.prompt for pair in loaded})
    assert count >= prompts * 0.9
    wrong = sum(not pair.prompt.endswith("<assistant>") for pair in loaded)
    assert wrong == 0
