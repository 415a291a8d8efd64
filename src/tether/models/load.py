"""Load a causal language model; make it a policy with a reference that shares its weights.

With LoRA the reference is the same model with the adapter switched off. With full fine-tuning it
is a frozen copy. Nothing here trains.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Int
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from tether.config import ModelConfig
from tether.errors import ConfigError
from tether.models.heads import ValueHead
from tether.models.pretrained import read_pretrained
from tether.models.trunk import decoder_layers
from tether.models.usable import check_parts, check_vocabulary

POLICY_ADAPTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """An untouched language model with its tokenizer.

    Attributes:
        lm: the model, frozen, in eval mode.
        tokenizer: its tokenizer.
        eos_tokens: ids that end a response.
        pad_token: id written into padding; its value never matters.
        name: where it came from.
    """

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_tokens: Int[Tensor, " eos"]
    pad_token: int
    name: str

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.lm.config.get_text_config().hidden_size

    @property
    def layer_count(self) -> int:
        """Number of decoder layers."""
        return len(decoder_layers(self.lm))

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.lm.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model being trained, its value function and its reference.

    Attributes:
        base: model and tokenizer; with LoRA the adapter's layers are inside `base.lm`.
        adapter: the peft wrapper, or None when every weight is trained.
        frozen_copy: the reference when every weight is trained, else None.
        value_head: V(s) on the policy's final hidden state.
        shared_layers: frozen layers below the first adapter, the same for policy and reference.
    """

    base: Base
    adapter: PeftModel | None
    frozen_copy: PreTrainedModel | None
    value_head: ValueHead
    shared_layers: int

    @property
    def lm(self) -> PreTrainedModel:
        """The policy's language model."""
        return self.base.lm

    @property
    def head_is_frozen(self) -> bool:
        """True where the output layer is not trained."""
        return self.adapter is not None


def load_base(config: ModelConfig, *, device: torch.device) -> Base:
    """Load a model and tokenizer from a folder, the hub or a built-in name; safetensors only.

    Raises:
        ConfigError: nothing usable is there, or the model cannot do what a run asks of it.
    """
    lm, tokenizer = read_pretrained(config)
    lm.to(device)  # type: ignore[arg-type]
    lm.eval().requires_grad_(requires_grad=False)
    eos_tokens = _eos_tokens(lm, tokenizer, config.name).to(device)
    pad = tokenizer.pad_token_id
    base = Base(
        lm=lm,
        tokenizer=tokenizer,
        eos_tokens=eos_tokens,
        pad_token=pad if isinstance(pad, int) else int(eos_tokens[0]),
        name=config.name,
    )
    check_vocabulary(lm, tokenizer, eos_tokens)
    check_parts(lm)
    return base


def _eos_tokens(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> Int[Tensor, " eos"]:
    """Ids that end a response: the generation configuration's and the tokenizer's."""
    stated = lm.generation_config.eos_token_id if lm.generation_config else None
    ids = [*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id]
    known = sorted({token for token in ids if isinstance(token, int)})
    if not known:
        raise ConfigError(f"model.name: {name!r} has no EOS token, so no response could end")
    return torch.tensor(known)


def make_policy(base: Base, config: ModelConfig, *, value_units: int, seed: int = 0) -> Policy:
    """Turn a base into a policy: add the adapter (or copy the base) and a value head.

    At the start the policy equals the reference exactly: LoRA's second factor is 0. Initial
    weights follow from the seed alone, whatever was drawn before.

    Raises:
        ConfigError: `model.lora_first_layer` is not a layer of the model.
    """
    if config.lora_first_layer >= base.layer_count:
        raise ConfigError(
            f"model.lora_first_layer: got {config.lora_first_layer}; {base.name} has layers "
            f"0 to {base.layer_count - 1}"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _make_policy(base, config, value_units)


def _make_policy(base: Base, config: ModelConfig, value_units: int) -> Policy:
    value_head = ValueHead(base.hidden_size, value_units).to(base.device)
    if config.trainable == "full":
        frozen = copy.deepcopy(base.lm)
        base.lm.requires_grad_(requires_grad=True)
        return Policy(
            base=base, adapter=None, frozen_copy=frozen, value_head=value_head, shared_layers=0
        )
    first = config.lora_first_layer
    layers = range(first, base.layer_count)
    adapter = get_peft_model(
        base.lm, lora_config(base.lm, rank=config.lora_rank, alpha=config.lora_alpha, layers=layers)
    )
    adapter.eval()
    return Policy(
        base=base,
        adapter=adapter,  # type: ignore[arg-type]
        frozen_copy=None,
        value_head=value_head,
        shared_layers=first,
    )


def lora_config(lm: PreTrainedModel, *, rank: int, alpha: float, layers: range) -> LoraConfig:
    """LoRA without dropout on all linear maps of the given decoder layers."""
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=_linear_names(lm, layers),
        task_type="CAUSAL_LM",
    )


def _linear_names(lm: PreTrainedModel, layers: range) -> list[str]:
    """Full names of the linear maps of some layers; one that is wrapped already keeps its name."""
    all_layers = decoder_layers(lm)
    chosen = {id(module) for i in layers for module in all_layers[i].modules()}
    return sorted(
        name.removesuffix(".base_layer")
        for name, module in lm.named_modules()
        if id(module) in chosen and isinstance(module, nn.Linear | Conv1D) and "lora_" not in name
    )


@contextmanager
def reference_of(policy: Policy) -> Iterator[PreTrainedModel]:
    """The reference model: the same weights with the adapter off, or the frozen copy."""
    if policy.adapter is None:
        assert policy.frozen_copy is not None
        yield policy.frozen_copy
    else:
        with policy.adapter.disable_adapter():
            yield policy.lm


@contextmanager
def merged(policy: Policy) -> Iterator[None]:
    """Fold the adapter into the weights for a pass without gradient; restore them bit for bit.

    Sampling reads one token at a time, where the adapter's small products cost a third of the time.
    """
    if policy.adapter is None:
        yield
        return
    weights = [
        layer.get_base_layer().get_parameter("weight")
        for layer in policy.lm.modules()
        if isinstance(layer, LoraLayer) and POLICY_ADAPTER in layer.lora_A
    ]
    originals = [weight.detach().clone() for weight in weights]
    policy.adapter.merge_adapter([POLICY_ADAPTER])
    try:
        yield
    finally:
        policy.adapter.unmerge_adapter()
        for weight, original in zip(weights, originals, strict=True):
            weight.data.copy_(original)  # subtracting again leaves rounding behind


def policy_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """The policy's trained parameters by name, the value head left out."""
    return {
        name: parameter
        for name, parameter in policy.lm.named_parameters()
        if parameter.requires_grad and "reward" not in name.split(".")
    }
