"""The recipe: frozen dataclasses, the unit of each field in its docstring. Imports no torch.

YAML keys and flags are these names: `kl: {target: 6}` is `--kl.target 6`. Every value is checked
here, where it enters; nothing is clamped or filled in later.
"""

from dataclasses import dataclass, field
from typing import Literal

from tether.checks import require, require_not_negative, require_positive


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
        first, allowed = self.lora_first_layer, "0 when model.trainable is full: all is trained"
        require(self.trainable == "lora" or first == 0, "model.lora_first_layer", first, allowed)


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


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What is maximised: a reward model (fitted here or given), Python functions, or their sum."""

    fit: str = ""
    """Ratings or preference pairs to fit the reward model on (file, datasets name, builtin); '' = none."""
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
        require(self.max_texts >= 10, "reward.max_texts", self.max_texts, "10 or more")
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


@dataclass(frozen=True, kw_only=True)
class HeldoutConfig:
    """Answers to prompts outside training, judged by something other than the reward."""

    every: int = 10
    """Steps between held-out checks."""
    judge: Literal["auto", "words", "none"] = "auto"
    """words: a bag-of-words model fitted on its own part of reward.fit; auto: words if reward.fit."""

    def __post_init__(self) -> None:
        require_positive("heldout.", self, "every")


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The tether: KL(π‖π_ref) in nats per response, measured exactly and held."""

    placement: Literal["reward", "none"] = "reward"
    """reward: detached log π − log π_ref per token in the reward (exact gradient); none: only measured."""
    controller: Literal["target", "fixed"] = "target"
    """target steers β to kl.target; fixed keeps β at kl.coef."""
    target: float = 6.0
    """Target of the target controller, nats per response."""
    coef: float | None = None
    """β, reward per nat; with controller target the start value (none: computed from the target)."""
    rate: float = 0.2
    """Largest change of log β in one step of the target controller."""
    coef_min: float = 1e-4
    """Lower bound of β for the target controller; reaching it is logged."""
    coef_max: float = 10.0
    """Upper bound of β for the target controller; reaching it is logged."""

    def __post_init__(self) -> None:
        require(self.target > 0, "kl.target", self.target, "above 0 nats per response")
        require_positive("kl.", self, "rate", "coef_min")
        require(self.coef_max > self.coef_min, "kl.coef_max", self.coef_max, "above kl.coef_min")
        require(self.coef is None or self.coef >= 0, "kl.coef", self.coef, "0 or above")
        if self.controller == "fixed":
            require(self.coef is not None, "kl.coef", None, "given when kl.controller is fixed")
        if self.controller == "target" and self.coef is not None:
            allowed = f"within [{self.coef_min}, {self.coef_max}] when kl.controller is target"
            require(self.coef_min <= self.coef <= self.coef_max, "kl.coef", self.coef, allowed)
        if self.placement == "none":
            allowed = "fixed with kl.coef 0 when kl.placement is none: nothing would be steered"
            steered = self.controller == "target" or bool(self.coef)
            require(not steered, "kl.controller", self.controller, allowed)


@dataclass(frozen=True, kw_only=True)
class AdvantagesConfig:
    """Generalised advantage estimation."""

    gae_lambda: float = 0.95
    """λ: 0 is one-step TD, 1 is Monte Carlo minus V."""
    gamma: float = 1.0
    """Discount; the KL in the reward is exact only at 1, so 1 is the only value allowed with it."""

    def __post_init__(self) -> None:
        require(0 <= self.gae_lambda <= 1, "advantages.gae_lambda", self.gae_lambda, "in [0, 1]")
        require(0 < self.gamma <= 1, "advantages.gamma", self.gamma, "in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value head on the policy's last hidden state."""

    hidden_units: int = 128
    """Units of its hidden layer."""
    learning_rate: float = 1e-3
    """Learning rate of the value head."""
    coef: float = 0.5
    """Weight of the value loss; matters where its gradient reaches the trunk."""
    value_clip: float | None = None
    """Clip range of the value update, reward units; none = no clipping."""
    train_trunk: bool = False
    """Let the value loss move the policy's trunk too."""

    def __post_init__(self) -> None:
        require_positive("critic.", self, "hidden_units", "learning_rate", "coef")
        allowed = "above 0 or none"
        require(self.value_clip is None or self.value_clip > 0, "critic.value_clip",
                self.value_clip, allowed)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """The policy update."""

    learning_rate: float = 1e-3
    """Learning rate of the policy at the first step, AdamW."""
    final_learning_rate_fraction: float = 0.1
    """The learning rate falls linearly to this fraction of itself at the last step."""
    epochs: int = 1
    """Passes over each rollout."""
    minibatches: int = 2
    """Optimiser steps per pass."""
    clip_epsilon: float = 0.2
    """ε of the clipped ratio."""
    max_gradient_norm: float = 1.0
    """The gradient is scaled down to this norm."""
    max_approx_kl_old: float = 0.05
    """A minibatch whose KL to the sampling policy is above this, nats per token, ends the pass."""
    micro_batch_tokens: int = 4096
    """Most tokens, prompt and response, in one backward pass."""

    def __post_init__(self) -> None:
        require_positive("ppo.", self, "learning_rate", "epochs", "minibatches", "clip_epsilon")
        require_positive(
            "ppo.", self, "max_gradient_norm", "max_approx_kl_old", "micro_batch_tokens"
        )
        fraction = self.final_learning_rate_fraction
        require(0 <= fraction <= 1, "ppo.final_learning_rate_fraction", fraction, "in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines a run. `tether train RUN/config.yaml` reproduces it."""

    run: str = ""
    """Run folder; '' makes runs/<recipe>-<date>."""
    steps: int = 40
    """Training steps; each samples, scores and updates once."""
    seed: int = 0
    """Seed of data order and sampling; every random number follows from it and the step."""
    threads: int = 0
    """CPU threads; 0 = as many as physical cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes cuda where there is one."""
    checkpoint_every: int = 10
    """Steps between checkpoints."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Model."""
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    """Prompts."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Reward."""
    heldout: HeldoutConfig = field(default_factory=HeldoutConfig)
    """Held-out checks."""
    kl: KLConfig = field(default_factory=KLConfig)
    """The KL budget."""
    advantages: AdvantagesConfig = field(default_factory=AdvantagesConfig)
    """Advantages."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Value function."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """Policy update."""

    def __post_init__(self) -> None:
        require_positive("", self, "steps", "checkpoint_every")
        require_not_negative("", self, "threads", "seed")
        batch = self.prompts.per_step * self.generation.responses_per_prompt
        allowed = f"at most the {batch} responses of a step"
        require(self.ppo.minibatches <= batch, "ppo.minibatches", self.ppo.minibatches, allowed)
        if self.kl.placement == "reward":
            allowed = "1 while the KL is in the reward: a discount changes its gradient"
            require(self.advantages.gamma == 1, "advantages.gamma", self.advantages.gamma, allowed)
        if self.heldout.judge == "words":
            allowed = "auto or none without reward.fit: the judge is fitted on a part of its data"
            require(bool(self.reward.fit), "heldout.judge", self.heldout.judge, allowed)

    def require_reward(self) -> None:
        """Raise unless something can be maximised."""
        terms = (self.reward.fit, self.reward.model, self.reward.function)
        require(any(terms), "reward", "no term", "one of fit, model or function")
