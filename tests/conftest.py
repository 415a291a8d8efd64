"""Small models that are built, never downloaded, and the objects that tests share."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, as the command line does

import pytest
import torch
from hypothesis import settings
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether.config import ModelConfig
from tether.models.load import Base, make_policy
from tether.types import PromptBatch

torch.set_num_threads(2)
settings.register_profile("tether", deadline=None, derandomize=True)
settings.load_profile("tether")


def tiny_llama(
    *, vocab: int = 11, layers: int = 4, seed: int = 0, tied: bool = True
) -> LlamaForCausalLM:
    """A random Llama: wide enough weights that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)


def tiny_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """One word a token: w0, w1, …; id 2 is EOS and padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"w{i}" if i != 2 else "</s>": i for i in range(vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", padding_side="left"
    )


def tiny_base(**options) -> Base:
    lm = tiny_llama(**options)
    return Base(
        lm=lm,
        tokenizer=tiny_tokenizer(lm.config.vocab_size),
        eos_tokens=torch.tensor([2]),
        pad_token=2,
        name="tiny",
    )


def tiny_policy(*, first_layer: int = 2, trainable: str = "lora", stirred: bool = True, **options):
    """A policy; `stirred` moves its adapter away from 0, so that it differs from its reference."""
    lora = {"lora_rank": 4, "lora_alpha": 8, "lora_first_layer": first_layer}
    own = lora if trainable == "lora" else {}
    config = ModelConfig(name="tiny", trainable=trainable, **own)
    policy = make_policy(tiny_base(**options), config, value_units=8)
    if stirred:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in policy.lm.named_parameters():
                if parameter.requires_grad and ("lora_B" in name or trainable == "full"):
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(0.2 * noise.to(parameter.dtype))
            torch.nn.init.normal_(policy.value_head.net[-1].weight, generator=generator)
    return policy


def tiny_prompts() -> PromptBatch:
    """Three prompts of different lengths, left-padded."""
    return PromptBatch(
        prompt_tokens=torch.tensor([[2, 2, 3], [2, 4, 5], [6, 7, 8]]),
        prompt_mask=torch.tensor([[False, False, True], [False, True, True], [True, True, True]]),
        texts=("w3", "w4 w5", "w6 w7 w8"),
    )


@pytest.fixture
def prompts() -> PromptBatch:
    return tiny_prompts()


@pytest.fixture(scope="session")
def toy_one():
    """One choice among four: see tests/exact/toys.py."""
    from toys import toy_one

    return toy_one()


@pytest.fixture(scope="session")
def toy_two():
    """Two letters and EOS, at most four tokens."""
    from toys import toy_two

    return toy_two()
