"""The account of a run: nats spent, reward bought, and the price of the next nat."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One step's entry; `ledger.jsonl` holds one a step.

    Attributes:
        step: training step.
        nats: exact KL(π‖π_ref) now, nats per response.
        reward_gained: mean score minus the reference's mean score, reward units.
        heldout_gained: the same by the held-out judge, its units; None between checks.
        reward_per_nat: reward_gained / nats; None at 0 nats.
        shadow_price: β, what the last nat has to earn at the optimum, reward per nat.
    """

    step: int
    nats: float
    reward_gained: float
    heldout_gained: float | None
    reward_per_nat: float | None
    shadow_price: float


def ledger_row(
    *,
    step: int,
    nats: float,
    score: float,
    reference_score: float,
    heldout_gained: float | None,
    kl_coef: float,
) -> dict[str, float | int | None]:
    """Book one step, as a plain dictionary in the order of `LedgerRow`'s fields."""
    gained = score - reference_score
    row = LedgerRow(
        step=step,
        nats=nats,
        reward_gained=gained,
        heldout_gained=heldout_gained,
        reward_per_nat=gained / nats if nats > 0 else None,
        shadow_price=kl_coef,
    )
    return asdict(row)
