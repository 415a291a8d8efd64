"""A recipe file and flags become one recipe; what is wrong is one line that says where."""

from dataclasses import fields, replace
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.cli.options import load_recipe
from tether.cli.schema import help_options, options
from tether.config import Recipe
from tether.errors import ConfigError
from tether.recipe_text import recipe_yaml

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["no", "on", "null", "~", "1e-5", "-x", "--kl.target"]
)
POSITIVE = st.floats(min_value=1e-8, max_value=1e8)


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(tmp_path, text, *flags):
    return load_recipe(write(tmp_path, text), list(flags))


@st.composite
def recipes(draw):
    """Valid recipes with values in every kind of field."""
    base = Recipe()
    function = st.builds("{}:{}".format, st.text("abc_\u2028 '\"#{[", min_size=1), TEXTS)
    names = draw(st.lists(function.filter(lambda f: not f.startswith("-")), max_size=3))
    weights = draw(
        st.just([]) | st.lists(st.floats(-9, 9), min_size=len(names), max_size=len(names))
    )
    kl = replace(
        base.kl, target=draw(POSITIVE), rate=draw(POSITIVE),
        coef=draw(st.none() | st.floats(base.kl.coef_min, base.kl.coef_max)),
    )  # fmt: skip
    return replace(
        base, run=draw(TEXTS), steps=draw(st.integers(1, 10**9)), seed=draw(st.integers(0, 2**40)),
        device=draw(st.sampled_from(["auto", "cpu", "cuda"])), kl=kl,
        model=replace(base.model, name=draw(TEXTS), trust_remote_code=draw(st.booleans())),
        reward=replace(base.reward, function=tuple(names), weights=tuple(weights)),
        critic=replace(base.critic, value_clip=draw(st.none() | POSITIVE)),
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(recipe=recipes())
def test_a_written_recipe_is_read_back_equal(recipe, tmp_path_factory):
    assert load(tmp_path_factory.mktemp("recipe"), recipe_yaml(recipe)) == recipe


def test_yaml_words_and_numbers_mean_what_a_reader_thinks(tmp_path):
    text = """
run: no
model: {name: on, trust-remote-code: True}
ppo:
  learning_rate: 5e-6
kl: {coef: ~, rate: .5}
reward.function: my:reward
critic:
"""
    recipe = load(tmp_path, text)
    assert (recipe.run, recipe.model.name, recipe.model.trust_remote_code) == ("no", "on", True)
    assert recipe.ppo.learning_rate == 5e-6
    assert recipe.kl.coef is None
    assert recipe.kl.rate == 0.5
    assert recipe.reward.function == ("my:reward",)


REPEATED = ["--kl.target=1", "--reward.function", "a:b", "c:d", "--kl.target=7"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--kl.target", "7", "--critic.train-trunk", "true", "--reward.function", "a:b", "c:d"],
        ["--kl.target=7", "--critic.train_trunk=True", "--reward.function=a:b", "c:d"],
        [*REPEATED, "--critic.train-trunk", "True"],
    ],
)
def test_flags_win_over_the_file_in_either_spelling(tmp_path, flags):
    recipe = load(tmp_path, "kl: {target: 3, coef: 0.5}\nseed: 4", *flags, "--kl.coef", "none")
    assert (recipe.kl.target, recipe.kl.coef, recipe.seed) == (7, None, 4)
    assert recipe.critic.train_trunk
    assert recipe.reward.function == ("a:b", "c:d")


def test_a_flag_may_empty_a_list_and_take_a_value_with_a_hyphen(tmp_path):
    text = "reward: {function: [a:b, c:d], weights: [1, -2]}"
    assert load(tmp_path, text).reward.weights == (1, -2)
    assert load(tmp_path, text, "--reward.weights").reward.weights == ()
    assert load(tmp_path, text, "--reward.weights", "-1", "2").reward.weights == (-1, 2)
    assert load(tmp_path, text, "--run=-x").run == "-x"


BAD = {
    "empty": ("", 0, "empty recipe; set at least one option, e.g. kl: {target: 6}"),
    "only a comment": ("# kl\n", 0, "empty recipe"),
    "list root": ("- kl\n", 1, "got a list; a recipe is a mapping of options"),
    "scalar root": ("kl\n", 1, "got a single value; a recipe is a mapping"),
    "misspelt": ("\nkl:\n  taget: 6\n", 3, "unknown option kl.taget; did you mean kl.t"),
    "misspelt section": ("klx: {target: 6}", 1, "unknown option klx; did you mean kl?"),
    "section left out": ("target: 6", 1, "unknown option target; did you mean kl.t"),
    "nothing near": ("zzzz: 6", 1, "unknown option zzzz; tether train --help lists"),
    "empty name": ("'': 6", 1, "unknown option '';"),
    "duplicate": ("seed: 1\nseed: 2\n", 2, "seed stands twice"),
    "duplicate section": ("kl: {rate: 1}\nkl: {target: 2}\n", 2, "kl stands twice"),
    "duplicate dotted": ("kl: {target: 1}\nkl.target: 2\n", 2, "kl.target is set twice"),
    "word for number": ("kl: {target: six}", 1, "kl.target: got 'six'; it must be a finite"),
    "infinite": ("kl: {target: inf}", 1, "kl.target: got 'inf'; it must be a finite"),
    "float for int": ("steps: 1e2", 1, "steps: got '1e2'; it must be a whole number"),
    "yes for true": ("critic.train_trunk: yes", 1, "critic.train_trunk: got 'yes'; it must"),
    "bad choice": ("device: gpu", 1, "device: got 'gpu'; it must be one of auto"),
    "null": ("run: null", 1, "run: got null; it must be text"),
    "nothing written": ("steps:", 1, "steps: got null; it must be a whole number"),
    "list for number": ("steps: [1, 2]", 1, "steps: got ['1', '2']; it must be a whole"),
    "mapping for number": ("steps: {a: 1}", 1, "steps: got a mapping; it must be a whole"),
    "nested list": ("reward: {weights: [[1]]}", 1, "reward.weights: got a list; it must be"),
    "flag in a list": ("reward: {function: ['--seed']}", 1, "reward.function: got ['--seed']"),
    "value for section": ("kl: 6", 1, "kl is a section; set options in it"),
    "anchor of itself": ("kl: &a {kl: *a}", 1, "unknown option kl.kl"),
    "python tag": ("run: !!python/name:os.system ''", 1, "run: "),
    "own tag": ("run: !secret x", 1, "run: got a single value; it must be text"),
    "merge key": ("<<: {seed: 1}", 1, "unknown option <<"),
    "no YAML": ("kl: {target: 6\nseed: 1", 2, "not YAML: "),
    "two documents": ("seed: 1\n---\nseed: 2", 2, "not YAML: "),
    "control character": ("run: \x07", 0, "not YAML: "),
    "nested deeply": ("[" * 5000, 0, "nested too deeply"),
    "out of range": ("kl: {target: 0}", None, "kl.target: got 0.0; it must be above 0"),
    "out of range, root": ("seed: -1", None, "seed: got -1; it must be 0 or above"),
    "seed of 64 bits": (f"seed: {2**63}", None, f"seed: got {2**63}; it must be at most"),
    "threads": ("threads: 5000", None, "threads: got 5000; it must be at most 4096"),
    "tokens": ("generation.max_new_tokens: 1099511627776", None, "generation.max_new_tokens: got"),
    "answers": ("generation.responses_per_prompt: 1073741824", None, "generation.responses_per"),
    "batch": (
        "{prompts: {per_step: 4096}, generation: {responses_per_prompt: 4096}}",
        None,
        "prompts.per_step × generation.responses_per_prompt: got 16777216; it must be 2 to",
    ),
    "prompts": ("prompts.per_step: 9999999999", None, "prompts.per_step: got 9999999999; it must"),
    "rank": (
        "model.lora_rank: 99999999",
        None,
        "model.lora_rank: got 99999999; it must be at most",
    ),
    "units": ("reward.hidden_units: 99999999", None, "reward.hidden_units: got 99999999; it must"),
    "critic": ("critic.hidden_units: 99999999", None, "critic.hidden_units: got 99999999; it must"),
    "epochs": ("ppo.epochs: 9999999999", None, "ppo.epochs: got 9999999999; it must be at most"),
}

IDLE = {
    "reward.layer": "3", "reward.pooling": "last", "reward.hidden_units": "0", "reward.gap": "2",
    "reward.trunk": "adapter", "reward.epochs": "3", "reward.max_texts": "99",
    "model.lora_rank": "2", "model.lora_alpha": "2", "model.lora_first_layer": "1",
    "kl.rate": "0.1", "kl.coef_min": "0.1", "kl.coef_max": "1",
}  # fmt: skip
NOT_FITTED = "{model: {trainable: full}, kl: {controller: fixed, coef: 0.2}, reward.model: folder}"
FITTED = "{model: {trainable: lora}, kl: {controller: target, coef: 0.2}, reward.fit: pairs.csv}"


@pytest.mark.parametrize(("name", "value"), IDLE.items(), ids=IDLE.keys())
def test_an_option_without_effect_is_refused_and_taken_where_it_has_one(tmp_path, name, value):
    default = options()[name].default
    load(tmp_path, NOT_FITTED, f"--{name}={default}")  # as a resolved recipe has it
    load(tmp_path, FITTED, f"--{name}={value}")
    with pytest.raises(ConfigError, match=rf"^{name}: got .* left at {default!r} unless "):
        load(tmp_path, NOT_FITTED, f"--{name}={value}")


def test_a_target_may_stay_where_the_controller_is_switched_off(tmp_path):
    assert load(tmp_path, NOT_FITTED, "--kl.target", "3").kl.target == 3


BAD_FLAGS = {
    "misspelt": (
        ["--kl.taget", "6"],
        "--kl.taget: unknown option kl.taget; did you mean kl.target?",
    ),
    "wrong type": (["--kl.target", "x"], "--kl.target: got 'x'; it must be a finite number"),
    "out of range": (
        ["--kl.target=-1"],
        "kl.target: got -1.0; it must be above 0 nats per response",
    ),
    "alone": (["--kl.target"], "--kl.target: got no value; it must be a finite number"),
    "before a flag": (["--run", "--seed", "2"], "--run: got no value; it must be text"),
    "too many values": (["--seed", "1", "2"], "unexpected argument '2'; the recipe comes first"),
    "bare dashes": (["--"], "--: unknown option ''; tether train --help lists the options"),
}


@pytest.mark.parametrize(("text", "line", "expected"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_one_line_that_says_where(tmp_path, capsys, text, line, expected):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path, [])
    place = "" if line is None else f"{path}:{line}: " if line else f"{path}: "
    assert str(error.value).startswith(place + expected), error.value
    assert "\n" not in str(error.value)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""  # tyro's box stays unseen


@pytest.mark.parametrize(("flags", "expected"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_a_wrong_flag_is_named_as_it_was_typed(tmp_path, flags, expected):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "seed: 1", *flags)
    assert str(error.value).startswith(expected), error.value


def test_a_missing_file_a_folder_and_bytes_are_refused(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(ConfigError, match=str(path)):
            load_recipe(str(path), [])


def test_help_names_every_option_with_type_default_and_unit():
    text = help_options()
    assert len(options()) == count_leaves(Recipe)
    for option in options().values():
        assert f"--{option.name.replace('_', '-')} {option.placeholder}  (default: " in text
        assert option.doc.split()[-1] in text
    assert (
        "--kl.target NUMBER  (default: 6.0)\n      Target of the target controller, nats per"
        in text
    )


def count_leaves(owner):
    """Fields that are not dataclasses themselves, counted without the code under test."""
    total = 0
    for item in fields(owner):
        plain = get_origin(item.type) or item.type in {int, float, str, bool} or get_args(item.type)
        total += 1 if plain or item.type is Literal else count_leaves(item.type)
    return total
