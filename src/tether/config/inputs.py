"""What goes in: the model, the prompts, how responses are sampled, the reward."""

from dataclasses import dataclass
from typing import Literal

from tether.checks import (
    require,
    require_at_most,
    require_default,
    require_not_negative,
    require_positive,
)

MOST_TOKENS = 1_048_576
MOST_BATCH = 1_048_576


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The language model that is trained; its untouched weights are the reference."""

    name: str = "builtin:glassllm"
    """Local folder, hub name, builtin:smollm2-135m or builtin:glassllm."""
    trainable: Literal["lora", "full"] = "lora"
    """lora: adapters, the reference is the adapter switched off; full: all weights + frozen copy."""
    lora_rank: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Adapter scale times rank."""
    lora_first_layer: int = 0
    """Adapters sit on this layer and above; layers below are computed once for all (0: every layer)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights; softmax and KL are always float32."""
    trust_remote_code: bool = False
    """Let the model's folder run its own Python code; off unless you trust its author."""

    def __post_init__(self) -> None:
        require_positive("model.", self, "lora_rank", "lora_alpha")
        require_not_negative("model.", self, "lora_first_layer")
        require_at_most("model.", self, lora_rank=16_384)
        if self.trainable == "full":
            options = ("lora_rank", "lora_alpha", "lora_first_layer")
            require_default("model.", self, *options, unless="model.trainable is lora")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Where the prompts come from."""

    source: str = "builtin:glassllm-prompts"
    """JSONL, CSV or Parquet file, datasets name, or builtin:vader-movie-prompts."""
    column: str = "prompt"
    """Column with the text or the list of messages (role, content)."""
    first_words: int = 0
    """Keep only the first words of each text as prompt; 0 keeps all of it."""
    max_tokens: int = 64
    """Longest prompt, tokens; a longer one is an error."""
    per_step: int = 32
    """Prompts per step."""
    heldout: int = 64
    """Prompts kept out of training for the held-out checks."""

    def __post_init__(self) -> None:
        require_positive("prompts.", self, "max_tokens", "per_step")
        require_at_most("prompts.", self, max_tokens=MOST_TOKENS, per_step=MOST_BATCH)
        require_not_negative("prompts.", self, "first_words")
        require(2 <= self.heldout <= 128, "prompts.heldout", self.heldout, "2 to 128")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Sampling. Full support only: what is sampled is what is scored."""

    responses_per_prompt: int = 1
    """Responses sampled for each prompt."""
    max_new_tokens: int = 32
    """Length limit of a response, tokens."""
    temperature: float = 1.0
    """Divides the logits of policy and reference alike."""
    memory_gib: float = 2.0
    """Memory that one sampling or scoring batch may take, GiB; larger batches are split."""

    def __post_init__(self) -> None:
        require_positive(
            "generation.",
            self,
            "responses_per_prompt",
            "max_new_tokens",
            "temperature",
            "memory_gib",
        )
        most = {"responses_per_prompt": MOST_BATCH, "max_new_tokens": MOST_TOKENS}
        require_at_most("generation.", self, **most)


HOW_TO_FIT = ("gap", "layer", "pooling", "hidden_units", "trunk", "epochs", "max_texts")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What is maximised: a reward model (fitted here or given), Python functions, or their sum."""

    fit: str = ""
    """Ratings or preference pairs to fit the reward model on (file, datasets name, builtin); '' = none, and then
    gap, layer, pooling, hidden_units, trunk, epochs and max_texts, which say how to fit, are refused."""
    model: str = ""
    """Folder of a fitted reward model; '' = none."""
    function: tuple[str, ...] = ()
    """Python rewards, each 'module:callable' taking (prompts, responses), giving a number each."""
    weights: tuple[float, ...] = ()
    """Weight of each term, the model first; () means 1 for all."""
    missing_eos_penalty: float = 0.0
    """Taken from the score of a response that reached the limit without EOS, reward units."""
    gap: float = 1.0
    """Ratings this far apart make a pair, rating units."""
    layer: int = 16
    """The head reads the base's hidden states after this many layers."""
    pooling: Literal["mean", "last"] = "mean"
    """mean over the response's tokens (first of the sequence and EOS left out) or the last of them."""
    hidden_units: int = 64
    """Units of the head's hidden layer; 0 makes the head linear."""
    trunk: Literal["frozen", "adapter"] = "frozen"
    """frozen: the head alone is fitted; adapter: with its own LoRA adapter on the shared base."""
    epochs: int = 30
    """Passes over the training texts; 1 to 3 are enough for an adapter."""
    max_texts: int = 4000
    """Most texts used for the fit; drawn at random."""

    def __post_init__(self) -> None:
        require_positive("reward.", self, "layer", "epochs", "gap")
        require_not_negative("reward.", self, "hidden_units", "missing_eos_penalty")
        require_at_most("reward.", self, hidden_units=65_536, epochs=1_000_000)
        require(self.max_texts >= 10, "reward.max_texts", self.max_texts, "10 or more")
        if not self.fit:
            require_default("reward.", self, *HOW_TO_FIT, unless="reward.fit names what to fit on")
        both, allowed = (self.fit, self.model), "only one of the two: fit a model or name one"
        require(not all(both), "reward.fit and reward.model", both, allowed)
        for name in self.function:
            require(":" in name, "reward.function", name, "module:callable, e.g. my_rewards:short")
        terms = bool(self.fit or self.model) + len(self.function)
        require(
            not self.weights or len(self.weights) == terms,
            "reward.weights",
            self.weights,
            f"one number for each of the {terms} terms",
        )
