"""The whole recipe, and what must fit together across its sections."""

from dataclasses import dataclass, field
from typing import Literal

from tether.checks import require, require_at_most, require_not_negative, require_positive
from tether.config.inputs import (
    MOST_BATCH,
    GenerationConfig,
    ModelConfig,
    PromptsConfig,
    RewardConfig,
)
from tether.config.kl import KLConfig
from tether.config.training import AdvantagesConfig, CriticConfig, HeldoutConfig, PPOConfig


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
    """CPU threads; 0 = as many as cores that the process may use."""
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
        require_at_most("", self, steps=1_000_000_000, threads=4096, seed=2**63 - 1)
        batch = self.prompts.per_step * self.generation.responses_per_prompt
        allowed = f"2 to {MOST_BATCH} responses a step: one has no advantage over another"
        name = "prompts.per_step × generation.responses_per_prompt"
        require(2 <= batch <= MOST_BATCH, name, batch, allowed)
        allowed = f"at most the {batch} responses of a step"
        require(self.ppo.minibatches <= batch, "ppo.minibatches", self.ppo.minibatches, allowed)
        if self.kl.placement == "reward":
            allowed = "1 while the KL is in the reward: a discount changes its gradient"
            require(self.advantages.gamma == 1, "advantages.gamma", self.advantages.gamma, allowed)
        if self.model.trainable == "full":
            allowed = "frozen when model.trainable is full: no base is left to put an adapter on"
            require(self.reward.trunk == "frozen", "reward.trunk", self.reward.trunk, allowed)
        if self.heldout.judge == "words":
            allowed = "auto or none without reward.fit: the judge is fitted on a part of its data"
            require(bool(self.reward.fit), "heldout.judge", self.heldout.judge, allowed)

    def require_reward(self) -> None:
        """Raise unless something can be maximised."""
        terms = (self.reward.fit, self.reward.model, self.reward.function)
        require(any(terms), "reward", "no term", "one of fit, model or function")
