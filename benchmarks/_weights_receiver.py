"""One engine's receiving code in a process of its own, without vLLM. Commands and answers are JSON lines.

Beside the real receiver it takes part in plain broadcasts (`bare`), which the packed ones are compared with.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from areal_gateway.worker_extension import WeightReceiver, join_group


class Engine:
    """Answers the commands of benchmarks/weights.py."""

    def __init__(self) -> None:
        self.receiver = WeightReceiver(worker_rank=0)
        self.plain: Any = None

    def join(self, **arg: Any) -> dict[str, Any]:
        return self.receiver.join(**arg)

    def receive(self, **arg: Any) -> dict[str, Any]:
        return self.receiver.receive(**arg)

    def received(self, within_s: float) -> dict[str, Any]:
        """Once everything came; the monotonic clock is the machine's, the same in every process.

        Asking over and over would take from the receiver the core that it is timed on.
        """
        status = self.receiver.wait(within_s)
        return status | {"at": time.monotonic()}

    def load(self, version: int) -> dict[str, Any]:
        return self.receiver.load(version, lambda tensors: None)

    def join_plain(self, port: int) -> dict[str, Any]:
        self.plain = join_group(
            backend="gloo", epoch=0, host="127.0.0.1", port=port, rank=1, size=2, timeout_s=60
        )
        return {}

    def allocate(self, sizes: list[int]) -> dict[str, Any]:
        self.buffers = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
        return {}

    def bare(self) -> dict[str, Any]:
        """One broadcast after the other, into buffers that are there."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for buffer in self.buffers:
            self.plain.broadcast([buffer], options).wait()
        return {"at": time.monotonic()}


def serve() -> None:
    torch.set_num_threads(1)
    engine = Engine()
    for line in sys.stdin:
        name, arg = json.loads(line)
        print(json.dumps(getattr(engine, name)(**arg)), flush=True)


if __name__ == "__main__":
    serve()
