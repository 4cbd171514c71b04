"""What the user sees of a run: one live panel on a terminal, one line a step elsewhere.

Invariant: it only reads a Progress; a run behaves the same with either or none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 60
"""Steps that the sparkline shows."""


@dataclass
class Progress:
    """The state of a run, kept up to date by the controller.

    Attributes:
        rewards: mean training reward of each step so far.
        evals: (step, reward) of each evaluation.
        eval_missing: (missing, tasks) of the last of them: tasks without a reward, which its mean leaves out.
        tokens_per_s: sampled by the fleet, over the last seconds.
        engines: number of engines by state. calls: number of calls by state.
    """

    name: str
    steps: int
    phase: str = "starting"
    step: int = 0
    rewards: list[float] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    eval_missing: tuple[int, int] = (0, 0)
    staleness: int | None = None
    max_staleness: int = 0
    tokens_per_s: float = 0.0
    tokens: int = 0
    engines: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)
    weights_state: str = ""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    training_since: float | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def eta_s(self) -> float | None:
        """Seconds of training left at the pace so far."""
        if self.training_since is None or self.step == 0 or self.step >= self.steps:
            return None
        return (time.monotonic() - self.training_since) / self.step * (self.steps - self.step)


class View(Protocol):
    """Somewhere to show a run."""

    def __enter__(self) -> View: ...
    def __exit__(self, *_: object) -> None: ...
    def note(self, text: str) -> None: ...
    def phase(self) -> None: ...
    def step(self) -> None: ...


def view(progress: Progress, stream: TextIO | None = None) -> View:
    """A live panel where the stream is a terminal, else plain lines."""
    out: TextIO = sys.stdout if stream is None else stream  # looked up now: it may have been redirected
    return LivePanel(progress, out) if out.isatty() else PlainLines(progress, out)


class PlainLines:
    """One line per phase and per step, for logs and pipes."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def note(self, text: str) -> None:
        print(f"note: {text}", file=self._stream, flush=True)

    def phase(self) -> None:
        print(f"[{clock(self._progress.elapsed_s)}] {self._progress.phase}", file=self._stream, flush=True)

    def step(self) -> None:
        p = self._progress
        parts = [f"[{clock(p.elapsed_s)}] step {p.step}/{p.steps}"]
        if p.rewards:
            parts.append(f"reward {p.rewards[-1]:.3f}")
        if p.evals:
            parts.append(f"eval {p.evals[-1][1]:.3f} (step {p.evals[-1][0]}{missing(*p.eval_missing, ', ')})")
        if p.staleness is not None:
            parts.append(f"staleness {p.staleness}")
        parts.append(f"{p.tokens_per_s:.0f} tok/s")
        parts.append("engines " + (counted(p.engines) or "none"))
        if p.eta_s is not None:
            parts.append(f"left {clock(p.eta_s)}")
        print("  ".join(parts), file=self._stream, flush=True)


class LivePanel:
    """The panel, redrawn four times a second; notes scroll away above it."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._console = Console(file=stream)
        self._live = Live(
            get_renderable=self.render, console=self._console, refresh_per_second=4, transient=False
        )

    def __enter__(self) -> LivePanel:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(Text("note: ", style="yellow") + Text(text))

    def phase(self) -> None:
        self._live.refresh()

    def step(self) -> None:
        return  # redrawn by itself

    def render(self) -> Panel:
        p = self._progress
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True)
        reward = f"{p.rewards[-1]:.3f}" if p.rewards else "–"
        evaluation = f"{p.evals[-1][1]:.3f} at step {p.evals[-1][0]}" if p.evals else "–"
        evaluation += missing(*p.eval_missing, ", ")
        stale = "–" if p.staleness is None else f"{p.staleness} (at most {p.max_staleness})"
        eta = "–" if p.eta_s is None else clock(p.eta_s)
        calls = {k: v for k, v in p.calls.items() if v and k != "total"}
        grid.add_row("reward", Text(reward, style="bold green"), "held-out", Text(evaluation, style="bold"))
        grid.add_row("staleness", stale, "tokens/s", f"{p.tokens_per_s:,.0f} ({p.tokens:,} sampled)")
        grid.add_row("engines", f"{counted(p.engines) or '–'}", "weights", p.weights_state or "–")
        grid.add_row("calls", counted(calls) or "–", "time", f"{clock(p.elapsed_s)}, left {eta}")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            f"step {p.step}/{p.steps}", ProgressBar(total=p.steps, completed=p.step, width=40), p.phase
        )
        spark = Text(sparkline(p.rewards[-HISTORY:]), style="green")
        return Panel(Group(bar, grid, spark), title=f"areal-agent · {p.name}", title_align="left")


def sparkline(values: list[float]) -> str:
    """A row of bars, scaled to the values' own range but never finer than 0..1."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(BARS[min(len(BARS) - 1, int((v - low) / (high - low) * len(BARS)))] for v in values)


def counted(counts: Mapping[str, int]) -> str:
    """{"serving": 2, "dead": 1} -> "2 serving, 1 dead"."""
    return ", ".join(f"{n} {state}" for state, n in counts.items() if n)


def missing(count: int, tasks: int, before: str = "") -> str:
    """What stands beside a mean that leaves tasks out; nothing where it leaves out none."""
    return f"{before}{count} of {tasks} missing" if count else ""


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def report(summary: Mapping[str, Any]) -> str:
    """summary.json in plain lines, for the end of a run."""

    def number(value: Any, digits: int = 3) -> str:
        return "–" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else f"{value:,}"

    def mean(when: str) -> str:
        result = summary.get(f"eval_{when}") or {}
        left_out = missing(result.get("missing", 0), result.get("tasks", 0))
        return number(summary[f"reward_{when}"]) + (f" ({left_out})" if left_out else "")

    tasks = (summary.get("eval_after") or summary.get("eval_before") or {}).get("tasks", 0)
    gap = summary.get("logprob_gap_max")
    constrained = summary.get("calls_constrained")
    lines = [
        ("reward", f"{mean('before')} -> {mean('after')}")
        if tasks
        else ("reward", f"{number(summary['reward_first_step'])} -> {number(summary['reward_last_step'])}, of the "
                        "service, in the first and the last step")
        if "reward_first_step" in summary
        else ("reward", "not measured (no held-out tasks)"),
        ("held-out tasks", number(tasks)),
        ("steps", f"{number(summary['steps'])}, final version {number(summary['final_version'])}"),
        ("tokens trained", number(summary["tokens_trained"])),
        ("wall time", clock(summary["wall_s"])),
        ("staleness, most", number(summary["staleness_max"])),
        ("logprob gap, most", "–" if gap is None else f"{gap:.1e}"),
        ("calls", f"{number(summary['calls_total'])}, {number(summary['calls_incomplete'])} incomplete, "
                  + (f"{constrained:,} constrained (never trained), " if constrained else "")
                  + f"{number(summary['multi_version_calls'])} lived through an update"),
        ("checkpoint", str(summary["checkpoint"] or "–")),
        ("run folder", str(summary["run_dir"])),
    ]  # fmt: skip
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
