"""Sampling: prompts in, ids with their log-probabilities and hidden states out."""

from tether.generation.sampler import sample

__all__ = ["sample"]
