"""Coefficients that published systems used, with their source and what they would buy."""

from dataclasses import dataclass

from tether.study.lessons.page import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One published KL coefficient.

    Attributes:
        system: who trained what.
        place: where the KL stood.
        kl_coef: β as stated.
        scale: what the source says about the reward's scale and the KL's unit.
        source: where it is stated.
    """

    system: str
    place: str
    kl_coef: float
    scale: str
    source: str


NORMALISED = "reward model at mean 0, sd 1 on reference samples"
UNSTATED = "scale as trained"
SETTINGS = (
    Setting(
        system="Ziegler 2019, sentiment", place="reward", kl_coef=0.15,
        scale=f"{NORMALISED}; adaptive to 6 nats per 24 tokens", source="published code",
    ),
    Setting(
        system="Ziegler 2019, TL;DR", place="reward", kl_coef=0.03, scale=NORMALISED,
        source="published code",
    ),
    Setting(
        system="Ziegler 2019, CNN/DM", place="reward", kl_coef=0.01, scale=NORMALISED,
        source="published code",
    ),
    Setting(
        system="InstructGPT", place="reward", kl_coef=0.02, scale=UNSTATED,
        source="arXiv:2203.02155",
    ),
    Setting(
        system="Bai 2022", place="reward", kl_coef=0.001, scale=UNSTATED, source="arXiv:2204.05862"
    ),
    Setting(
        system="Llama 2, 7B and 13B", place="reward", kl_coef=0.01, scale=UNSTATED,
        source="arXiv:2307.09288",
    ),
    Setting(
        system="Llama 2, 34B and 70B", place="reward", kl_coef=0.005, scale=UNSTATED,
        source="arXiv:2307.09288",
    ),
    Setting(
        system="Tülu 3 RLVR, 8B", place="reward", kl_coef=0.05, scale="verifiable reward",
        source="arXiv:2411.15124",
    ),
    Setting(
        system="Coste 2023", place="reward", kl_coef=0.01, scale=UNSTATED, source="arXiv:2310.02743"
    ),
    Setting(
        system="DeepSeekMath", place="loss, k3 per token", kl_coef=0.04,
        scale="advantages divided by each group's sd", source="arXiv:2402.03300",
    ),
    Setting(
        system="DeepSeek-R1", place="loss, k3 per token", kl_coef=0.001,
        scale="advantages divided by each group's sd", source="arXiv:2501.12948",
    ),
)  # fmt: skip


def gaussian_kl(kl_coef: float, *, reward_std: float = 1.0) -> float:
    """KL of the optimum where the reference's reward is Gaussian: sd²/(2β²), nats."""
    return reward_std**2 / (2 * kl_coef**2)


def published_table() -> Table:
    """The settings, and the KL at which β alone would stop a Gaussian reward of sd 1.

    Coefficients in the loss per token have no such number: they price another quantity.
    """
    return Table(
        caption="Published coefficients; the last column holds only if the reward has sd 1",
        columns=(
            Column(name="system"), Column(name="KL in"), Column(name="β", format="g"),
            Column(name="scale"), Column(name="stated in"),
            Column(name="1/(2β²), nats", format=",.0f"),
        ),
        rows=tuple(
            (
                s.system, s.place, s.kl_coef, s.scale, s.source,
                gaussian_kl(s.kl_coef) if s.place == "reward" else "",
            )
            for s in SETTINGS
        ),
    )  # fmt: skip
