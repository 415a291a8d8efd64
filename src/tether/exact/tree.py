"""All responses of a small language, as a tree: prefixes to choose at, sequences that end.

Prefixes and sequences are numbered breadth-first, tokens in order of their ids; a sequence is
listed where it ends, by EOS or at the length limit. A *table* is one row of next-token
log-probabilities for each prefix, so a language model on this tree is a table.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.core.masking import length_mask
from tether.errors import ConfigError

MOST_SEQUENCES = 2_000_000
"""More would not be enumerated in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Every prefix and every response.

    Attributes:
        vocab_size: V.
        eos: id that ends a response, or None.
        levels: prefixes of each length 0, 1, …; their rows joined are the numbered prefixes.
        tokens: every response, right-padded with 0.
        mask: True on real tokens, the EOS included.
        prefix: number of the prefix at which token t was chosen; 0 on padding.
        next_prefix: number of the prefix after each choice, −1 where it ends the response.
        ends: number of the sequence that a choice completes, −1 where it goes on.
    """

    vocab_size: int
    eos: int | None
    levels: tuple[Int[Tensor, "_ _"], ...]
    tokens: Int[Tensor, "sequences response"]
    mask: Bool[Tensor, "sequences response"]
    prefix: Int[Tensor, "sequences response"]
    next_prefix: Int[Tensor, "prefixes vocab"]
    ends: Int[Tensor, "prefixes vocab"]

    @property
    def length(self) -> int:
        """The limit, tokens."""
        return len(self.levels)

    @property
    def spans(self) -> list[slice]:
        """The numbers of the prefixes of each length."""
        spans, start = [], 0
        for level in self.levels:
            spans.append(slice(start, start + len(level)))
            start += len(level)
        return spans


def grow_tree(*, vocab_size: int, length: int, eos: int | None) -> Tree:
    """Enumerate all responses of at most `length` tokens.

    Raises:
        ConfigError: there are more than two million.
    """
    _check_size(vocab_size, length, eos)
    going = [a for a in range(vocab_size) if a != eos]
    levels, tokens, paths, nexts, ends = [torch.zeros(1, 0, dtype=torch.long)], [], [], [], []
    path = levels[0]  # numbers of the prefixes on the way to a level
    first, listed = 0, 0
    for depth in range(length):
        level, last = levels[-1], depth + 1 == length
        rows = len(level)
        closing = [a for a in range(vocab_size) if last or a == eos]
        path = torch.cat([path, torch.arange(first, first + rows)[:, None]], dim=1)
        first += rows
        tokens.append(_extended(level, closing))
        paths.append(path.repeat_interleave(len(closing), dim=0))
        ends.append(_numbered(rows, vocab_size, closing, start=listed))
        nexts.append(_numbered(rows, vocab_size, [] if last else going, start=first))
        listed += rows * len(closing)
        if not last:
            path = path.repeat_interleave(len(going), dim=0)
            levels.append(_extended(level, going))
    lengths = torch.cat([torch.full((len(t),), t.shape[1]) for t in tokens])
    return Tree(
        vocab_size=vocab_size,
        eos=eos,
        levels=tuple(levels),
        tokens=_padded(tokens, length),
        mask=length_mask(lengths, length),
        prefix=_padded(paths, length),
        next_prefix=torch.cat(nexts),
        ends=torch.cat(ends),
    )


def _check_size(vocab_size: int, length: int, eos: int | None) -> None:
    """Refuse languages that are too large."""
    count = vocab_size * (vocab_size - (eos is not None)) ** (length - 1)
    if count > MOST_SEQUENCES:
        raise ConfigError(
            f"vocabulary {vocab_size} and length {length} make over {count:,} responses; at most "
            f"{MOST_SEQUENCES:,} are enumerated; shorten the language or use tether.exact.markov"
        )


def _extended(level: Tensor, choices: list[int]) -> Tensor:
    """Every row with every choice appended, rows first."""
    last = torch.tensor(choices, dtype=torch.long).repeat(len(level))[:, None]
    return torch.cat([level.repeat_interleave(len(choices), dim=0), last], dim=1)


def _numbered(rows: int, vocab_size: int, choices: list[int], *, start: int) -> Tensor:
    """Number the choices of each row onward from `start`, row by row; −1 elsewhere."""
    numbers = torch.full((rows, vocab_size), -1)
    count = rows * len(choices)
    numbers[:, choices] = torch.arange(start, start + count).reshape(rows, len(choices))
    return numbers


def _padded(parts: list[Tensor], width: int) -> Tensor:
    """Rows of different widths in one matrix, zeros on the right."""
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in parts])


def gather(
    values: Float[Tensor, "prefixes vocab"], tree: Tree
) -> Float[Tensor, "sequences response"]:
    """The entry of each chosen token along each sequence; 0 on padding."""
    return torch.where(tree.mask, values[tree.prefix, tree.tokens], 0.0)


def gather_states(
    values: Float[Tensor, " prefixes"], tree: Tree
) -> Float[Tensor, "sequences response"]:
    """The entry of the prefix before each token along each sequence; 0 on padding."""
    return torch.where(tree.mask, values[tree.prefix], 0.0)
