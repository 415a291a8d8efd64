"""`tether show`: a run's newest held-out answers beside the reference's, in the terminal."""

from typing import Any

from tether.cli.arguments import existing_run, parser, print_json
from tether.errors import ConfigError


def run(arguments: list[str]) -> int:
    """Print samples of the last step that has some."""
    options = parser("show", "Show a run's newest answers beside the reference's.")
    options.add_argument("run", metavar="RUN", help="run folder")
    options.add_argument("--count", type=int, default=5, help="samples to show (default: 5)")
    options.add_argument("--json", action="store_true", help="print all of them as JSON")
    given = options.parse_args(arguments)
    if given.count < 1:
        raise ConfigError(f"--count: got {given.count}; it must be 1 or more")
    folder = existing_run(given.run)

    from tether.report.read import last_samples, read_run

    samples = last_samples(read_run(folder).samples)
    if given.json:
        print_json({"run": str(folder), "samples": samples})
    elif not samples:
        raise ConfigError(f"RUN: {given.run!r} has no samples yet; they come with held-out checks")
    else:
        _show(samples, given.count)
    return 0


def _show(samples: list[dict[str, Any]], count: int) -> None:
    from rich.console import Console

    from tether.cli.display import side_by_side

    console = Console()
    console.print(
        f"step {samples[0]['step']}: {min(count, len(samples))} of {len(samples)} samples"
    )
    for row in samples[:count]:
        console.print(
            side_by_side(
                row["prompt"], row["reference"], row["response"],
                reference_title=f"reference, score {row['reference_score']:.3g}",
                policy_title=f"policy, score {row['score']:.3g}, KL {row['kl_nats']:.3g} nats",
            )
        )  # fmt: skip
