"""Read model and tokenizer from a folder or the hub; an adapter folder becomes a whole model.

An adapter (from supervised fine-tuning, or from another run) is merged into the weights of its
base, so that policy and reference both start from the model that the adapter describes.
"""

import warnings
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from tether.config import ModelConfig
from tether.errors import ConfigError, TetherError
from tether.models.builtin import resolve_model


def read_pretrained(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a causal language model and its tokenizer; safetensors only.

    Raises:
        ConfigError: nothing usable is there; the message says what was tried.
    """
    transformers_logging.disable_progress_bar()  # the run shows its own progress
    try:
        return _read(resolve_model(config.name), config)
    except TetherError:
        raise
    except Exception as error:  # the libraries raise a dozen unrelated classes
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"model.name: got {config.name!r}; no causal language model could be loaded from it "
            f"({reason}); give a folder with safetensors, a hub name or builtin:smollm2-135m"
        ) from error


def _read(source: str, config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if find_adapter_config_file(source) is not None:
        return _read_adapter(source, config)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    lm = AutoModelForCausalLM.from_pretrained(
        source, dtype=getattr(torch, config.dtype), use_safetensors=True, **options
    )
    return lm, tokenizer


def _read_adapter(
    source: str, config: ModelConfig
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The adapter's base with the adapter merged in; the adapter's own tokenizer if it has one."""
    base = PeftConfig.from_pretrained(source).base_model_name_or_path
    if not base:
        raise ValueError("its adapter_config.json names no base model")
    if not _holds(source, "adapter_model.safetensors"):
        raise ValueError("it holds an adapter without adapter_model.safetensors")
    lm, tokenizer = _read(resolve_model(base), config)
    if _holds(source, "tokenizer_config.json"):
        options = {"trust_remote_code": config.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    with warnings.catch_warnings():
        # peft only warns of weights that it did not find, and goes on without them
        warnings.filterwarnings("error", message="Found missing adapter keys")
        wrapped: Any = PeftModel.from_pretrained(lm, source, torch_device="cpu")
    if not hasattr(wrapped.base_model, "merge_and_unload"):
        kind = wrapped.peft_config["default"].peft_type.value
        raise ValueError(f"an adapter of type {kind} cannot be merged into the weights")
    return wrapped.merge_and_unload(safe_merge=True), tokenizer


def _holds(source: str, file: str) -> bool:
    """True where the folder or hub repository has the file."""
    return cached_file(source, file, _raise_exceptions_for_missing_entries=False) is not None
