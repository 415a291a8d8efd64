"""Whole runs on a tiny model in a folder: files, resume, interrupts, bad input."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama, tiny_tokenizer
from safetensors.torch import load_file

from tether.config import (
    GenerationConfig,
    HeldoutConfig,
    KLConfig,
    ModelConfig,
    PPOConfig,
    PromptsConfig,
    Recipe,
    RewardConfig,
)
from tether.errors import CheckpointError, ConfigError, DataError
from tether.metrics import REGISTRY, read_jsonl
from tether.observer import SilentObserver
from tether.run import train

VOCAB = 23


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its tokenizer, prompts and a reward, as a person would have them on disk."""
    place = tmp_path_factory.mktemp("work")
    tiny_llama(vocab=VOCAB).save_pretrained(place / "model")
    tiny_tokenizer(VOCAB).save_pretrained(place / "model")
    rows = [{"prompt": f"w{i} w{j}"} for i in range(3, 10) for j in range(10, 13)]
    (place / "prompts.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    (place / "toy_rewards.py").write_text(
        "def many_w5(prompts, responses):\n"
        "    return [r.split().count('w5') - 0.1 * len(r) for r in responses]\n"
        "def nothing(prompts, responses):\n    return [0.0 for _ in responses]\n"
        "def short(prompts, responses):\n    return [1.0]\n"
        "def broken(prompts, responses):\n    return [1 / 0]\n"
        "def nan(prompts, responses):\n    return [float('nan') for _ in responses]\n"
    )
    return place


@pytest.fixture
def recipe(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return Recipe(
        steps=4,
        threads=2,
        device="cpu",
        checkpoint_every=2,
        model=ModelConfig(
            name=str(folder / "model"), lora_first_layer=2, lora_rank=4, lora_alpha=8.0
        ),
        prompts=PromptsConfig(source=str(folder / "prompts.jsonl"), per_step=6, heldout=5),
        generation=GenerationConfig(max_new_tokens=6),
        reward=RewardConfig(function=("toy_rewards:many_w5",)),
        heldout=HeldoutConfig(every=2),
        kl=KLConfig(target=1.0),
        ppo=PPOConfig(minibatches=2, learning_rate=5e-3),
    )


class Stopper(SilentObserver):
    """Does something at one step, as a person or a machine would from outside."""

    def __init__(self, step, action):
        self.at, self.action = step, action

    def step(self, row, total_steps):
        if row["step"] == self.at:
            self.action()


def kill():
    raise RuntimeError("killed")


def comparable(path):
    """Log rows without what a clock or the memory of the process says."""
    rows = read_jsonl(path)
    return [
        {
            k: v
            for k, v in row.items()
            if not k.startswith(("time/", "memory/")) and "per_second" not in k
        }
        for row in rows
    ]


def test_a_run_leaves_everything_its_folder_promises(recipe, tmp_path):
    result = train(recipe, tmp_path / "run", SilentObserver())
    run = tmp_path / "run"
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "ledger.jsonl",
                 "report.html", "result.json", "adapter/adapter_model.safetensors",
                 "adapter/adapter_config.json", "checkpoints/step-000004"):  # fmt: skip
        assert (run / name).exists(), name
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(set(row) <= set(REGISTRY) for row in rows)
    phases = ("generate_s", "reference_s", "score_s", "update_s")
    for row in rows:
        parts = [row[f"time/{phase}"] for phase in phases]
        assert min(parts) > 0
        assert sum(parts) <= row["time/step_s"]
    assert all(row["memory/peak_mib"] > 0 for row in rows)
    assert len(read_jsonl(run / "samples.jsonl")) == 2 * 5
    assert set(result) >= {"run", "steps", "seconds", "reward_gain", "heldout_gain", "heldout_interval",
                           "kl_nats_per_response", "kl_target", "kl_coef", "stopped_by"}  # fmt: skip
    assert json.loads((run / "result.json").read_text()) == result


def test_the_adapter_loads_with_plain_peft_and_gives_the_trained_policy(recipe, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train(recipe, tmp_path / "run", SilentObserver())
    base = AutoModelForCausalLM.from_pretrained(recipe.model.name)
    tokens = torch.tensor([[3, 4, 5, 6]])
    before = base(tokens).logits.detach().clone()
    plain = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
    assert (plain(tokens).logits - before).abs().max() > 1e-4
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-000004" / "weights.safetensors")
    loaded = {n.removeprefix("base_model.model."): t for n, t in plain.state_dict().items()}
    adapters = {name: tensor for name, tensor in saved.items() if "lora_" in name}
    assert adapters.keys() == {name for name in loaded if "lora_" in name}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in adapters.items())


def test_the_seed_decides_initial_weights_also_beside_a_given_reward_model(recipe):
    from tether.config import ModelConfig
    from tether.models.load import load_base, make_policy
    from tether.models.reward_model import new_head

    def first_weights(seed: int, draw_before: bool) -> torch.Tensor:
        base = load_base(recipe.model, device=torch.device("cpu"))
        if draw_before:
            new_head(base, layer=1, hidden_units=4, seed=0)
        policy = make_policy(base, ModelConfig(name="tiny"), value_units=4, seed=seed)
        weights = dict(policy.lm.named_parameters())
        return next(w for n, w in weights.items() if "lora_A" in n)

    assert torch.equal(first_weights(1, draw_before=True), first_weights(1, draw_before=False))
    assert not torch.equal(first_weights(1, draw_before=True), first_weights(2, draw_before=True))


@pytest.mark.parametrize("when", [1, 3])
def test_a_killed_run_resumes_to_the_same_bits(recipe, tmp_path, when):
    train(recipe, tmp_path / "straight", SilentObserver())
    with pytest.raises(RuntimeError, match="killed"):
        train(recipe, tmp_path / "cut", Stopper(when, kill))
    train(recipe, tmp_path / "cut", SilentObserver(), resume=True)
    for log in ("metrics.jsonl", "ledger.jsonl", "samples.jsonl"):
        assert comparable(tmp_path / "straight" / log) == comparable(tmp_path / "cut" / log)
    for part in ("weights.safetensors", "optimizer.safetensors"):
        a, b = (
            load_file(tmp_path / n / "checkpoints" / "step-000004" / part)
            for n in ("straight", "cut")
        )
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_an_interrupt_finishes_the_step_and_leaves_a_resumable_run(recipe, tmp_path):
    interrupt = Stopper(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", interrupt)
    assert (tmp_path / "run" / "checkpoints" / "step-000001").exists()
    assert train(recipe, tmp_path / "run", SilentObserver(), resume=True)["steps"] == 4


def test_resume_refuses_another_reference(recipe, tmp_path, folder):
    with pytest.raises(RuntimeError, match="killed"):
        train(recipe, tmp_path / "run", Stopper(2, kill))
    tiny_llama(vocab=VOCAB, seed=9).save_pretrained(folder / "other")
    tiny_tokenizer(VOCAB).save_pretrained(folder / "other")
    changed = replace(recipe, model=replace(recipe.model, name=str(folder / "other")))
    with pytest.raises(CheckpointError, match="not those that"):
        train(changed, tmp_path / "run", SilentObserver(), resume=True)


def test_raising_the_penalty_lowers_the_kl(recipe, tmp_path):
    nats = []
    for coef in (0.0, 3.0):
        fixed = replace(recipe, steps=12, kl=KLConfig(controller="fixed", coef=coef))
        nats.append(train(fixed, tmp_path / str(coef), SilentObserver())["kl_nats_per_response"])
    assert nats[1] < 0.5 * nats[0]


def test_full_fine_tuning_runs_and_leaves_a_plain_model_folder(recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    full = replace(recipe, steps=2, model=ModelConfig(name=recipe.model.name, trainable="full"))
    train(full, tmp_path / "run", SilentObserver())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    before = AutoModelForCausalLM.from_pretrained(recipe.model.name)
    moved = [
        not torch.equal(a, b) for a, b in zip(loaded.parameters(), before.parameters(), strict=True)
    ]
    assert any(moved)


def test_several_responses_and_weighted_terms_and_the_missing_eos_penalty_enter_the_score(
    recipe, tmp_path
):
    two = replace(
        recipe,
        steps=1,
        generation=GenerationConfig(max_new_tokens=6, responses_per_prompt=3),
        reward=RewardConfig(
            function=("toy_rewards:many_w5", "toy_rewards:nothing"), weights=(2.0, 5.0),
            missing_eos_penalty=7.0,
        ),
    )  # fmt: skip
    train(two, tmp_path / "run", SilentObserver())
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]["responses"] == 18
    for row in read_jsonl(tmp_path / "run" / "samples.jsonl"):
        text = row["response"]
        expected = 2 * (text.split().count("w5") - 0.1 * len(text))
        expected -= 7.0 * (row["ids"][-1] != 2)
        torch.testing.assert_close(row["score"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        ("toy_rewards:absent", ConfigError, "absent"),
        ("no_such_module:f", ConfigError, "no_such_module"),
        ("toy_rewards:nothing", ConfigError, "never varies"),
        ("toy_rewards:short", DataError, "returned 1 numbers"),
        ("toy_rewards:broken", DataError, "ZeroDivisionError"),
        ("toy_rewards:nan", DataError, "returned nan"),
    ],
)
def test_a_bad_reward_function_is_named_in_one_line(recipe, tmp_path, function, error, says):
    bad = replace(recipe, reward=RewardConfig(function=(function,)))
    with pytest.raises(error, match=says) as caught:
        train(bad, tmp_path / "run", SilentObserver())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_layer_that_does_not_exist_is_refused(recipe, tmp_path):
    bad = replace(recipe, model=replace(recipe.model, lora_first_layer=9))
    with pytest.raises(ConfigError, match="layers 0 to 3"):
        train(bad, tmp_path / "run", SilentObserver())


def test_a_model_folder_that_holds_no_model_is_refused_in_one_line(recipe, tmp_path):
    for name in (str(tmp_path), str(tmp_path / "absent")):
        with pytest.raises(ConfigError, match=r"model\.name") as caught:
            train(replace(recipe, model=ModelConfig(name=name)), tmp_path / "run", SilentObserver())
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ("--prompts.source", "absent.jsonl"),
        ("--prompts.source", "empty.jsonl"),
        ("--prompts.column", "promt"),
        ("--prompts.heldout", "100"),
        ("--reward.function", "toy_rewards:broken"),
        ("--reward.model", "no_folder"),
        ("--reward.fit", "prompts.jsonl"),
        ("--model.lora_first_layer", "9"),
        ("--kl.target", "0"),
        ("--kl.taget", "3"),
    ],
)
def test_bad_input_exits_2_with_its_reason_and_leaves_no_run_folder(recipe, folder, capsys, flags):
    from tether.cli import main
    from tether.recipe_text import recipe_yaml

    (folder / "empty.jsonl").write_text("")
    (folder / "recipe.yaml").write_text(recipe_yaml(replace(recipe, run="given")))
    assert main(["train", "recipe.yaml", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().splitlines()[-1].startswith("error: ")
    assert captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err
    assert not (folder / "given").exists()
