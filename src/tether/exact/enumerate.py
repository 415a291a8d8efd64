"""Exact expectations: a language model becomes a table, and sums run over all responses.

Every function is differentiable in its tables, so an exact gradient is one call of autograd.
Everything is nats, in the precision of the tables; argument order is policy, reference.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.logprobs import log_softmax
from tether.exact.tree import Tree, gather, gather_states
from tether.models.trunk import final_hidden, output_head

Table = Float[Tensor, "prefixes vocab"]
"""Next-token log-probabilities of every prefix of a tree, nats."""


def read_table(
    lm: PreTrainedModel,
    tree: Tree,
    *,
    prompt: tuple[int, ...],
    temperature: float = 1.0,
    rows: int = 4096,
) -> Table:
    """Read the table of any causal language model; each prefix is read once.

    Args:
        lm: the model; with gradients on, the table is differentiable in its parameters.
        tree: the language's responses.
        prompt: at least one token before the response.
        temperature: divides the logits.
        rows: prefixes in one pass.
    """
    head, parts = output_head(lm), []
    for level in tree.levels:
        for prefixes in level.split(rows):
            start = torch.tensor(prompt).expand(len(prefixes), -1)
            tokens = torch.cat([start, prefixes], dim=1).to(lm.device)
            mask = torch.ones_like(tokens, dtype=torch.bool)
            parts.append(log_softmax(head(final_hidden(lm, tokens, mask)[:, -1]), temperature))
    return torch.cat(parts)


def sequence_logprobs(policy: Table, tree: Tree) -> Float[Tensor, " sequences"]:
    """log π(y) of every response; the exponentials sum to 1."""
    return gather(policy, tree).sum(dim=1)


def visits(policy: Table, tree: Tree) -> Float[Tensor, " prefixes"]:
    """Probability that a response passes through each prefix."""
    reached = [torch.ones_like(policy[:1, 0])]
    for span in tree.spans[:-1]:
        flow = reached[-1][:, None] * policy[span].exp()
        reached.append(flow[tree.next_prefix[span] >= 0])  # row by row: the next level's order
    return torch.cat(reached)


def expectation(
    values: Float[Tensor, " sequences"], policy: Table, tree: Tree
) -> Float[Tensor, ""]:
    """E over responses y ~ π of a number for each response."""
    return (sequence_logprobs(policy, tree).exp() * values).sum()


def kl(policy: Table, reference: Table, tree: Tree) -> Float[Tensor, ""]:
    """KL(π‖π_ref) = Σ_y π(y) (log π(y) − log π_ref(y)), nats per response."""
    log_ratio = sequence_logprobs(policy, tree) - sequence_logprobs(reference, tree)
    return expectation(log_ratio, policy, tree)


def state_kl(policy: Table, reference: Table) -> Float[Tensor, " prefixes"]:
    """Full-vocabulary KL(π‖π_ref) of the next token at each prefix."""
    return (policy.exp() * (policy - reference)).sum(dim=-1)


def rao_blackwell(policy: Table, reference: Table, tree: Tree) -> Float[Tensor, " sequences"]:
    """Σₜ KLₜ(sₜ) along each response: what production measures; its mean under π is the KL."""
    return gather_states(state_kl(policy, reference), tree).sum(dim=1)


def kl_by_states(policy: Table, reference: Table, tree: Tree) -> Float[Tensor, ""]:
    """KL(π‖π_ref) = Σ_s P_π(s) KL(π(·|s)‖π_ref(·|s)): the same number along another path."""
    return (visits(policy, tree) * state_kl(policy, reference)).sum()


def entropy(policy: Table, tree: Tree) -> Float[Tensor, ""]:
    """Entropy of the distribution over responses, nats."""
    return -expectation(sequence_logprobs(policy, tree), policy, tree)


def mean_length(policy: Table, tree: Tree) -> Float[Tensor, ""]:
    """Expected tokens of a response, the EOS included."""
    return expectation(tree.mask.sum(dim=1).to(policy), policy, tree)


def objective(
    policy: Table,
    reference: Table,
    rewards: Float[Tensor, " sequences"],
    tree: Tree,
    *,
    kl_coef: float,
) -> Float[Tensor, ""]:
    """J(π) = E[r] − β KL(π‖π_ref), reward units."""
    return expectation(rewards, policy, tree) - kl_coef * kl(policy, reference, tree)


def gradient(value: Float[Tensor, ""], parameter: Tensor) -> Tensor:
    """Exact gradient of an exact number; the graph is kept for more of them."""
    return torch.autograd.grad(value, parameter, retain_graph=True)[0]
