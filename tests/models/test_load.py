"""Loading: adapters count, and what a model cannot do is refused in one line at the start."""

import json
import warnings

import pytest
import torch
from conftest import tiny_llama, tiny_tokenizer
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tether.baseline import reference_fingerprint
from tether.config import ModelConfig
from tether.errors import ConfigError
from tether.models.load import load_base, make_policy, reference_of
from tether.models.usable import check_context, check_parts, context_limit

CPU = torch.device("cpu")
TOKENS = torch.tensor([[3, 4, 5, 6]])


def write_base(folder, *, vocab=11, words=11):
    lm = tiny_llama(vocab=vocab)
    lm.save_pretrained(folder)
    tiny_tokenizer(words).save_pretrained(folder)
    return lm


@pytest.fixture
def fine_tuned(tmp_path):
    """A base, an adapter that moves it (as from supervised fine-tuning), and both logits."""
    lm = write_base(tmp_path / "base")
    base_logits = lm(TOKENS).logits
    lm.name_or_path = str(tmp_path / "base")
    wrapped = get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    wrapped.eval().save_pretrained(tmp_path / "sft")
    return tmp_path / "sft", base_logits, wrapped(TOKENS).logits.detach()


@pytest.mark.parametrize("trainable", ["lora", "full"])
@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_an_adapter_folder_is_the_model_that_it_describes(fine_tuned, trainable, own_tokenizer):
    folder, base_logits, expected = fine_tuned
    if own_tokenizer:
        tiny_tokenizer(11).save_pretrained(folder)
    config = ModelConfig(name=str(folder), trainable=trainable)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base = load_base(config, device=CPU)
        policy = make_policy(base, config, value_units=4)
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(TOKENS).logits, expected, rtol=0, atol=1e-5)
        with reference_of(policy) as reference:
            torch.testing.assert_close(reference(TOKENS).logits, expected, rtol=0, atol=1e-5)
    assert (expected - base_logits).abs().max() > 0.1
    plain = ModelConfig(name=str(folder.parent / "base"), trainable=trainable)
    untouched = make_policy(load_base(plain, device=CPU), plain, value_units=4)
    assert reference_fingerprint(policy) != reference_fingerprint(untouched)


def test_full_training_on_an_adapter_folder_is_saved_as_the_trained_weights(fine_tuned, tmp_path):
    config = ModelConfig(name=str(fine_tuned[0]), trainable="full")
    policy = make_policy(load_base(config, device=CPU), config, value_units=4)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.add_(0.05)
    policy.lm.save_pretrained(tmp_path / "trained")
    assert not (tmp_path / "trained" / "adapter_config.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, policy.lm(TOKENS).logits)


def edited(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "/absent/base"}, "absent"),
        ({"r": 3}, "size mismatch"),
        ({"target_modules": ["k_proj"]}, "missing adapter keys"),
    ],
)
def test_an_adapter_that_cannot_be_put_on_its_base_is_refused(fine_tuned, changes, says):
    folder = fine_tuned[0]
    edited(folder, **changes)
    with pytest.raises(ConfigError, match=says) as caught:
        load_base(ModelConfig(name=str(folder)), device=CPU)
    assert "\n" not in str(caught.value)


def test_an_adapter_without_safetensors_and_one_that_cannot_be_merged_are_refused(
    fine_tuned, tmp_path
):
    folder = fine_tuned[0]
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"without adapter_model\.safetensors"):
        load_base(ModelConfig(name=str(folder)), device=CPU)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    soft = get_peft_model(lm, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    soft.save_pretrained(tmp_path / "soft")
    with pytest.raises(ConfigError, match="PROMPT_TUNING cannot be merged"):
        load_base(ModelConfig(name=str(tmp_path / "soft")), device=CPU)


def test_a_tokenizer_beyond_the_vocabulary_is_refused_and_a_smaller_one_is_not(tmp_path):
    write_base(tmp_path / "large", words=13)
    with pytest.raises(ConfigError, match=r"ids up to 12 \('w12'\), the model knows 11 tokens"):
        load_base(ModelConfig(name=str(tmp_path / "large")), device=CPU)
    write_base(tmp_path / "small", words=9)
    load_base(ModelConfig(name=str(tmp_path / "small")), device=CPU)


def test_an_eos_beyond_the_vocabulary_is_refused(tmp_path):
    lm = write_base(tmp_path)
    lm.generation_config.eos_token_id = [2, 50256]
    lm.generation_config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="EOS 50256, the model knows 11"):
        load_base(ModelConfig(name=str(tmp_path)), device=CPU)


SMALL = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "bos_token_id": None}
HEADS = {"num_attention_heads": 4, "eos_token_id": 2, "pad_token_id": 2}


def test_an_architecture_that_cannot_be_run_in_parts_is_named():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=11, hidden_size=16, n_layer=2, n_head=4)).eval()
    with pytest.raises(ConfigError, match="BloomForCausalLM cannot be run in parts") as caught:
        check_parts(bloom)
    assert "\n" not in str(caught.value)
    mamba = MambaForCausalLM(MambaConfig(**SMALL, eos_token_id=2, pad_token_id=2)).eval()
    with pytest.raises(ConfigError, match=r"MambaForCausalLM .* num_attention_heads None"):
        check_parts(mamba)
    mamba.config.num_attention_heads = 4  # what reads no cache is found out by running it
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot be run in parts"):
        check_parts(mamba)


def test_usual_decoders_are_run_in_parts():
    torch.manual_seed(0)
    small = GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=4, n_positions=32,
                       bos_token_id=None, eos_token_id=2)  # fmt: skip
    check_parts(GPT2LMHeadModel(small).eval())
    options = SMALL | HEADS | {"num_key_value_heads": 2, "intermediate_size": 32}
    check_parts(MistralForCausalLM(MistralConfig(**options, sliding_window=4)).eval())


def test_prompt_and_response_beyond_the_context_are_refused():
    lm = tiny_llama()
    check_context(lm, longest_prompt=40, max_new_tokens=24)
    with pytest.raises(ConfigError, match=r"with the longest prompt of 40 tokens .* at most 24"):
        check_context(lm, longest_prompt=40, max_new_tokens=25)
    with pytest.raises(ConfigError, match="use shorter prompts"):
        check_context(lm, longest_prompt=64, max_new_tokens=1)


@pytest.mark.parametrize("limit", [None, 0, -1])
def test_a_model_without_a_limit_has_none(limit):
    lm = tiny_llama()
    if limit is None:
        lm.config = BloomConfig()  # no positions at all
    else:
        lm.config.max_position_embeddings = limit
    assert context_limit(lm) is None
    check_context(lm, longest_prompt=10**6, max_new_tokens=10**6)
