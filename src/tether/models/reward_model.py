"""A reward model: a scalar head on the shared base, its trunk frozen or with its own adapter.

On a frozen trunk the head reads hidden states that the reference pass computes anyway, so that
scoring a rollout costs no forward pass. What is saved (safetensors and JSON) gives the same
scores exactly when loaded.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.masking import length_mask
from tether.errors import CheckpointError, ConfigError, TetherError
from tether.models.heads import RewardHead, pool, pooling_mask
from tether.models.load import POLICY_ADAPTER, Base, lora_config
from tether.models.trunk import hidden_after

REWARD_ADAPTER = "reward"
TOKENS_PER_BATCH = 1024
"""Padded tokens read at once; larger batches are slower on a CPU, whose caches they leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """How texts become scores; saved beside the weights.

    Attributes:
        base: name of the language model underneath.
        layer: hidden states are read after this many layers.
        pooling: "mean" or "last".
        hidden_units: of the head; 0 is a linear head.
        trunk: "frozen" or "adapter".
        lora_rank: rank of an adapter trunk.
        lora_alpha: its scale times rank.
        accuracy: held-out pair accuracy; None when it was not measured.
        accuracy_interval: its 95 % interval.
        pairs: held-out pairs behind it.
    """

    base: str
    layer: int
    pooling: str
    hidden_units: int
    trunk: str
    lora_rank: int
    lora_alpha: float
    accuracy: float | None = None
    accuracy_interval: tuple[float, float] | None = None
    pairs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """A fitted head with its description; an adapter trunk lives in the shared base."""

    head: RewardHead
    spec: RewardSpec
    adapter: PeftModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPair:
    """Prompt and response of one text as ids; a rating has no prompt."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


@contextmanager
def reward_trunk(model: RewardModel) -> Iterator[None]:
    """Switch the shared base to the reward model's trunk: its adapter on, or every adapter off."""
    if model.adapter is None:
        yield
        return
    model.adapter.set_adapter(REWARD_ADAPTER)
    try:
        yield
    finally:
        model.adapter.set_adapter(POLICY_ADAPTER)


def score_hidden(
    model: RewardModel,
    hidden: Float[Tensor, "batch time hidden"],
    *,
    prompt_mask: Bool[Tensor, "batch prompt"],
    response_mask: Bool[Tensor, "batch response"],
    ended: Bool[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """Score responses from hidden states after `spec.layer` layers, reference sd units."""
    mask = pooling_mask(response_mask, ended=ended, prompt_mask=prompt_mask)
    return model.head(pool(hidden, mask, how=model.spec.pooling))


def score_generated(
    model: RewardModel,
    base: Base,
    tokens: Int[Tensor, "batch time"],
    *,
    prompt_mask: Bool[Tensor, "batch prompt"],
    response_mask: Bool[Tensor, "batch response"],
    ended: Bool[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """Score sampled ids with a pass of their own; only an adapter trunk needs it."""
    mask = torch.cat([prompt_mask, response_mask], dim=1)
    scores = []
    rows = max(1, TOKENS_PER_BATCH // tokens.shape[1])
    for i in range(0, len(tokens), rows):
        part = slice(i, i + rows)
        with torch.no_grad(), reward_trunk(model):
            hidden = hidden_after(base.lm, tokens[part], mask[part], depth=model.spec.layer)
            scores.append(
                score_hidden(
                    model, hidden, prompt_mask=prompt_mask[part],
                    response_mask=response_mask[part], ended=ended[part],
                )
            )  # fmt: skip
    return torch.cat(scores)


def encode_text(base: Base, text: str, prompt: str = "") -> TokenPair:
    """Encode prompt and response apart, so that no token spans the border between them."""
    encode = base.tokenizer
    prompt_ids = encode(prompt)["input_ids"] if prompt else []
    response_ids = encode(text, add_special_tokens=not prompt)["input_ids"]
    ends = set(base.eos_tokens.tolist())
    while response_ids and response_ids[-1] in ends:
        response_ids = response_ids[:-1]
    return TokenPair(prompt=tuple(prompt_ids), response=tuple(response_ids))


def collate(
    base: Base, pairs: Sequence[TokenPair]
) -> tuple[Int[Tensor, "batch time"], Bool[Tensor, "batch time"], Bool[Tensor, "batch time"]]:
    """Right-pad prompt + response; return ids, the mask of real tokens, and what to pool."""
    rows = [pair.prompt + pair.response for pair in pairs]
    width = max(len(row) for row in rows)
    tokens = torch.tensor([list(row) + [base.pad_token] * (width - len(row)) for row in rows])
    mask = length_mask(torch.tensor([len(row) for row in rows]), width)
    before = length_mask(torch.tensor([len(pair.prompt) for pair in pairs]), width)
    answer = mask & ~before
    answer[:, 0] = False  # a sequence's first token would ruin a mean
    last = torch.arange(width) == torch.tensor([len(row) - 1 for row in rows])[:, None]
    pooled = torch.where(answer.any(dim=1, keepdim=True), answer, last)
    return tokens.to(base.device), mask.to(base.device), pooled.to(base.device)


def batches_by_length(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Group indices of similar length so that no batch exceeds a padded token count."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    groups: list[list[int]] = []
    for index in order:
        if groups and lengths[index] * (len(groups[-1]) + 1) <= tokens_per_batch:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def new_head(base: Base, *, layer: int, hidden_units: int, seed: int) -> RewardHead:
    """Make an unfitted head for a layer of this base.

    Raises:
        ConfigError: the model has fewer layers.
    """
    if layer > base.layer_count:
        raise ConfigError(
            f"reward.layer: got {layer}; {base.name} has {base.layer_count} layers, "
            f"use 1 to {base.layer_count}"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return RewardHead(base.hidden_size, hidden_units).to(base.device)


def save_reward_model(model: RewardModel, folder: Path) -> None:
    """Write the head (and the adapter) as safetensors and the spec as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.head.state_dict(), folder / "head.safetensors")
    if model.adapter is not None:
        weights = {
            name: p.detach().contiguous()
            for name, p in model.adapter.named_parameters()
            if REWARD_ADAPTER in name.split(".")
        }
        save_file(weights, folder / "adapter.safetensors")
    spec = json.dumps(asdict(model.spec), indent=2)
    (folder / "reward_model.json").write_text(spec + "\n", "utf-8")


def load_reward_model(folder: Path, base: Base) -> tuple[RewardModel, dict[str, Tensor]]:
    """Load a head and its adapter's weights; `attach_reward_adapter` puts those on the base.

    Raises:
        CheckpointError: a file is missing or damaged, or it was fitted on another language model.
    """
    if not (folder / "reward_model.json").exists():
        raise CheckpointError(f"reward.model: got {str(folder)!r}; it holds no reward_model.json")
    try:
        return _read_reward_model(folder, base)
    except TetherError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError,
            SafetensorError) as error:  # fmt: skip
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"reward.model: {str(folder)!r} is damaged or was written by something else "
            f"({reason}); fit it again"
        ) from error


def _read_reward_model(folder: Path, base: Base) -> tuple[RewardModel, dict[str, Tensor]]:
    fields = json.loads((folder / "reward_model.json").read_text("utf-8"))
    interval = fields.pop("accuracy_interval")
    spec = RewardSpec(**fields, accuracy_interval=tuple(interval) if interval else None)
    if spec.base != base.name:
        raise CheckpointError(
            f"reward.model: {str(folder)!r} was fitted on {spec.base!r}, but model.name is "
            f"{base.name!r}; fit it again on this model"
        )
    _check_spec(spec)
    head = new_head(base, layer=spec.layer, hidden_units=spec.hidden_units, seed=0)
    head.load_state_dict(load_file(folder / "head.safetensors"))
    head.requires_grad_(requires_grad=False)
    weights = load_file(folder / "adapter.safetensors") if spec.trunk == "adapter" else {}
    return RewardModel(head=head, spec=spec), weights


def _check_spec(spec: RewardSpec) -> None:
    """Refuse values that `save_reward_model` never writes."""
    known = spec.pooling in ("mean", "last") and spec.trunk in ("frozen", "adapter")
    if not known or spec.layer < 1 or spec.hidden_units < 0:
        raise ValueError(
            f"layer {spec.layer}, hidden_units {spec.hidden_units}, pooling {spec.pooling!r}, "
            f"trunk {spec.trunk!r}"
        )


def reward_lora(lm: PreTrainedModel, spec: RewardSpec) -> LoraConfig:
    """The adapter of a reward trunk: on every layer that its head sits above."""
    return lora_config(lm, rank=spec.lora_rank, alpha=spec.lora_alpha, layers=range(spec.layer))


def attach_reward_adapter(
    model: RewardModel, base: Base, adapter: PeftModel | None, weights: dict[str, Tensor]
) -> RewardModel:
    """Put a fitted reward adapter beside the policy's on the shared base, frozen.

    Raises:
        ConfigError: the policy is fully fine-tuned, so there is no untouched base to put it on.
        CheckpointError: the weights are not those of an adapter of this shape.
    """
    if not weights:
        return model
    if adapter is None:
        raise ConfigError(
            "reward.trunk: adapter needs model.trainable lora; use reward.trunk frozen"
        )
    adapter.add_adapter(REWARD_ADAPTER, reward_lora(base.lm, model.spec))
    own = dict(adapter.named_parameters())
    expected = {name: p.shape for name, p in own.items() if REWARD_ADAPTER in name.split(".")}
    if expected != {name: tensor.shape for name, tensor in weights.items()}:
        raise CheckpointError(
            "reward.model: adapter.safetensors is not an adapter of the rank and layers that "
            "reward_model.json names; fit it again"
        )
    for name, tensor in weights.items():
        own[name].data.copy_(tensor)
    adapter.set_adapter(POLICY_ADAPTER)
    return replace(model, adapter=adapter)
