"""Checks of numbers: KL, estimators, log-probabilities, what the sampler draws."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tether.core.diagnostics import Mean, sampler_bias, surprisal_gap
from tether.core.kl import k1, k2, k3
from tether.core.masking import masked_row_sum
from tether.exact.enumerate import Table, kl, sequence_logprobs
from tether.exact.selftest.bench import COOL, WARM, Bench, drift, every_response, sampled
from tether.exact.selftest.check import Check
from tether.exact.selftest.oracle import (
    known_table,
    numbers_of_responses,
    plain_logprobs,
    precise,
)
from tether.exact.tree import gather

DRAWS = 2500
"""Responses behind the checks of the sampler; enough to see a temperature of 0.8 at 6 errors."""


def tables(bench: Bench, temperature: float) -> tuple[Table, Table]:
    """The letters' policy and its reference as the oracle knows them."""
    own, ref = (known_table(name, bench.dtype, temperature) for name in ("policy", "reference"))
    return own, ref


def chances(bench: Bench, table: Table) -> Float[Tensor, " sequences"]:
    """Probability of every response."""
    return sequence_logprobs(table, bench.language.tree).exp()


def expected_kl(bench: Bench, temperature: float) -> tuple[float, float]:
    """The KL that production measures along every response, weighted by its probability."""
    policy = bench.table_policy
    own, ref = tables(bench, temperature)
    rollout = every_response(bench, policy, temperature)
    along = masked_row_sum(drift(policy, rollout, temperature).kl, rollout.response_mask)
    measured = (chances(bench, own) * along.double().cpu()).sum().item()
    return measured, kl(own, ref, bench.language.tree).item()


def estimator_mean(bench: Bench, which: str) -> tuple[float, float]:
    """Mean of an estimator over all responses, beside the oracle's."""
    own, ref = tables(bench, WARM)
    log_ratio = bench.table_rollout.old_logprobs - bench.table_drift.ref_logprobs
    estimate = {"k1": k1, "k2": k2, "k3": k3}[which](log_ratio)
    along = masked_row_sum(estimate, bench.table_rollout.response_mask)
    tree, exact = bench.language.tree, kl(own, ref, bench.language.tree).item()
    if which == "k2":
        squares = (gather(own, tree) - gather(ref, tree)).square().sum(dim=1) / 2
        exact = (chances(bench, own) * squares).sum().item()
    return (chances(bench, own) * along.double().cpu()).sum().item(), exact


def table_logprobs_error(bench: Bench, *, temperature: float) -> tuple[float, float]:
    """Largest error of the sampler's log-probabilities and the reference's, on the letters."""
    policy, language = bench.table_policy, bench.language
    rollout = sampled(bench, policy, count=200, temperature=temperature, seed=3)
    found = drift(policy, rollout, temperature)
    own, ref = tables(bench, temperature)
    mask = rollout.response_mask.cpu()
    rows = numbers_of_responses(rollout.response_tokens.cpu(), mask, language)
    width, tree = mask.shape[1], language.tree
    gaps = [
        (got.double().cpu() - gather(table, tree)[rows][:, :width])[mask].abs().max().item()
        for got, table in ((rollout.old_logprobs, own), (found.ref_logprobs, ref))
    ]
    return max(gaps), 0.0


def llama_logprobs_error(bench: Bench) -> tuple[float, float]:
    """Largest error of the Llama's log-probabilities: cache, padding, adapter, shared layers."""
    rollout = bench.llama_rollout
    found = drift(bench.llama, rollout, COOL)
    generation, worst = rollout.generation, 0.0
    models = (
        (precise(bench.llama.lm), rollout.old_logprobs),
        (precise(bench.llama_base.lm), found.ref_logprobs),
    )
    for i, real in enumerate(rollout.response_mask):
        prompt = generation.prompt_tokens[i][generation.prompt_mask[i]].tolist()
        response = rollout.response_tokens[i][real].tolist()
        for lm, got in models:
            plain = plain_logprobs(lm, prompt, response, temperature=COOL)
            worst = max(worst, (got[i][real].double().cpu() - plain).abs().max().item())
    return worst, 0.0


def wrong_masks(bench: Bench) -> tuple[float, float]:
    """Responses whose mask does not end with the first EOS, or without one at the limit."""
    rollout = sampled(bench, bench.table_policy, count=500, temperature=WARM, seed=4)
    eos, wrong = bench.language.eos, 0
    rows = zip(
        rollout.response_tokens.tolist(), rollout.response_mask.tolist(),
        rollout.finished.tolist(), strict=True,
    )  # fmt: skip
    for tokens, real, finished in rows:
        length = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        wrong += real != [t < length for t in range(len(tokens))] or finished != (eos in tokens)
    return float(wrong), 0.0


def frequency_error(bench: Bench) -> tuple[float, float]:
    """Largest gap between how often a response is drawn and its probability, standard errors."""
    policy = bench.table_policy
    own = known_table("policy", bench.dtype, COOL)
    rollout = sampled(bench, policy, count=DRAWS, temperature=COOL, seed=5)
    rows = numbers_of_responses(
        rollout.response_tokens.cpu(), rollout.response_mask.cpu(), bench.language
    )
    chance = chances(bench, own)
    drawn = torch.bincount(rows[rows >= 0], minlength=len(chance)) / DRAWS
    errors = (chance * (1 - chance) / DRAWS).sqrt()
    strays = (rows < 0).sum().item() * math.sqrt(DRAWS)
    return ((drawn - chance).abs() / errors).max().item() + strays, 0.0


def surprisal_at_the_start(bench: Bench) -> tuple[float, float]:
    """mean(−log π(token) − H) in standard errors, where policy and reference are the same."""
    policy = bench.tabular("reference")
    rollout = sampled(bench, policy, count=DRAWS, temperature=WARM, seed=6)
    entropy = drift(policy, rollout, WARM).entropy
    return _in_errors(surprisal_gap(rollout.old_logprobs, entropy, rollout.response_mask)), 0.0


def bias_later(bench: Bench) -> tuple[float, float]:
    """mean(k3 − k1) in standard errors, where policy and reference differ."""
    rollout = sampled(bench, bench.table_policy, count=DRAWS, temperature=WARM, seed=7)
    ref_logprobs = drift(bench.table_policy, rollout, WARM).ref_logprobs
    return _in_errors(sampler_bias(rollout.old_logprobs, ref_logprobs, rollout.response_mask)), 0.0


def _in_errors(gap: Mean) -> float:
    """The gap in standard errors; equal gaps other than 0 are infinitely many of them."""
    return math.inf if gap.z is None else gap.z


VALUES = (
    Check(
        name="KL",
        proves="The exact KL summed along responses has the enumerated sequence KL as its mean.",
        measure=lambda bench: expected_kl(bench, WARM), float32=2e-6, bfloat16=2e-6,
    ),
    Check(
        name="KL at temperature 0.7",
        proves="The same where both sides' logits are divided by a temperature.",
        measure=lambda bench: expected_kl(bench, COOL), float32=2e-6, bfloat16=2e-6,
    ),
    Check(
        name="k1, mean",
        proves="k1 is an unbiased estimate of the sequence KL.",
        measure=lambda bench: estimator_mean(bench, "k1"), float32=2e-6, bfloat16=2e-6,
    ),
    Check(
        name="k2, mean",
        proves="k2 has the bias that it must have.",
        measure=lambda bench: estimator_mean(bench, "k2"), float32=2e-6, bfloat16=2e-6,
    ),
    Check(
        name="k3, mean",
        proves="k3 is an unbiased estimate of the sequence KL.",
        measure=lambda bench: estimator_mean(bench, "k3"), float32=2e-6, bfloat16=2e-6,
    ),
    Check(
        name="log-probs at temperature 0.7",
        proves="Sampler and reference give the log-probabilities of softmax(logits/T), in float32.",
        measure=lambda bench: table_logprobs_error(bench, temperature=COOL),
        float32=2e-6, bfloat16=2e-6,
    ),
    Check(
        name="log-probs of the Llama",
        proves="So they do with a cache, padding on both sides, an adapter and shared layers.",
        measure=llama_logprobs_error, float32=2e-5, bfloat16=0.1,
    ),
    Check(
        name="EOS in the mask",
        proves="A response ends with its first EOS, which counts; nothing after it does.",
        measure=wrong_masks, float32=0.0, bfloat16=0.0,
    ),
    Check(
        name="frequency of responses, s.e.",
        proves="Every response is drawn as often as its probability says.",
        measure=frequency_error, float32=4.5, bfloat16=4.5,
    ),
    Check(
        name="surprisal gap at π = π_ref, s.e.",
        proves="The alarm that sees a wrong sampler while every log-ratio is 0 is at rest.",
        measure=surprisal_at_the_start, float32=4.0, bfloat16=4.0,
    ),
    Check(
        name="mean(k3 − k1), s.e.",
        proves="The alarm that sees a wrong sampler during training is at rest.",
        measure=bias_later, float32=4.0, bfloat16=4.0,
    ),
)  # fmt: skip
"""In the order in which they are shown."""
