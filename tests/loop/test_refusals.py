"""What cannot be trained is refused before the first step, in one line that says why."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama, tiny_tokenizer

from tether.config import (
    GenerationConfig,
    HeldoutConfig,
    ModelConfig,
    PPOConfig,
    PromptsConfig,
    Recipe,
    RewardConfig,
)
from tether.errors import ConfigError, DataError, TrainingDiverged
from tether.metrics import read_jsonl
from tether.models.word_judge import WordJudge
from tether.observer import SilentObserver
from tether.rewards import load_function
from tether.run import train

VOCAB = 23
REWARDS = """
import sys
def some(prompts, responses): return [float(len(r)) for r in responses]
def tenth(prompts, responses): return [0.1 for _ in responses]
def huge(prompts, responses): return [1e300 * len(r) for r in responses]
def large(prompts, responses): return [1e30 * (1 + len(r)) for r in responses]
def same_huge(prompts, responses): return [1e30 for _ in responses]
def leaves(prompts, responses): sys.exit(0)
def lines(prompts, responses): raise ValueError("one\\ntwo")
calls = []
def later(prompts, responses):
    calls.append(1)
    return [float(len(r)) * (1e30 if len(calls) > 3 else 1) for r in responses]
"""
BROKEN = {
    "breaks": "raise RuntimeError('no licence\\nhere')",
    "typo": "def f(:\n",
    "valued": "raise ValueError('bad')",
    "exits": "import sys\nsys.exit(0)",
    "needs": "import no_such_package",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("work")
    tiny_llama(vocab=VOCAB).save_pretrained(place / "model")
    tiny_tokenizer(VOCAB).save_pretrained(place / "model")
    rows = [{"prompt": f"w{i} w{j}"} for i in range(3, 10) for j in range(10, 13)]
    (place / "prompts.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    (place / "scaled_rewards.py").write_text(REWARDS)
    for name, text in BROKEN.items():
        (place / f"{name}_on_import.py").write_text(text)
    return place


@pytest.fixture
def recipe(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return Recipe(
        steps=2,
        threads=1,
        device="cpu",
        model=ModelConfig(name=str(folder / "model"), lora_rank=4, lora_alpha=8.0),
        prompts=PromptsConfig(source=str(folder / "prompts.jsonl"), per_step=4, heldout=5),
        generation=GenerationConfig(max_new_tokens=6),
        reward=RewardConfig(function=("scaled_rewards:some",)),
        heldout=HeldoutConfig(every=2),
        ppo=PPOConfig(minibatches=2, learning_rate=5e-3),
    )


class Notes(SilentObserver):
    """Keeps what it was told."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("breaks_on_import:f", "RuntimeError: no licence here"),
        ("typo_on_import:f", "SyntaxError"),
        ("valued_on_import:f", "ValueError: bad"),
        ("exits_on_import:f", "SystemExit"),
        ("needs_on_import:f", "no_such_package"),
        (".rel:f", "TypeError"),
        (":f", "ValueError"),
        ("scaled_rewards:", "has no ''"),
        ("scaled_rewards:absent", "has no 'absent'"),
    ],
)
def test_a_reward_module_that_cannot_be_imported_is_named_with_its_reason(recipe, name, says):
    with pytest.raises(ConfigError, match=r"^reward\.function: got ") as caught:
        load_function(name)
    assert says in str(caught.value)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        ("leaves", DataError, r"leaves failed on a batch \(SystemExit: 0\)"),
        ("lines", DataError, "ValueError: one two"),
        ("huge", DataError, r"is \d.*e\+30\d; its scale must be within ±1e\+06"),
        ("large", DataError, "its scale must be"),
        ("same_huge", DataError, "its scale must be"),
        ("tenth", ConfigError, r"all 256 reference responses got 0\.1; a reward that never"),
    ],
)
def test_a_reward_that_cannot_be_used_is_explained_rightly(recipe, tmp_path, function, error, says):
    bad = replace(recipe, reward=RewardConfig(function=(f"scaled_rewards:{function}",)))
    with pytest.raises(error, match=says) as caught:
        train(bad, tmp_path / "run", SilentObserver())
    assert "\n" not in str(caught.value)


def test_a_large_reward_with_a_small_weight_is_fine_and_one_that_grows_is_stopped(recipe, tmp_path):
    scaled = RewardConfig(function=("scaled_rewards:huge",), weights=(1e-300,))
    train(replace(recipe, reward=scaled), tmp_path / "scaled", SilentObserver())
    plain = replace(recipe, reward=RewardConfig(function=("scaled_rewards:some",)))
    train(plain, tmp_path / "plain", SilentObserver())
    scores = [
        [row["score/mean"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("scaled", "plain")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    later = replace(recipe, reward=RewardConfig(function=("scaled_rewards:later",)))
    with pytest.raises(DataError, match="its scale must be"):
        train(later, tmp_path / "later", SilentObserver())


def test_responses_beyond_the_models_context_are_refused(recipe, tmp_path):
    long = replace(recipe, generation=GenerationConfig(max_new_tokens=63))
    with pytest.raises(ConfigError, match=r"generation\.max_new_tokens: got 63; .* at most 62"):
        train(long, tmp_path / "run", SilentObserver())


def test_a_step_needs_two_responses(recipe):
    one = PromptsConfig(source=recipe.prompts.source, per_step=1, heldout=5)
    with pytest.raises(ConfigError, match=r"responses_per_prompt: got 1; .* 2 to "):
        replace(recipe, prompts=one, ppo=PPOConfig(minibatches=1))
    two = GenerationConfig(responses_per_prompt=2)
    replace(recipe, prompts=one, generation=two, ppo=PPOConfig(minibatches=1))


def test_an_adapter_trunk_beside_full_training_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"reward\.trunk: got 'adapter'"):
        replace(
            recipe,
            model=ModelConfig(name=recipe.model.name, trainable="full"),
            reward=RewardConfig(fit="ratings.csv", trunk="adapter"),
        )


def test_a_judge_that_tells_no_answers_apart_is_noted_and_its_metrics_are_left_out(
    recipe, tmp_path, monkeypatch
):
    blind = WordJudge(index={"good": 0}, idf=torch.ones(1), weights=torch.ones(1), bias=0.1)
    monkeypatch.setattr("tether.prepare.reward_and_judge", lambda *a, **k: (None, {}, blind))
    seen = Notes()
    result = train(recipe, tmp_path / "run", seen)
    assert [n for n in seen.notes if "judge gives all 5 reference answers the score 0.1" in n]
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert "heldout/score" in row
    assert not [key for key in row if "judge" in key or key == "heldout/win_rate"]
    assert result["heldout_gain"] is None


@pytest.mark.parametrize("temperature", [1e-6, 1e9])
@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_a_temperature_that_leaves_nothing_to_learn_stops_the_run(
    recipe, tmp_path, temperature, trainable
):
    dead = replace(
        recipe,
        steps=3,
        model=ModelConfig(name=recipe.model.name, trainable="full")
        if trainable == "full"
        else recipe.model,
        generation=GenerationConfig(max_new_tokens=6, temperature=temperature),
    )
    with pytest.raises(TrainingDiverged, match=r"life gate: .*generation\.temperature"):
        train(dead, tmp_path / "run", SilentObserver())


def test_a_learning_rate_below_the_precision_stops_the_run(recipe, tmp_path):
    dead = replace(recipe, ppo=PPOConfig(learning_rate=1e-60))
    with pytest.raises(TrainingDiverged, match=r"step 1 no trained weight .*ppo\.learning_rate"):
        train(dead, tmp_path / "run", SilentObserver())


def test_a_small_learning_rate_is_alive(recipe, tmp_path):
    slow = replace(recipe, ppo=PPOConfig(learning_rate=1e-5), steps=3)
    train(slow, tmp_path / "lora", SilentObserver())
    full = replace(slow, model=ModelConfig(name=recipe.model.name, trainable="full"))
    train(replace(full, ppo=PPOConfig(learning_rate=1e-6)), tmp_path / "full", SilentObserver())
