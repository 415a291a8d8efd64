"""From hidden states to log-probabilities of given tokens, a chunk of positions at a time.

The shift by one lives here alone: `predicting_positions` picks, for response token t, the hidden
state that predicted it. Softmax is float32 whatever the model's precision; temperature divides
logits, never log-probabilities. Nothing of size positions × vocabulary outlives its chunk.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Float[Tensor, "positions hidden"]], Float[Tensor, "positions vocab"]]
"""Hidden states to logits; frozen unless the model is fully fine-tuned."""

CHUNK_POSITIONS = 256
"""Positions whose full-vocabulary logits exist at once (50 MB at 49,152 entries in float32)."""
CHUNK_LOGITS = CHUNK_POSITIONS * 49_152
"""As many logits may exist at once where the vocabulary is small."""


def predicting_positions(
    hidden: Float[Tensor, "batch time hidden"], *, prompt_width: int, response_width: int
) -> Float[Tensor, "batch response hidden"]:
    """Select the state that predicted each response token: one before the token itself."""
    return hidden[:, prompt_width - 1 : prompt_width - 1 + response_width]


def chunk_positions(vocab_size: int) -> int:
    """Positions whose logits fit into one chunk: more than CHUNK_POSITIONS for a small vocabulary.

    A language of eight words would otherwise spend its time on the chunks' overhead.
    """
    return max(CHUNK_POSITIONS, CHUNK_LOGITS // vocab_size)


def log_softmax(
    logits: Float[Tensor, "*batch vocab"], temperature: float
) -> Float[Tensor, "*batch vocab"]:
    """Turn logits into log-probabilities at a temperature, in at least float32."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(precise / temperature, dim=-1)


def token_logprobs(
    logits: Float[Tensor, "*batch vocab"], tokens: Int[Tensor, "*batch"], temperature: float
) -> Float[Tensor, "*batch"]:
    """Select log π(token) from full logits, in nats."""
    return log_softmax(logits, temperature).gather(-1, tokens[..., None]).squeeze(-1)


class _FrozenHeadLogprobs(torch.autograd.Function):
    """Log-probabilities that already hold their slope in the hidden state.

    Each output depends on its own row alone, so ∂log π/∂hidden can be taken while the chunk's
    logits exist; the backward pass only scales it, and the head is applied once.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        tokens: Tensor,
        head: Head,
        temperature: float,
    ) -> Tensor:
        """Compute log-probabilities and their slopes."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logprobs = token_logprobs(head(leaf), tokens, temperature)
            (slope,) = torch.autograd.grad(logprobs.sum(), leaf)
        ctx.save_for_backward(slope)
        return logprobs.detach()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Scale the stored slopes by the incoming gradient."""
        (slope,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (grad[:, None] * slope).to(slope.dtype), None, None, None


def chunked_token_logprobs(
    hidden: Float[Tensor, "positions hidden"],
    tokens: Int[Tensor, " positions"],
    head: Head,
    *,
    temperature: float,
    head_is_frozen: bool,
    chunk: int = CHUNK_POSITIONS,
) -> Float[Tensor, " positions"]:
    """Log-probability of one token at each position, differentiable, in bounded memory.

    Args:
        hidden: final hidden state that predicts each token.
        tokens: the token to score at each position.
        head: maps hidden states to logits.
        temperature: divides the logits.
        head_is_frozen: True where no parameter of the head is trained; then the head is applied
            once for both passes. Otherwise the backward pass applies it again, chunk by chunk.
        chunk: positions whose logits exist at once.

    Returns:
        log π(token), nats, float32 (float64 for a float64 model).
    """
    parts = []
    alone = len(tokens) <= chunk  # a single chunk computed twice would save no memory
    for states, targets in zip(hidden.split(chunk), tokens.split(chunk), strict=True):
        if not torch.is_grad_enabled() or (alone and not head_is_frozen):
            part = token_logprobs(head(states), targets, temperature)
        elif head_is_frozen:
            part = _FrozenHeadLogprobs.apply(states, targets, head, temperature)
        else:
            part = checkpoint(
                lambda h, t: token_logprobs(head(h), t, temperature),
                states, targets, use_reentrant=False,
            )  # fmt: skip
        parts.append(part)
    return torch.cat(parts)  # type: ignore[arg-type]
