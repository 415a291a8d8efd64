"""Puts the page together: numbers, figures, samples and settings into one HTML file."""

import json
from pathlib import Path
from typing import Any

from tether.metrics import REGISTRY
from tether.report.figures import figures
from tether.report.headline import gained, judged, spent, summary
from tether.report.read import RunFiles, last_samples, read_run
from tether.report.text import visible

SAMPLES_SHOWN = 12
TEMPLATES = Path(__file__).parent / "templates"


def build_report(run: Path) -> Path:
    """Write RUN/report.html from what lies in the run folder, also while the run goes on.

    Args:
        run: the run folder.

    Returns:
        Path of the page.

    Raises:
        DataError: it is no run folder, or a file in it is damaged.
    """
    page = render(read_run(run))
    target = run / "report.html"
    aside = run / "report.html.writing"
    aside.write_text(page, encoding="utf-8")
    aside.replace(target)
    return target


def render(files: RunFiles) -> str:
    """The page as text; everything that came from a model, a file or a person is escaped."""
    import jinja2  # noqa: PLC0415  # neither is needed by those who import only the headline
    from markupsafe import Markup  # noqa: PLC0415
    from plotly.offline import get_plotlyjs  # noqa: PLC0415

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = lambda text: visible(str(text))
    drawn = figures(files.metrics, files.ledger)
    samples = last_samples(files.samples)
    return environment.get_template(
        "report.html.j2"
    ).render(
        files=files,
        status=status(files),
        cards=cards(files),
        figure_names=list(drawn),
        figures_json=Markup(script_json(drawn)),  # "<" is escaped in it
        plotly=Markup(get_plotlyjs()) if drawn else "",  # the library's own text
        samples=[_sample(row) for row in samples[:SAMPLES_SHOWN]],
        sample_count=len(samples),
        sample_step=samples[0]["step"] if samples else None,
        last_row=_last_row(files),
    )


def script_json(document: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can close the element."""
    return json.dumps(document, allow_nan=False).replace("<", "\\u003c")


def status(files: RunFiles) -> str:
    """Where the run stands, in words."""
    done = len(files.metrics)
    if files.result is None:
        return f"{done} of {files.steps_planned} steps so far; not finished"
    reason = files.result["stopped_by"]
    end = "finished" if reason == "steps" else f"stopped by {reason}"
    return f"{end}: {done} steps in {files.result['seconds']:.0f} s"


def cards(files: RunFiles) -> list[dict[str, str]]:
    """The three numbers at the top of the page, with what they mean."""
    numbers = summary(files.metrics)
    kl = spent(numbers).removeprefix("KL ")
    value, _, unit = kl.partition(" nats")
    gain, _, interval = judged(numbers).partition(" [")
    return [
        {
            "label": "reward gained",
            "value": gained(numbers),
            "about": "mean training reward on held-out prompts, above the reference's answers",
        },
        {
            "label": "held-out judge's gain",
            "value": gain,
            "about": (f"[{interval} 95 % interval over prompts; " if interval else "")
            + "unit: sd of the judge on the reference's answers",
        },
        {
            "label": "KL against its target",
            "value": value,
            "about": f"nats{unit}, exact, mean of the last third" if unit else "no step yet",
        },
    ]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    """One sample with the shade of each token: its nats over the largest of the response."""
    largest = max([*row["kl"], 1e-9])
    shades = [
        {"alpha": f"{max(0.0, nats) / largest:.3f}", "title": f"token {i}: {nats:.3g} nats"}
        for i, nats in enumerate(row["kl"], start=1)
    ]
    return {
        "prompt": row["prompt"],
        "reference": row["reference"],
        "response": row["response"],
        "score": f"{row['score']:+.3g}",
        "reference_score": f"{row['reference_score']:+.3g}",
        "kl": f"{row['kl_nats']:.3g}",
        "largest": f"{largest:.2g}",
        "shades": shades,
    }


def _last_row(files: RunFiles) -> list[tuple[str, str, str, str]]:
    """The last value of every metric: key, value, unit, definition."""
    newest: dict[str, Any] = {}
    for row in files.metrics:
        newest |= {key: value for key, value in row.items() if value is not None}
    return [
        (key, f"{newest[key]:.4g}", unit, text)
        for key, (unit, text) in REGISTRY.items()
        if key in newest
    ]
