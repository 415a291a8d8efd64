"""Held-out checks: answers to prompts outside training, beside the reference's answers to the same.

Three kinds of evidence, because a judge that reads single answers cannot see a collapse: the
judge (another kind of model on other data), diversity across all answers, and whether an answer
still depends on its prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.core.diagnostics import mean_with_error, sequence_kl
from tether.core.logprobs import chunked_token_logprobs
from tether.core.masking import masked_row_sum
from tether.generation.sequences import response_states, sequence
from tether.guard.diversity import distinct_n, top_ngram
from tether.models.load import Policy, reference_of
from tether.models.trunk import final_hidden, output_head
from tether.models.word_judge import WordJudge
from tether.types import Drift, Generation, Rollout

DEPENDENCE_ANSWERS = 24
DEPENDENCE_OTHERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers to the held-out prompts and what was measured on them.

    Attributes:
        prompts: the held-out prompts.
        responses: one answer each.
        scores: training reward of each, reward units.
        judged: the judge's score of each; empty without a judge.
    """

    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    scores: tuple[float, ...]
    judged: tuple[float, ...]

    def as_json(self) -> dict:
        """Plain lists, for the run folder."""
        return asdict(self)


def answers(rollout: Rollout, scores: Float[Tensor, " batch"], judge: WordJudge | None) -> Answers:
    """Judge the answers of a rollout over held-out prompts."""
    return Answers(
        prompts=rollout.generation.prompt_texts,
        responses=rollout.texts,
        scores=tuple(scores.tolist()),
        judged=tuple(judge.score(list(rollout.texts))) if judge else (),
    )


def compare_answers(policy: Answers, reference: Answers) -> dict[str, float]:
    """Metrics of the policy's answers against the reference's, paired by prompt.

    Judge differences are in standard deviations of the judge over the reference's answers; where
    it gives all of those the same score there is no such unit and no judge metric.
    """
    texts, ref_texts = list(policy.responses), list(reference.responses)
    distinct, ref_distinct = distinct_n(texts, 2), distinct_n(ref_texts, 2)
    scores, ref_scores = torch.tensor(policy.scores), torch.tensor(reference.scores)
    row = {
        "heldout/score": scores.mean().item(),
        "heldout/score_gain": (scores.mean() - ref_scores.mean()).item(),
        "heldout/distinct_2": distinct,
        "heldout/top_trigram_count": float(top_ngram(texts, 3)[1]),
    }
    if ref_distinct > 0:
        row["heldout/distinct_2_ratio"] = distinct / ref_distinct
    judged = policy.judged and judge_varies(reference)
    return row | (_judge_metrics(policy, reference) if judged else {})


def judge_varies(reference: Answers) -> bool:
    """True where the judge tells at least two of the answers apart."""
    return len(set(reference.judged)) > 1


def _judge_metrics(policy: Answers, reference: Answers) -> dict[str, float]:
    """Paired judge gain with a normal 95 % interval over prompts, win rate, and correlation."""
    judged, ref_judged = torch.tensor(policy.judged), torch.tensor(reference.judged)
    unit = ref_judged.std()
    difference = judged - ref_judged
    gain = mean_with_error(difference / unit)
    assert gain.standard_error is not None  # prompts.heldout is 2 or more
    pair = torch.stack([judged, torch.tensor(policy.scores)])
    correlation = torch.corrcoef(pair)[0, 1].item()
    wins = (difference > 0).double() + 0.5 * (difference == 0).double()
    row = {
        "heldout/judge_gain": gain.mean,
        "heldout/judge_gain_low": gain.mean - 1.96 * gain.standard_error,
        "heldout/judge_gain_high": gain.mean + 1.96 * gain.standard_error,
        "heldout/win_rate": wins.mean().item(),
    }
    # undefined, not 0, where every answer got the same number
    return (
        row if math.isnan(correlation) else row | {"heldout/judge_score_correlation": correlation}
    )


@torch.no_grad()
def prompt_dependence(
    policy: Policy, rollout: Rollout, drift: Drift, *, temperature: float
) -> float:
    """How much likelier the reference finds an answer after its own prompt than after others, nats.

        log π_ref(answer | its prompt) − log mean_j π_ref(answer | other prompt j)

    Near 0 every answer would do for every prompt. Averaged over the first answers, each against
    the next few prompts in order.
    """
    count = len(rollout.texts)
    rows = torch.arange(min(DEPENDENCE_ANSWERS, count))
    shifts = [s for s in range(1, count) if s <= DEPENDENCE_OTHERS]
    own = masked_row_sum(drift.ref_logprobs, rollout.response_mask)[rows]
    others = torch.stack(
        [_under_prompts(policy, rollout, rows, (rows + s) % count, temperature) for s in shifts]
    )
    mean = others.double().logsumexp(dim=0) - math.log(len(shifts))
    return (own.double() - mean).mean().item()


def _under_prompts(
    policy: Policy,
    rollout: Rollout,
    rows: Int[Tensor, " rows"],
    prompts: Int[Tensor, " rows"],
    temperature: float,
) -> Float[Tensor, " rows"]:
    """log π_ref of some answers after other prompts, nats per response."""
    old = rollout.generation
    swapped = Generation(
        prompt_tokens=old.prompt_tokens[prompts],
        prompt_mask=old.prompt_mask[prompts],
        prompt_texts=tuple(old.prompt_texts[i] for i in prompts.tolist()),
        response_tokens=old.response_tokens[rows],
        response_mask=old.response_mask[rows],
        sampler_logprobs=old.sampler_logprobs[rows],
        policy_hidden=old.policy_hidden[rows],
        layer_hidden={},
    )
    tokens, mask = sequence(swapped)
    with reference_of(policy) as reference:
        states = response_states(final_hidden(reference, tokens, mask), swapped)
        real = swapped.response_mask
        logprobs = chunked_token_logprobs(
            states[real], swapped.response_tokens[real], output_head(reference),
            temperature=temperature, head_is_frozen=True,
        )  # fmt: skip
    return masked_row_sum(torch.zeros(real.shape).to(logprobs).masked_scatter(real, logprobs), real)


def heldout_row(
    policy: Policy,
    rollout: Rollout,
    drift: Drift,
    found: Answers,
    reference: Answers,
    *,
    temperature: float,
) -> dict[str, float]:
    """All held-out metrics of one check."""
    return compare_answers(found, reference) | {
        "heldout/kl_nats_per_response": sequence_kl(drift.kl, rollout.response_mask).mean,
        "heldout/prompt_dependence": prompt_dependence(
            policy, rollout, drift, temperature=temperature
        ),
    }


def sample_rows(
    step: int, rollout: Rollout, drift: Drift, found: Answers, reference: Answers
) -> list[dict]:
    """Rows of samples.jsonl: each answer beside the reference's to the same prompt."""
    rows = []
    for i, prompt in enumerate(found.prompts):
        real = rollout.response_mask[i]
        kl = [round(value, 6) for value in drift.kl[i][real].tolist()]
        rows.append(
            {
                "step": step,
                "prompt": prompt,
                "response": found.responses[i],
                "reference": reference.responses[i],
                "ids": rollout.response_tokens[i][real].tolist(),
                "score": found.scores[i],
                "reference_score": reference.scores[i],
                "judge": found.judged[i] if found.judged else None,
                "reference_judge": reference.judged[i] if reference.judged else None,
                "kl": kl,
                "kl_nats": sum(kl),
            }
        )
    return rows


def answers_from_json(data: dict[str, Sequence]) -> Answers:
    """Read back what `Answers.as_json` wrote."""
    return Answers(**{name: tuple(values) for name, values in data.items()})
