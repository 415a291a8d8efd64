"""The curves of a report as plain Plotly figures: data and layout, nothing that draws.

Colours are those of Okabe and Ito, told apart by every kind of colour vision; every axis has
its unit.
"""

from collections.abc import Callable
from typing import Any

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#6b7280"
BAND = "rgba(0, 114, 178, 0.16)"

PHASES = {
    "time/generate_s": ("sampling", BLUE),
    "time/reference_s": ("reference and KL", SKY),
    "time/score_s": ("scores", ORANGE),
    "time/update_s": ("update", GREEN),
    "time/heldout_s": ("held-out check", PURPLE),
}

Figure = dict[str, Any]
Rows = list[dict[str, Any]]


def figures(metrics: Rows, ledger: Rows) -> dict[str, Figure]:
    """Every figure of the page by name; a figure without data is left out."""
    made: dict[str, Callable[[], Figure]] = {
        "reward-and-kl": lambda: reward_and_kl(metrics),
        "coefficient": lambda: coefficient(metrics),
        "frontier": lambda: frontier(ledger),
        "heldout": lambda: heldout(metrics),
        "health": lambda: health(metrics),
        "time": lambda: phases(metrics),
    }
    found = {name: make() for name, make in made.items()}
    return {name: figure for name, figure in found.items() if figure["data"]}


def reward_and_kl(metrics: Rows) -> Figure:
    """Mean score over exact KL, with the target; both against the step."""
    x, reward = _column(metrics, "score/mean")
    steps, kl = _column(metrics, "kl/ref_nats_per_response")
    traces = [
        _line(x, reward, name="reward", color=BLUE, axis=1),
        *_band(metrics, "kl/ref_nats_per_response", "kl/ref_standard_error", axis=2),
        _line(steps, kl, name="KL(π‖π_ref)", color=VERMILLION, axis=2),
    ]
    where, target = _column(metrics, "controller/kl_target")
    if target:
        line = _line(where, target, name="target", color="#111827", axis=2)
        traces.append(line | {"line": {"color": "#111827", "width": 1.5, "dash": "dash"}})
    return _stacked(traces, ["mean score<br>(reward)", "KL<br>(nats per response)"], height=528)


def coefficient(metrics: Rows) -> Figure:
    """β against the step."""
    x, beta = _column(metrics, "controller/kl_coef")
    line = _line(x, beta, name="β", color=GREEN, axis=1)
    figure = _stacked([line], ["β (reward per nat)"], height=230)
    if x:
        figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def frontier(ledger: Rows) -> Figure:
    """Reward gained against nats spent: the way the run took."""
    rows = [row for row in ledger if row["nats"] is not None]
    if not rows:
        return {"data": [], "layout": {}}
    steps = [row["step"] for row in rows]
    marker = {
        "color": steps, "colorscale": "Cividis", "size": 8,
        "colorbar": {"title": {"text": "step"}, "thickness": 10, "outlinewidth": 0},
    }  # fmt: skip
    path = {
        "type": "scatter", "mode": "lines+markers", "showlegend": False,
        "x": [row["nats"] for row in rows], "y": [row["reward_gained"] for row in rows],
        "text": [f"step {step}" for step in steps], "marker": marker,
        "line": {"color": "#cbd5e1", "width": 1},
        "hovertemplate": "%{text}<br>%{x:.3g} nats<br>%{y:+.3g} reward<extra></extra>",
    }  # fmt: skip
    layout = _layout(height=230) | {
        "hovermode": "closest",
        "xaxis": _axis("KL spent (nats per response)") | {"rangemode": "tozero"},
        "yaxis": _axis("reward gained"),
    }
    return {"data": [path], "layout": layout}


def heldout(metrics: Rows) -> Figure:
    """What the held-out judge says, with its interval, over what the training reward says."""
    x, gain = _column(metrics, "heldout/judge_gain")
    low, high = (_column(metrics, f"heldout/judge_gain_{end}")[1] for end in ("low", "high"))
    steps, score = _column(metrics, "heldout/score_gain")
    if not steps:
        return {"data": [], "layout": {}}
    training = _line(steps, score, name="training reward", color=ORANGE, axis=1)
    training |= {"mode": "lines+markers"}
    if not gain:
        return _stacked([training], ["training reward<br>gained"], height=420)
    judge = _line(x, gain, name="held-out judge", color=BLUE, axis=1) | {"mode": "lines+markers"}
    band = _between(x, low, high, axis=1, name="95 % interval")
    training |= {"yaxis": "y2", "xaxis": "x"}
    titles = ["held-out judge's gain<br>(its sd)", "training reward<br>gained"]
    return _stacked([band, judge, training], titles, height=420)


def health(metrics: Rows) -> Figure:
    """Entropy, length and diversity of the sampled responses."""
    shown = (
        ("rollout/entropy_nats_per_token", "entropy", BLUE, "entropy<br>(nats per token)"),
        ("rollout/response_tokens_mean", "length", GREEN, "length<br>(tokens)"),
        ("rollout/distinct_2", "distinct-2", ORANGE, "distinct word<br>pairs (fraction)"),
    )
    traces = [
        _line(*_column(metrics, key), name=name, color=color, axis=i)
        for i, (key, name, color, _) in enumerate(shown, start=1)
    ]
    return _stacked(traces, [title for *_, title in shown], height=420)


def phases(metrics: Rows) -> Figure:
    """Seconds of each step by phase, stacked."""
    traces = []
    for key, (name, color) in PHASES.items():
        x, seconds = _column(metrics, key)
        traces.append(_bars(x, seconds, name=name, color=color))
    timed = [row for row in metrics if row.get("time/step_s") is not None]
    inside = [key for key in PHASES if key != "time/heldout_s"]
    rest = [row["time/step_s"] - sum(row.get(key) or 0.0 for key in inside) for row in timed]
    traces.append(_bars([row["step"] for row in timed], rest, name="the rest", color="#9ca3af"))
    figure = _stacked([t for t in traces if t["x"]], ["time (s per step)"], height=300)
    figure["layout"] |= {"barmode": "stack", "bargap": 0.15, "showlegend": True}
    return figure


def _column(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was measured."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _line(x: list[int], y: list[float], *, name: str, color: str, axis: int) -> Figure:
    return {
        "type": "scatter", "mode": "lines+markers" if len(x) == 1 else "lines", "name": name,
        "x": x, "y": y, "xaxis": "x", "yaxis": "y" if axis == 1 else f"y{axis}",
        "line": {"color": color, "width": 2}, "hovertemplate": "%{y:.4g}",
    }  # fmt: skip


def _between(x: list[int], low: list[float], high: list[float], *, axis: int, name: str) -> Figure:
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": [*x, *x[::-1]],
        "y": [*high, *low[::-1]], "xaxis": "x", "yaxis": "y" if axis == 1 else f"y{axis}",
        "fill": "toself", "line": {"width": 0}, "fillcolor": BAND, "hoverinfo": "skip",
    }  # fmt: skip


def _band(rows: Rows, key: str, error: str, *, axis: int) -> list[Figure]:
    """A band of 1.96 standard errors around a curve."""
    have = [row for row in rows if row.get(key) is not None and row.get(error) is not None]
    if not have:
        return []
    x = [row["step"] for row in have]
    low = [row[key] - 1.96 * row[error] for row in have]
    high = [row[key] + 1.96 * row[error] for row in have]
    band = _between(x, low, high, axis=axis, name="95 % interval")
    return [band | {"fillcolor": "rgba(213, 94, 0, 0.15)"}]


def _bars(x: list[int], y: list[float], *, name: str, color: str) -> Figure:
    return {
        "type": "bar", "name": name, "x": x, "y": y, "marker": {"color": color},
        "hovertemplate": "%{y:.3g} s",
    }  # fmt: skip


def _axis(title: str) -> Figure:
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 12}}, "gridcolor": "#e5e7eb",
        "zerolinecolor": "#cbd5e1", "automargin": True, "ticks": "outside", "ticklen": 4,
        "tickcolor": "#cbd5e1",
    }  # fmt: skip


def _layout(*, height: int) -> Figure:
    return {
        "height": height, "margin": {"l": 70, "r": 16, "t": 12, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#374151"},
        "hovermode": "x unified", "showlegend": False,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }  # fmt: skip


def _stacked(traces: list[Figure], titles: list[str], *, height: int) -> Figure:
    """Panels over each other on one step axis, the first on top."""
    if not any(trace["x"] for trace in traces):
        return {"data": [], "layout": {}}
    layout, count, gap = _layout(height=height), len(titles), 0.07
    share = (1 - gap * (count - 1)) / count
    for i, title in enumerate(titles):
        top = 1 - i * (share + gap)
        axis = _axis(title) | {"domain": [max(0.0, top - share), min(1.0, top)]}
        layout["yaxis" if i == 0 else f"yaxis{i + 1}"] = axis
    lowest = "y" if count == 1 else f"y{count}"
    layout["xaxis"] = _axis("step") | {"anchor": lowest, "zeroline": False}
    if max(max(trace["x"], default=0) for trace in traces) <= 10:
        layout["xaxis"]["dtick"] = 1  # there is no step 1.5
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}
