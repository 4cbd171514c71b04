"""A fake engine's end of a weight update: simulated without torch, or the real receiver over gloo.

Invariant: both answer the worker methods in the shape of areal_gateway.worker_extension, and only a load moves
the weights that decide the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fakes.engine import FakeEngine


def simulated_checksums(version: int, buckets: int) -> list[str]:
    """What a simulated receiver computes; a test's trainer commits with the same."""
    return [f"sim-{version}-{i}" for i in range(buckets)]


def progress(engine: FakeEngine) -> dict[str, Any]:
    """As the worker extension counts: requests that were scheduled at least once."""
    return {"sampled": {f"generate-tokens-{r.id}-x": len(r.tokens) for r in engine.running if r.tokens}}


class SimulatedReceiver:
    """Phases without torch: joined and received at once."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.state: dict[str, Any] = {}
        self.holds: int | None = None
        self.areal_abort("{}")

    def areal_join(self, arg: str) -> dict[str, Any]:
        self.state = self.state | {"phase": "joined", "epoch": json.loads(arg)["epoch"], "error": None}
        return {}

    def areal_receive(self, arg: str) -> dict[str, Any]:
        spec = json.loads(arg)
        sums = simulated_checksums(spec["version"], len(spec["manifest"]["buckets"]))
        fault = self.engine.faults.receive
        if fault == "corrupt" and sums:
            sums[0] = "corrupt"
        phase = {"fail": "failed", "hang": "receiving"}.get(fault or "", "received")
        self.state = self.state | {
            "phase": phase,
            "version": spec["version"],
            "checksums": sums if phase == "received" else [],
            "error": "injected fault" if phase == "failed" else None,
        }
        return {}

    def areal_stage(self, arg: str) -> dict[str, Any]:
        self.areal_join(arg)
        return self.areal_receive(arg)

    def areal_status(self, _: str = "{}") -> dict[str, Any]:
        return self.state | {"holds": self.holds}

    def areal_progress(self, _: str = "{}") -> dict[str, Any]:
        return progress(self.engine)

    def areal_load(self, arg: str) -> dict[str, Any]:
        version = json.loads(arg)["version"]
        if self.state["phase"] != "received" or self.state["version"] != version:
            return {"error": f"version {version} is not staged: {self.state}"}
        self.engine.weights_version = self.holds = version
        self.state = self.state | {"phase": "loaded"}
        return {"version": version, "load_s": 0.0}

    def areal_abort(self, _: str) -> dict[str, Any]:
        self.state = {"phase": "idle", "epoch": 0, "version": None, "checksums": [], "error": None}
        return {}

    def close(self) -> None:
        """Nothing is held."""


class GlooReceiver:
    """The engine's own receiver (no vLLM in it), loading into `engine.loaded`."""

    def __init__(self, engine: FakeEngine) -> None:
        from areal_gateway.worker_extension import WeightReceiver

        self.engine = engine
        self.receiver = WeightReceiver(worker_rank=0, device="cpu")

    def areal_join(self, arg: str) -> dict[str, Any]:
        return self.receiver.join(**json.loads(arg))

    def areal_receive(self, arg: str) -> dict[str, Any]:
        return self.receiver.receive(**json.loads(arg))

    def areal_stage(self, arg: str) -> dict[str, Any]:
        return self.receiver.stage(**json.loads(arg))

    def areal_status(self, _: str = "{}") -> dict[str, Any]:
        status = self.receiver.status()
        fault = self.engine.faults.receive
        if status["phase"] == "received" and fault == "corrupt":
            status["checksums"] = ["corrupt", *status["checksums"][1:]]
        elif status["phase"] == "received" and fault == "fail":
            status = status | {"phase": "failed", "error": "injected fault"}
        elif status["phase"] == "received" and fault == "hang":
            status = status | {"phase": "receiving", "checksums": []}
        return status

    def areal_progress(self, _: str = "{}") -> dict[str, Any]:
        return progress(self.engine)

    def areal_load(self, arg: str) -> dict[str, Any]:
        version = json.loads(arg)["version"]

        def load(tensors: Iterable[tuple[str, Any]]) -> None:
            self.engine.loaded = {name: tensor.clone() for name, tensor in tensors}

        result = self.receiver.load(version, load)
        if "error" not in result:
            self.engine.weights_version = version
        return result

    def areal_abort(self, arg: str) -> dict[str, Any]:
        return self.receiver.abort(**json.loads(arg))

    def close(self) -> None:
        self.receiver.abort()
