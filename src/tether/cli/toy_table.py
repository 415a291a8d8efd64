"""The toy's result for people: a table, and a few sentences that say what it teaches."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]

DIGITS = {
    "reward": 2, "fluency": 2, "kl_nats_per_response": 3, "least_kl": 3, "efficiency": 3,
    "distinct": 0, "best_bigram_objective": 4, "bigram_efficiency": 3,
}  # fmt: skip
HEADS = {
    "reward": "\nreward", "fluency": "\nfluency", "kl_nats_per_response": "KL\nnats",
    "least_kl": "least\nKL", "efficiency": "effi-\nciency", "distinct": "distinct\nof 512",
    "best_bigram_objective": "best\nbigram J",
    "bigram_efficiency": "among\nbigrams",
}  # fmt: skip
FAR = 0.9
"""Efficiency below which a row is said to be far from the frontier."""
SHARED = ("reward", "fluency", "kl_nats_per_response", "least_kl", "efficiency", "distinct")
OURS = (*SHARED, "best_bigram_objective", "bigram_efficiency")


def show(document: dict[str, Any]) -> None:
    """Print the table and its sentences on stdout."""
    console = Console()
    article = document["objective"] == "article"
    console.print(_article_table(document) if article else _tether_table(document))
    told = _article_text(document) if article else _tether_text(document)
    for line in told:
        console.print(Text(line))
    for path in document.get("figure", ()):
        console.print(Text(f"figure: {path}"), soft_wrap=True)
    console.print(Text(f"{document['seconds']:.0f} s"))


def figure_text(row: Row, name: str) -> str:
    """A figure, with its standard deviation over seeds where there are several."""
    digits = DIGITS[name]
    text = f"{row[name]:.{digits}f}"
    return f"{text}\n±{row['spread'][name]:.{max(digits, 1)}f}" if row["spread"] else text


def _words(samples: list[list[int]]) -> str:
    return "\n".join(" ".join(map(str, sample)) for sample in samples)


def _table(first: str, names: tuple[str, ...], *more: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for head in (f"\n{first}", *(HEADS[name] for name in names)):
        table.add_column(head, justify="right", no_wrap=True)
    for head in more:
        table.add_column(f"\n{head}", no_wrap=True)
    return table


def _tether_table(document: dict[str, Any]) -> Table:
    table = _table("β", OURS, "samples")
    for row in document["rows"]:
        cells = [figure_text(row, name) for name in OURS]
        table.add_row(f"{row['coefficient']:g}", *cells, _words(row["samples"]))
    return table


def _article_table(document: dict[str, Any]) -> Table:
    table = _table("c", SHARED, "sample", "published")
    reference = document["reference"]
    table.add_row(
        "ref.", f"{reference['reward']:.2f}", f"{reference['fluency']:.2f}", "0", "0", "",
        str(reference["distinct"]), _words([reference["sample"]]), _published(reference),
    )  # fmt: skip
    for row in document["rows"]:
        cells = [figure_text(row, name) for name in SHARED]
        name = f"{row['coefficient']:g}"
        table.add_row(name, *cells, _words([row["sample"]]), _published(row))
    return table


def _published(row: Row) -> str:
    """What the article printed, reward/fluency over the sample."""
    printed = row["published"]
    if printed is None:
        return "–"
    sample = f"\n{_words([printed['sample']])}" if printed["sample"] else ""
    return f"{printed['reward']:.2f}/{printed['fluency']:.2f}{sample}"


def _tether_text(document: dict[str, Any]) -> list[str]:
    reference, rows = document["reference"], document["rows"]
    gap = max(row["objective_gap"] for row in rows)
    return [
        "",
        f"The reference earns {reference['exact_reward']:.2f} with a fluency of "
        f"{reference['exact_fluency']:.2f} nats; every figure but 'distinct' and the samples is "
        "exact, summed over all sentences.",
        "β is the price of a nat: the lower it is, the more KL the policy spends on reward, and "
        "the fewer different sentences are left.",
        "'Least KL' is what the best of all policies pays for the same reward. Ours is a bigram "
        "that can't know which step it is at; 'among bigrams' is its efficiency among its "
        "equals (a lower bound), where 1 is the most.",
        f"Training stopped at most {100 * gap:.2g} % short of the best bigram's objective "
        "J = E[r] − β KL.",
        *(
            [f"± is the standard deviation over {document['seeds']} seeds."]
            * (document["seeds"] > 1)
        ),
    ]


def _article_text(document: dict[str, Any]) -> list[str]:
    first, rows = document["first_step"], document["rows"]
    told = [
        "",
        "This objective is kept in the toy alone, to show what it does. Its 'ratio' is the sum of "
        f"the per-token ratios: before any update, where a ratio is 1, it is {first['ratio']:.1f}. "
        "With the clip at 1.2 every sentence better than the mean gets no gradient "
        f"({100 * first['silent']:.0f} % of the first batch).",
        "Its coefficient c multiplies log π − log π_ref in the loss, where the reference is a "
        "constant: it pushes away from what was just sampled and holds nothing near the reference.",
    ]
    told += [
        f"c = {row['coefficient']:g}: reward {row['exact_reward']:.2f} for "
        f"{row['kl_nats_per_response']:.1f} nats, where {row['least_kl']:.2f} suffice."
        for row in rows
        if row["efficiency"] < FAR
    ]
    moved = [f"{row['coefficient']:g}" for row in rows if not _as_published(row)]
    if moved:
        told.append(
            f"Not to the printed digit: c = {', '.join(moved)}. Such rows are chaotic: a change "
            "in the last bit of a number leads to another end; --seeds 5 says how far apart the "
            "ends are."
        )
    if document["seeds"] > 1:
        worst = max(rows, key=lambda row: row["spread"]["fluency"])
        told.append(
            f"± is the standard deviation over {document['seeds']} seeds, the published one among "
            f"them: at c = {worst['coefficient']:g} the fluency is "
            f"{worst['fluency']:.1f} ± {worst['spread']['fluency']:.1f} nats."
        )
    return told


def _as_published(row: Row) -> bool:
    """True where the published seed gave the printed digits, or none were printed."""
    printed, run = row["published"], row["runs"][0]
    return printed is None or all(
        round(run[name], 2) == printed[name] for name in ("reward", "fluency")
    )
