"""What flows through the loop: frozen, typed, shaped batches; each stage returns a new one.

The axis alphabet: `batch` responses, `prompt` prompt tokens, `response` response tokens,
`hidden` model width, `vocab` vocabulary entries, `positions` any flat list of tokens.

One alignment, stated once: column t of every `[batch response]` tensor belongs to the t-th
generated token; `logprobs[t] = log π(token t | before)` and `values[t] = V(before token t)`.
Prompts are padded on the left, responses on the right; a mask is True on real tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Left-padded prompts.

    Attributes:
        prompt_tokens: token ids, padding on the left.
        prompt_mask: True on real tokens.
        texts: the prompts as people wrote them (messages already put in words).
    """

    prompt_tokens: Int[Tensor, "batch prompt"]
    prompt_mask: Bool[Tensor, "batch prompt"]
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not bool(self.prompt_mask.any(dim=1).all()):
            empty = int((~self.prompt_mask.any(dim=1)).nonzero()[0])
            raise DataError(f"prompt {empty} of the batch has no token; remove empty prompts")

    def to(self, device: torch.device) -> "PromptBatch":
        """The same prompts on another device."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens.to(device),
            prompt_mask=self.prompt_mask.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the sampler returns; every tensor comes from the pass that sampled the tokens.

    Attributes:
        prompt_tokens: prompts repeated once per response, left-padded.
        prompt_mask: True on real prompt tokens.
        prompt_texts: one prompt text per response.
        response_tokens: sampled ids, right-padded.
        response_mask: True on sampled tokens, the first EOS included.
        sampler_logprobs: log π(token) under the sampling law, nats.
        policy_hidden: final hidden state that predicted token t.
        layer_hidden: states after the kept depths (numbers of layers), over prompt and response.
    """

    prompt_tokens: Int[Tensor, "batch prompt"]
    prompt_mask: Bool[Tensor, "batch prompt"]
    prompt_texts: tuple[str, ...]
    response_tokens: Int[Tensor, "batch response"]
    response_mask: Bool[Tensor, "batch response"]
    sampler_logprobs: Float[Tensor, "batch response"]
    policy_hidden: Float[Tensor, "batch response hidden"]
    layer_hidden: dict[int, Float[Tensor, "batch time hidden"]]

    def __post_init__(self) -> None:
        if not bool(self.response_mask.any(dim=1).all()):
            raise DataError("a response has no token; the generator must return at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Sampled responses with everything the later stages read, all of it constant.

    Attributes:
        generation: prompts, sampled ids, masks.
        texts: the responses decoded for people and reward functions; never re-encoded.
        finished: True where the response ended with EOS before the limit.
        old_logprobs: log π_old(token), nats, under the trainer's weights.
        values: V before token t, reward units.
    """

    generation: Generation
    texts: tuple[str, ...]
    finished: Bool[Tensor, " batch"]
    old_logprobs: Float[Tensor, "batch response"]
    values: Float[Tensor, "batch response"]

    @property
    def response_mask(self) -> Bool[Tensor, "batch response"]:
        """True on sampled tokens, the first EOS included."""
        return self.generation.response_mask

    @property
    def response_tokens(self) -> Int[Tensor, "batch response"]:
        """The sampled ids."""
        return self.generation.response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStates:
    """What the reference makes of the sampled sequences: hidden states of one pass.

    Attributes:
        ref_hidden: its final hidden state at the position that predicted token t.
        layer_hidden: its states after the depths that others read, over prompt and response.
    """

    ref_hidden: Float[Tensor, "batch response hidden"]
    layer_hidden: dict[int, Float[Tensor, "batch time hidden"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far the policy is from the reference along the sampled responses, nats.

    Attributes:
        kl: full-vocabulary KL(π‖π_ref) at each position; its row sum is the sequence KL.
        ref_logprobs: log π_ref(token).
        entropy: entropy of π at each position.
    """

    kl: Float[Tensor, "batch response"]
    ref_logprobs: Float[Tensor, "batch response"]
    entropy: Float[Tensor, "batch response"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimate:
    """Advantages before whitening and the targets of the value function, reward units."""

    advantages: Float[Tensor, "batch response"]
    returns: Float[Tensor, "batch response"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss summed over tokens and divided by the optimiser batch's token count.

    Attributes:
        loss: the scalar to differentiate.
        stats: detached per-token sums over the same tokens, for metrics.
    """

    loss: Float[Tensor, ""]
    stats: dict[str, Float[Tensor, ""]]


RewardFunction = Callable[[list[str], list[str]], list[float]]
"""A user's reward: (prompts, responses) -> one finite number per response."""
