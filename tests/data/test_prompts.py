"""Prompts are encoded as written, divided by their text and visited as epochs of permutations."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tether.config import PromptsConfig
from tether.data.prompts import Prompt, load_prompts, prompt_batch, step_prompts
from tether.errors import ConfigError, DataError

TEMPLATE = (
    "{% for m in messages %}<s> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}go{% endif %}"
)


def tokenizer(*, adds_eos=False, template=None):
    names = ["<s>", "</s>", "<unk>", "go", *(f"w{n}" for n in range(200))]
    vocabulary = {name: number for number, name in enumerate(names)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = "<s> $A </s>" if adds_eos else "<s> $A"
    core.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def word(number):
    return number + 4


@pytest.fixture
def load(tmp_path):
    def run(values, *, seed=0, tok=None, **options):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": value}) + "\n" for value in values))
        config = PromptsConfig(source=str(path), **{"heldout": 2, **options})
        return load_prompts(config, tok or tokenizer(), seed)

    return run


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_texts_are_encoded_with_their_start_and_without_an_added_end(load):
    values = ["w1 w2", "w3", "w4"]
    expected = {"w1 w2": (0, word(1), word(2)), "w3": (0, word(3)), "w4": (0, word(4))}
    for adds_eos in (False, True):
        found = load(values, tok=tokenizer(adds_eos=adds_eos))
        assert {p.text: p.tokens for p in (*found.train, *found.heldout)} == expected


def test_an_end_token_written_in_the_text_stays(load):
    found = load(["w1 </s>", "w2", "w3"])
    tokens = {p.text: p.tokens for p in (*found.train, *found.heldout)}
    assert tokens["w1 </s>"] == (0, word(1), 1)


def test_messages_go_through_the_template_and_get_no_second_start(load):
    values = [[{"role": "user", "content": f"w{n}"}] for n in range(3)]
    found = load(values, tok=tokenizer(template=TEMPLATE))
    tokens = {p.text: p.tokens for p in (*found.train, *found.heldout)}
    assert tokens["<s> w1 go"] == (0, word(1), 3)


def test_messages_without_a_template_are_an_error(load):
    with pytest.raises(DataError, match="no chat template"):
        load([[{"role": "user", "content": "w1"}]])


def test_first_words_cuts_and_leaves_out_and_counts_the_short_ones(load, caplog):
    caplog.set_level("INFO", "tether.data.prompts")
    found = load(["w1 w2 w3", "w4  w5\tw6", "w7 w8", "w9", "w10 w11 w12"], first_words=2)
    assert sorted(texts([*found.train, *found.heldout])) == ["w1 w2", "w10 w11", "w4 w5"]
    assert "left out: 0 repeated, 2 shorter than first_words + 1" in caplog.text
    whole = load(["w7 w8", "w9", "w1"])
    assert sorted(texts([*whole.train, *whole.heldout])) == ["w1", "w7 w8", "w9"]


def test_first_words_of_messages_is_an_error(load):
    with pytest.raises(DataError, match=r"prompts\.first_words: got 2"):
        load([[{"role": "user", "content": "w1"}]], first_words=2, tok=tokenizer(template=TEMPLATE))


def test_the_division_depends_on_the_texts_and_the_seed_and_not_on_the_rows(load):
    values = [f"w{n}" for n in range(40)]
    found = load(values, heldout=10)
    assert load([*reversed(values), *values], heldout=10) == found
    assert len(found.heldout) == 10
    assert len(found.train) == 30
    assert not set(texts(found.train)) & set(texts(found.heldout))
    assert set(texts(found.heldout)) != set(values[:10])
    assert set(texts(load(values, heldout=10, seed=1).heldout)) != set(texts(found.heldout))


@pytest.mark.parametrize(
    ("values", "options", "part"),
    [
        (["w1", "w2", "w2"], {}, "prompts.heldout: got 2, .*only 2 different"),
        (["w1", "w2 w3 w4"], {"max_tokens": 3}, "prompts.max_tokens: got 3, but row 2 has 4 tok"),
        (["w1", " "], {}, "row 2, 'prompt' is empty"),
        (["w1", 5], {}, "row 2, 'prompt': got int"),
        (["w1"], {"column": "prompts"}, "no column 'prompts'.*did you mean 'prompt'"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(load, values, options, part):
    with pytest.raises(DataError, match=part):
        load(values, **options)


def test_the_default_recipe_has_prompts_enough():
    found = load_prompts(PromptsConfig(), tokenizer(), 0)
    assert (len(found.train), len(found.heldout)) == (64, 64)


def test_a_batch_is_padded_on_the_left_and_masked_by_length():
    prompts = [Prompt(text="a", tokens=(5, 1)), Prompt(text="b", tokens=(7, 8, 9))]
    batch = prompt_batch(prompts, 1)
    assert batch.prompt_tokens.tolist() == [[1, 5, 1], [7, 8, 9]]
    assert batch.prompt_mask.tolist() == [[False, True, True], [True, True, True]]
    assert batch.texts == ("a", "b")
    assert batch.prompt_tokens.dtype == torch.long


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 9), per_step=st.integers(1, 12), seed=st.integers(0, 3))
def test_each_epoch_visits_every_prompt_once_across_batch_borders(count, per_step, seed):
    train = [Prompt(text=str(n), tokens=(n,)) for n in range(count)]
    steps = range(1, 2 + 3 * count // per_step)
    order = [p for s in steps for p in step_prompts(train, step=s, per_step=per_step, seed=seed)]
    for epoch in range(len(order) // count):
        assert sorted(texts(order[epoch * count : (epoch + 1) * count])) == sorted(texts(train))


def test_epochs_and_seeds_have_their_own_order_and_a_step_repeats_itself():
    train = [Prompt(text=str(n), tokens=(n,)) for n in range(50)]
    orders = {
        tuple(texts(step_prompts(train, step=step, per_step=50, seed=seed)))
        for step in (1, 2, 3)
        for seed in (0, 1, 2)
    }
    assert len(orders) == 9
    again = step_prompts(train, step=3, per_step=7, seed=5)
    assert step_prompts(train, step=3, per_step=7, seed=5) == again


def test_steps_are_counted_from_one():
    with pytest.raises(ConfigError, match="step: got 0"):
        step_prompts([Prompt(text="a", tokens=(1,))], step=0, per_step=1, seed=0)
