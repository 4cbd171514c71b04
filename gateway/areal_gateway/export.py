"""Sealed sessions as JSON lines, one trajectory each: the batches' own columns, for whoever reads them elsewhere.

Invariant: a line holds what a lease would give of that session, by the same fold; with labels, only the calls
that carry them have loss, and a session without such a call has no line. Nothing is read into memory but the
session at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from areal_agent.errors import ConfigError
from areal_agent.rundir import RunDir
from areal_agent.trajectory import Trajectory
from areal_agent.wire import CALL_COLUMNS
from areal_gateway.credit import Credit
from areal_gateway.ledger import Ledger
from areal_gateway.trajectories import fold

Labels = Mapping[str, Sequence[str]]
"""Label -> values, of which a call has to carry one."""


def lines(
    ledger: Ledger, credit: Credit, *, labels: Labels | None = None, purpose: str = "train"
) -> Iterator[bytes]:
    """One JSON object and a newline for each sealed session, in the order they were opened.

    labels: instead of the run's `rollout.train_labels`.
    """
    if labels:
        credit = replace(credit, train_labels=labels)
    for session, seal in ledger.sessions():
        if seal is None or session.purpose != purpose:
            continue
        history = ledger.histories([session.session_id])[session.session_id]
        trajectory = fold(history, credit.of_session(history)[1], credit)
        if trajectory.sequences:
            line = {
                "session_id": session.session_id,
                "group_id": session.group_id,
                "task_id": session.task_id,
                "reward": trajectory.reward,
                "labels": session.labels,
                "opened_at": session.opened_at,
                "sequences": sequences(trajectory),
            }
            yield orjson.dumps(line) + b"\n"


def sequences(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The columns of `areal_agent.trajectory.Sequence` as JSON."""
    return [
        {
            "token_ids": list(s.token_ids),
            "logprobs": list(s.logprobs),
            "versions": list(s.versions),
            "loss_mask": list(s.loss_mask),
            "temperature": s.temperature,
            "reward": s.reward,
            **{name: list(getattr(s, name)) for name in CALL_COLUMNS},
        }
        for s in trajectory.sequences
    ]


def of_run(folder: str | Path, labels: Labels | None = None, purpose: str = "train") -> Iterator[bytes]:
    """The lines of a run folder whose gateway is gone. Raises ConfigError where it has no ledger, or one in use."""
    run = RunDir(folder)
    credit = Credit.of(run.read_config())
    if not (path := run.path / "ledger.sqlite").is_file():
        raise ConfigError(f"{run.path} has no ledger.sqlite: nothing was recorded in this run")
    ledger = Ledger(path)
    try:
        yield from lines(ledger, credit, labels=labels, purpose=purpose)
    finally:
        ledger.close()
