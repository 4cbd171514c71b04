"""The face every benchmark shares: options, table, JSON, and targets that can be missed.

A target compares ratios within one run, never seconds: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table


@dataclass(frozen=True)
class Target:
    """A figure that has to hold. `sentence` says it in words, `met` whether it did."""

    sentence: str
    met: bool


@dataclass
class Report:
    """What a benchmark measured: rows of a table, further facts, and its targets."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def target(self, sentence: str, met: bool) -> None:
        self.targets.append(Target(sentence, met))


def main(
    doc: str,
    measure: Callable[..., Report],
    argv: Sequence[str] | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Parse the shared options, run `measure(quick)`, print, and exit 1 when `--check` finds a miss.

    Args:
        own: options of this benchmark alone, {name: keywords of `add_argument`}; `measure` gets them by name.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller run, within ten minutes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    for name, keywords in (own or {}).items():
        parser.add_argument(f"--{name}", **keywords)
    options = parser.parse_args(argv)
    report = measure(options.quick, **{name: getattr(options, name) for name in own or {}})
    show(report)
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        body = {"rows": report.rows, "facts": report.facts, "quick": options.quick, **machine}
        body["targets"] = [{"sentence": t.sentence, "met": t.met} for t in report.targets]
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    missed = [t for t in report.targets if not t.met]
    if options.check and missed:
        sys.exit("missed: " + "; ".join(t.sentence for t in missed))


def show(report: Report) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    columns = list(dict.fromkeys(name for row in report.rows for name in row))
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=box.SIMPLE)
    for row in report.rows:
        table.add_row(*(_cell(row.get(name, "")) for name in columns))
    if report.rows:
        console.print(table)
    for name, value in report.facts.items():
        console.print(f"{name}: {_cell(value)}")
    for target in report.targets:
        console.print(
            f"[{'green' if target.met else 'red'}]{'met' if target.met else 'MISSED'}[/]  {target.sentence}"
        )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
