"""How the policy is improved and checked."""

from dataclasses import dataclass
from typing import Literal

from tether.checks import require, require_at_most, require_positive


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
        require_at_most("critic.", self, hidden_units=65_536)
        allowed = "above 0 or none"
        require(self.value_clip is None or self.value_clip > 0, "critic.value_clip",
                self.value_clip, allowed)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """The policy update."""

    learning_rate: float = 1e-3
    """Learning rate of the policy at the first step, AdamW."""
    final_learning_rate_fraction: float = 0.1
    """Fraction left at the last step; it falls linearly, and --resume with other --steps stretches the fall."""
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
        require_at_most("ppo.", self, epochs=1_000_000)
        fraction = self.final_learning_rate_fraction
        require(0 <= fraction <= 1, "ppo.final_learning_rate_fraction", fraction, "in [0, 1]")
