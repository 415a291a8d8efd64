"""Training on sampled responses of a small language: the shipped loss with sampling's own noise."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.exact.batch import every_response
from tether.exact.enumerate import Table, sequence_logprobs
from tether.exact.placements import shipped
from tether.study.ascent import Task


def centred_scores(
    task: Task,
    policy: Table,
    drawn: Int[Tensor, " answers"],
    noise: Float[Tensor, " answers"],
    *,
    kl_coef: float,
) -> Float[Tensor, " sequences"]:
    """Scores as this batch's judge saw them, less the batch's mean shaped reward.

    A response drawn several times has the mean of its noisy scores.
    """
    counts = torch.bincount(drawn, minlength=len(task.scores)).double()
    seen = torch.zeros_like(task.scores).index_add(0, drawn, noise) / counts.clamp(min=1)
    log_ratio = sequence_logprobs(policy, task.tree) - sequence_logprobs(task.reference, task.tree)
    scores = task.scores + seen
    return scores - (scores - kl_coef * log_ratio)[drawn].mean()


def sampled_step(
    policy: Table,
    task: Task,
    drawn: Int[Tensor, " answers"],
    noise: Float[Tensor, " answers"],
    *,
    kl_coef: float,
    rate: float,
) -> Table:
    """One gradient step of the shipped loss on the drawn responses."""
    scores = centred_scores(task, policy, drawn, noise, kl_coef=kl_coef)
    logits = policy.clone().requires_grad_()
    batch = every_response(
        logits, policy, task.reference, task.tree, scores=scores, kl_coef=kl_coef
    )
    share = torch.bincount(drawn, minlength=len(scores)).double() / len(drawn)
    loss = shipped()(replace(batch, weights=share))
    return (policy - rate * torch.autograd.grad(loss, logits)[0]).log_softmax(dim=-1)


def ascend_on_samples(
    task: Task,
    *,
    kl_coef: float,
    rate: float,
    steps: int,
    answers: int,
    noise: float,
    seed: int,
) -> list[Table]:
    """The reference and the policy after each step on freshly drawn responses.

    Args:
        task: the language and its reward.
        kl_coef: β, reward per nat.
        rate: of plain gradient steps.
        steps: of training.
        answers: responses drawn at each step.
        noise: standard deviation of what the judge errs by, reward units.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    path = [task.reference]
    for _ in range(steps):
        chances = sequence_logprobs(path[-1], task.tree).exp()
        drawn = torch.multinomial(chances, answers, replacement=True, generator=generator)
        errors = noise * torch.randn(answers, generator=generator, dtype=chances.dtype)
        path.append(sampled_step(path[-1], task, drawn, errors, kl_coef=kl_coef, rate=rate))
    return path
