"""Prompt and response as one row, and the way back to the response's columns."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.core.logprobs import predicting_positions
from tether.types import Generation


def sequence(
    generation: Generation,
) -> tuple[Int[Tensor, "batch time"], Bool[Tensor, "batch time"]]:
    """Prompt and response in one row, with the mask of real tokens."""
    tokens = torch.cat([generation.prompt_tokens, generation.response_tokens], dim=1)
    return tokens, torch.cat([generation.prompt_mask, generation.response_mask], dim=1)


def response_states(
    hidden: Float[Tensor, "rows time hidden"], generation: Generation
) -> Float[Tensor, "rows response hidden"]:
    """The states that predicted the response tokens of this generation."""
    return predicting_positions(
        hidden,
        prompt_width=generation.prompt_tokens.shape[1],
        response_width=generation.response_tokens.shape[1],
    )


def last_tokens(generation: Generation) -> Int[Tensor, " batch"]:
    """The last real token of each response: EOS where it ended by itself."""
    lengths = generation.response_mask.sum(dim=1, keepdim=True)
    return generation.response_tokens.gather(1, lengths - 1).squeeze(1)
