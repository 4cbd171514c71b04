"""What the trainer writes down: metrics.jsonl, TensorBoard, the gateway's status, trainer.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from areal_agent.errors import GatewayError
from areal_agent.rundir import RunDir
from areal_agent.runlog import append_line, forget_after
from areal_trainers.client import TrainerClient

MIB = 2**20


class Records:
    """Folds every step's numbers into the run's; writes on rank 0 only (`run` is None on the others)."""

    def __init__(
        self, run: RunDir | None, client: TrainerClient | None, peak_bytes: Callable[[], int]
    ) -> None:
        self._run, self._client, self._peak_bytes = run, client, peak_bytes
        self._board = SummaryWriter(str(run.path / "tensorboard" / "trainer")) if run else None
        self.totals: dict[str, Any] = {
            "steps": 0,
            "final_version": 0,
            "tokens_trained": 0,
            "staleness_max": 0,
            "logprob_gap_max": 0.0,
            "logprob_gap_tokens": 0,
            "skipped_steps": 0,
            "checkpoint": None,
        }

    def resume(self, version: int, totals: Mapping[str, Any]) -> None:
        """Count on from the state of `version`; what was written of later steps is taken back."""
        self.totals |= totals
        if self._run is not None and self._board is not None:
            forget_after(self._run.metrics_path, version)
            self._board.close()
            self._board = SummaryWriter(self._board.log_dir, purge_step=version + 1)

    def step(self, version: int, numbers: dict[str, float]) -> None:
        """One batch's numbers, under the version it made."""
        t = self.totals
        t["steps"] += 1
        t["final_version"] = version
        t["tokens_trained"] += int(numbers["trained_tokens"])
        t["staleness_max"] = max(t["staleness_max"], int(numbers["staleness_max"]))
        t["logprob_gap_max"] = max(t["logprob_gap_max"], numbers["logprob_gap"], numbers["probe_gap"])
        t["logprob_gap_tokens"] += int(numbers["logprob_gap_tokens"] + numbers["probe_tokens"])
        t["skipped_steps"] += int(numbers["skipped_steps"])
        if self._run is None:
            return
        numbers = {**numbers, "peak_memory_mib": self._peak_bytes() / MIB}
        append_line(
            self._run.metrics_path, {"time": time.time(), "source": "trainer", "step": version, **numbers}
        )
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(f"trainer/{name}", value, version)
            self._board.flush()
        if self._client is not None:
            try:
                self._client.metrics(version, {"staleness": numbers["staleness_max"], **_finite(numbers)})
            except GatewayError as e:  # a status line is not worth a run
                print(f"areal_trainers: the gateway did not take step {version}'s metrics: {e}", flush=True)

    def finish(self, checkpoint: Path | None, error: str | None = None) -> None:
        """Write trainer.json: the totals, and `error` when training did not reach its end."""
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self.totals["checkpoint"] = str(checkpoint) if checkpoint else None
            self.totals["peak_memory_mib"] = round(self._peak_bytes() / MIB, 1)
            self._run.write("trainer.json", self.totals | ({"error": error} if error else {}))


def _finite(numbers: dict[str, float]) -> dict[str, float]:
    """JSON has no NaN; a number that is none is left out."""
    return {k: v for k, v in numbers.items() if v == v and abs(v) != float("inf")}
