"""Fitting a reward model on a tiny base: it learns, it is saved exactly, it scores alike anywhere."""

import json
import random

import pytest
import torch
from conftest import tiny_base, tiny_policy, tiny_prompts
from safetensors.torch import save_file

from tether.baseline import _freeze_scale
from tether.config import ModelConfig, RewardConfig
from tether.data.judgements import from_preferences, from_ratings, load_judgements
from tether.data.preferences import Preference
from tether.data.ratings import Rating
from tether.errors import CheckpointError, ConfigError, DataError
from tether.fit import encode_texts, fit_reward_model
from tether.models.load import make_policy, reference_of
from tether.models.reward_model import (
    RewardModel,
    RewardSpec,
    attach_reward_adapter,
    collate,
    encode_text,
    load_reward_model,
    new_head,
    reward_lora,
    save_reward_model,
    score_generated,
)
from tether.models.trunk import final_hidden
from tether.observer import SilentObserver
from tether.rewards import Reward
from tether.rollout import collect_rollout, read_reference


def ratings(count: int, seed: int) -> list[Rating]:
    """Texts of tiny words; the more w5 and the fewer w7, the better."""
    draw = random.Random(seed)
    texts = [
        " ".join(f"w{draw.randrange(3, 11)}" for _ in range(draw.randrange(3, 8)))
        for _ in range(count)
    ]
    return [
        Rating(text=t, score=float(t.split().count("w5") - t.split().count("w7"))) for t in texts
    ]


MODEL = ModelConfig(name="tiny", lora_rank=4, lora_alpha=8.0)


def fitted(trunk: str, *, pooling: str = "mean", seed: int = 0):
    base = tiny_base()
    train, test = (from_ratings(ratings(n, s), 1.0) for n, s in ((300, 0), (80, 1)))
    reward = RewardConfig(
        fit="ratings", layer=1, hidden_units=8, trunk=trunk, pooling=pooling, epochs=400 if trunk == "frozen" else 40
    )  # fmt: skip
    model, weights = fit_reward_model(
        base, train, test, model=MODEL, reward=reward, seed=seed, observer=SilentObserver()
    )
    return base, model, weights


def score_texts(base, model, texts: list[str]) -> torch.Tensor:
    """Scores as in a rollout: the text is a response to a one-token prompt."""
    items = [encode_text(base, text, "w3") for text in texts]
    tokens, mask, _ = collate(base, items)
    prompt = torch.ones(len(texts), 1, dtype=torch.bool)
    ended = torch.zeros(len(texts), dtype=torch.bool)
    return score_generated(
        model, base, tokens, prompt_mask=prompt, response_mask=mask[:, 1:], ended=ended
    )


@pytest.mark.parametrize("trunk", ["frozen", "adapter"])
def test_a_fitted_model_orders_held_out_texts_and_leaves_the_base_untouched(trunk):
    base, model, _ = fitted(trunk)
    assert model.spec.accuracy > 0.85
    low, high = model.spec.accuracy_interval
    assert low < model.spec.accuracy < high
    tokens, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.bool)
    assert torch.equal(
        final_hidden(base.lm, tokens, mask), final_hidden(tiny_base().lm, tokens, mask)
    )


@pytest.mark.parametrize("trunk", ["frozen", "adapter"])
def test_loaded_scores_equal_saved_ones_exactly(trunk, tmp_path):
    base, model, weights = fitted(trunk)
    policy = make_policy(base, MODEL, value_units=8)
    first = attach_reward_adapter(model, base, policy.adapter, weights)
    save_reward_model(first, tmp_path)
    texts = ["w5 w5 w4", "w7 w7", "w9 w5 w7 w4"]
    expected = score_texts(base, first, texts)
    again = make_policy(tiny_base(), MODEL, value_units=8)
    loaded, stored = load_reward_model(tmp_path, again.base)
    loaded = attach_reward_adapter(loaded, again.base, again.adapter, stored)
    assert torch.equal(score_texts(again.base, loaded, texts), expected)
    assert expected[0] > expected[1]


def rewritten(folder, **changes):
    path = folder / "reward_model.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v != "left out"}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "reward_model.json").write_text("{not json"), "JSONDecodeError"),
        (lambda f: (f / "reward_model.json").write_text("[1]"), "Error"),
        (lambda f: (f / "reward_model.json").write_bytes(b"\xff\xfe"), "UnicodeDecodeError"),
        (lambda f: rewritten(f, colour="red"), "colour"),
        (lambda f: rewritten(f, layer="left out"), "layer"),
        (lambda f: rewritten(f, layer="two"), "Error"),
        (lambda f: rewritten(f, layer=0), "layer 0"),
        (lambda f: rewritten(f, pooling="median"), "pooling 'median'"),
        (lambda f: rewritten(f, hidden_units=7), "size mismatch"),
        (lambda f: rewritten(f, accuracy_interval=3), "TypeError"),
        (lambda f: (f / "head.safetensors").write_bytes(b"no tensors here"), "Error"),
        (lambda f: (f / "head.safetensors").unlink(), "head.safetensors"),
        (lambda f: save_file({"net.weight": torch.ones(2)}, f / "head.safetensors"), "Missing key"),
        (lambda f: (f / "adapter.safetensors").unlink(), "adapter.safetensors"),
        (lambda f: save_file({"x": torch.ones(2)}, f / "adapter.safetensors"), "not an adapter"),
        (lambda f: rewritten(f, lora_rank=3), "not an adapter of the rank"),
    ],
)
def test_a_damaged_reward_model_is_refused_in_one_line(damage, says, tmp_path):
    base = tiny_base()
    spec = RewardSpec(
        base="tiny", layer=1, pooling="mean", hidden_units=8, trunk="adapter", lora_rank=4,
        lora_alpha=8.0, accuracy=0.5, accuracy_interval=(0.25, 0.75), pairs=9,
    )  # fmt: skip
    head = new_head(base, layer=1, hidden_units=8, seed=0)
    policy = make_policy(base, MODEL, value_units=8)
    policy.adapter.add_adapter("reward", reward_lora(base.lm, spec))
    save_reward_model(RewardModel(head=head, spec=spec, adapter=policy.adapter), tmp_path)

    def load():
        fresh = make_policy(tiny_base(), MODEL, value_units=8)
        model, weights = load_reward_model(tmp_path, fresh.base)
        return attach_reward_adapter(model, fresh.base, fresh.adapter, weights)

    load()
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=r"^reward\.model: ") as caught:
        load()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fitted_model_without_a_spread_over_the_responses_is_refused():
    policy = tiny_policy(stirred=False)
    rollout = collect_rollout(
        policy, tiny_prompts(), responses_per_prompt=2, max_new_tokens=4, temperature=1.0, seed=0,
        reward_layer=1, recompute_logprobs=False, memory_gib=2.0,
    )  # fmt: skip
    reference = read_reference(policy, rollout, reward_layer=1, memory_gib=2.0)
    spec = RewardSpec(
        base="tiny", layer=1, pooling="mean", hidden_units=0, trunk="frozen", lora_rank=4,
        lora_alpha=8.0,
    )  # fmt: skip
    head = new_head(policy.base, layer=1, hidden_units=0, seed=0)
    torch.nn.init.zeros_(head.net.weight)
    model = RewardModel(head=head.requires_grad_(requires_grad=False), spec=spec)
    reward = Reward(model=model, functions=(), weights=(1.0,), missing_eos_penalty=0.0)
    with pytest.raises(ConfigError, match=r"reward\.fit: .* all 6 reference responses the score"):
        _freeze_scale(reward, policy.base, rollout, reference)


def test_a_reward_adapter_changes_neither_policy_nor_reference():
    base, model, weights = fitted("adapter")
    policy = make_policy(base, MODEL, value_units=8)
    model = attach_reward_adapter(model, base, policy.adapter, weights)
    tokens, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.bool)
    score_texts(base, model, ["w5 w4"])
    expected = final_hidden(tiny_base().lm, tokens, mask)
    with torch.no_grad():
        assert torch.equal(final_hidden(policy.lm, tokens, mask), expected)
        with reference_of(policy) as lm:
            assert torch.equal(final_hidden(lm, tokens, mask), expected)
    trained = [n for n, p in policy.lm.named_parameters() if p.requires_grad]
    assert trained
    assert not any("reward" in name for name in trained)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_padding_changes_no_score(pooling):
    base, model, _ = fitted("frozen", pooling=pooling)
    texts = ["w5 w5 w4", "w7 w7", "w9 w5 w7 w4 w5 w6 w8"]
    together = score_texts(base, model, texts)
    alone = torch.cat([score_texts(base, model, [text]) for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)


def test_preferences_fit_too_and_the_interval_counts_prompts_not_pairs():
    rated = ratings(200, 3)
    pairs = []
    for a, b in zip(rated[::2], rated[1::2], strict=True):
        if a.score != b.score:
            good, bad = (a, b) if a.score > b.score else (b, a)
            pairs.append(Preference(prompt="w3 w4", chosen=good.text, rejected=bad.text))
    judged = from_preferences(pairs)
    assert set(judged.clusters.tolist()) == {0}
    spread = from_preferences(
        [
            Preference(prompt=f"w{i}", chosen=p.chosen, rejected=p.rejected)
            for i, p in enumerate(pairs)
        ]
    )
    reward = RewardConfig(fit="ratings", layer=1, hidden_units=8, epochs=400)
    model, _ = fit_reward_model(
        tiny_base(), judged, spread, model=MODEL, reward=reward, seed=0, observer=SilentObserver()
    )
    assert model.spec.accuracy >= 0.75
    assert model.spec.accuracy_interval[0] > 0.6


def test_a_text_of_eos_alone_or_beyond_the_context_is_refused_with_its_row():
    base = tiny_base()
    fine = Rating(text="w3 w4", score=1.0, row=1)
    for text, says in (("</s>", "no token but EOS"), ("w3 " * 65, "65 tokens .* at most 64")):
        bad = Rating(text=text, score=2.0, row=7)
        with pytest.raises(DataError, match=rf"reward\.fit: row 7 .*{says}"):
            encode_texts(base, from_ratings([fine, bad], 1.0))
    long = Preference(prompt="w3 " * 60, chosen="w4", rejected="w5 " * 5, row=9)
    with pytest.raises(DataError, match=r"row 9 .* 65 tokens"):
        encode_texts(base, from_preferences([long]))
    assert len(encode_texts(base, from_ratings([fine, Rating(text="w5", score=0.0)], 1.0))) == 2


def test_the_three_parts_share_no_text(tmp_path):
    path = tmp_path / "ratings.csv"
    rated = {r.text: r for r in ratings(400, 5)}.values()
    path.write_text("text,score\n" + "\n".join(f"{r.text},{r.score}" for r in rated))
    parts = load_judgements(str(path), gap=1.0, max_texts=1000, seed=0, render=lambda m: "")
    texts = [set(part.texts) for part in parts.values()]
    assert all(texts)
    assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])
    assert sum(map(len, texts)) == len(rated)


def test_the_largest_seed_fits_too():
    low, _ = fitted("frozen", seed=2**63 - 1)[1].spec.accuracy_interval
    assert low > 0.5  # better than chance; how good follows from the seed
