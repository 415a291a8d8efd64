"""Divide texts by what they are, not by where they stand, so that parts stay apart for ever."""

import hashlib


def hash_share(text: str) -> float:
    """A number in [0, 1) that follows from the text alone, case and spacing evened out."""
    normalised = " ".join(text.casefold().split())
    digest = hashlib.sha256(normalised.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def derived_seed(seed: int, purpose: str, step: int = 0) -> int:
    """A seed of its own for each purpose and step, so that no random state has to be saved."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
