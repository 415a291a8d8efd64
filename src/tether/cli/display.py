"""What a person sees while a command works: a live table, or one line a step without a terminal.

Everything goes to stderr. Text that came from a model or a file is shown as text: never as
markup, and control characters are spelled out.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tether.observer import Observer
from tether.report.text import visible

ROWS_SHOWN = 6
SECONDS_BETWEEN_LINES = 5.0

Row = Mapping[str, float | int | None]


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 05 s, 2 h 04 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


class StepTable:
    """The rows of the table so far: formats a step, and knows the time left."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.heldout_gain: float | None = None

    def cells(self, row: Row, total_steps: int) -> dict[str, str]:
        """What is shown of one step, by column; call once a step, in order."""
        spent = [row[key] for key in ("time/step_s", "time/heldout_s") if row.get(key) is not None]
        self.seconds.append(sum(float(value or 0) for value in spent))
        if row.get("heldout/judge_gain") is not None:
            self.heldout_gain = row["heldout/judge_gain"]
        step = int(row["step"] or 0)
        left = (total_steps - step) * sum(self.seconds) / len(self.seconds)
        target = row.get("controller/kl_target")
        kl = _number(row.get("kl/ref_nats_per_response"))
        return {
            "step": f"{step}/{total_steps}",
            "ETA": duration(left),
            "reward": _number(row.get("score/mean")),
            "held-out gain": _number(self.heldout_gain, sign=True),
            "KL nats": kl if target is None else f"{kl} of {target:g}",
            "β": _number(row.get("controller/kl_coef")),
            "entropy": _number(row.get("rollout/entropy_nats_per_token")),
            "length": _number(row.get("rollout/response_tokens_mean")),
            "tokens/s": f"{row.get('rollout/tokens_per_second') or 0:.0f}",
        }


def _number(value: float | int | None, *, sign: bool = False) -> str:
    if value is None:
        return "–"
    return f"{value:+.3g}" if sign else f"{value:.3g}"


class PlainDisplay:
    """One line a step, for logs; long stages say every few seconds how far they are."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.table = StepTable()
        self.stage("", None)

    def _line(self, text: str) -> None:
        self.console.out(text, highlight=False)

    def stage(self, name: str, total: int | None) -> None:
        """Name the stage."""
        self.name, self.total, self.done = name, total, 0
        self.began = self.said = time.monotonic()
        if name:
            self._line(visible(name))

    def advance(self, n: int = 1) -> None:
        """Say how far the stage is, at most every few seconds."""
        self.done += n
        now = time.monotonic()
        if self.total and now - self.said >= SECONDS_BETWEEN_LINES:
            self.said = now
            left = (now - self.began) * (self.total - self.done) / self.done
            self._line(f"{visible(self.name)}: {self.done}/{self.total}, ETA {duration(left)}")

    def note(self, text: str) -> None:
        """Write the note."""
        self._line(visible(text))

    def step(self, row: Row, total_steps: int) -> None:
        """Write one line with the step's numbers."""
        cells = self.table.cells(row, total_steps)
        self._line("  ".join(f"{name} {value}" for name, value in cells.items()))

    def sample(self, prompt: str, reference: str, response: str) -> None:
        """Write prompt, reference and policy, one line each."""
        for name, text in (("prompt", prompt), ("reference", reference), ("policy", response)):
            self._line(f"  {name + ':':<11}{visible(' '.join(text.split()))}")


class LiveDisplay:
    """A table that stays in place on a terminal: the last steps, the stage, one sample."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.table = StepTable()
        self.rows: deque[dict[str, str]] = deque(maxlen=ROWS_SHOWN)
        self.shown_sample: RenderableType | None = None
        self.stage("starting", None)
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self.render)

    def render(self) -> RenderableType:
        """Everything that stands on the screen now."""
        parts: list[RenderableType] = []
        if self.rows:
            parts.append(_step_table(list(self.rows)))
        else:
            parts.append(Text(f"{visible(self.name)} … {self._progress()}", style="cyan"))
        if self.shown_sample is not None:
            parts.append(self.shown_sample)
        return Group(*parts)

    def _progress(self) -> str:
        spent = time.monotonic() - self.began
        if not self.total or not self.done:
            return duration(spent)
        left = spent * (self.total - self.done) / self.done
        return f"{self.done}/{self.total}, ETA {duration(left)}"

    def stage(self, name: str, total: int | None) -> None:
        """Name the stage; the table of an earlier one stays above."""
        self.name, self.total, self.done = name, total, 0
        self.began = time.monotonic()

    def advance(self, n: int = 1) -> None:
        """Count units of the stage."""
        self.done += n

    def note(self, text: str) -> None:
        """Print the note above the table."""
        self.console.print(Text(visible(text), style="yellow"))

    def step(self, row: Row, total_steps: int) -> None:
        """Add a row."""
        self.rows.append(self.table.cells(row, total_steps))

    def sample(self, prompt: str, reference: str, response: str) -> None:
        """Show this sample under the table until the next one."""
        self.shown_sample = side_by_side(prompt, reference, response)


def _step_table(rows: list[dict[str, str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[-1]:
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(*row.values(), style="bold cyan" if i == len(rows) - 1 else "dim")
    return table


def side_by_side(
    prompt: str,
    reference: str,
    response: str,
    *,
    reference_title: str = "reference",
    policy_title: str = "policy",
) -> Panel:
    """A prompt over the reference's answer and the policy's, as text."""
    answers = Table(box=None, expand=True, pad_edge=False)
    answers.add_column(Text(reference_title, style="dim"), ratio=1)
    answers.add_column(Text(policy_title, style="bold"), ratio=1)
    answers.add_row(Text(visible(reference)), Text(visible(response)))
    return Panel(
        Group(Text(visible(prompt), style="italic"), Text(), answers),
        title="prompt", title_align="left", border_style="dim",
    )  # fmt: skip


class _Notes(logging.Handler):
    """Shows what the library logs (rows left out, a model being converted) as notes."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(logging.INFO)
        self.observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        self.observer.note(record.getMessage())


@contextmanager
def _noting(observer: Observer) -> Iterator[Observer]:
    log, handler = logging.getLogger("tether"), _Notes(observer)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield observer
    finally:
        log.removeHandler(handler)


@contextmanager
def display() -> Iterator[Observer]:
    """The display that suits stderr; what the library logs appears in it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _noting(PlainDisplay(console)) as observer:
            yield observer
        return
    shown = LiveDisplay(console)
    with shown.live, _noting(shown) as observer:
        yield observer
