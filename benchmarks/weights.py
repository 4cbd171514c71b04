"""What packing costs and saves: the weight sender against plain gloo broadcasts, in one run.

A 135 M-parameter model (SmolLM2's shape, float32): the trainer's sender into the engine's receiving code in
another process, gathering, packing and checksums included, against one bare broadcast of as many bytes from
one buffer into one buffer. The examples' small model: the same, against a broadcast per tensor. The two sides
of a comparison take turns, and each is timed until the receiver has everything; medians are compared.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _face import Report, main
from torch._C._distributed_c10d import PrefixStore, TCPStore
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from areal_agent.config import WeightsConfig
from areal_agent.weights import Manifest
from areal_trainers.model import shard
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.weights_sender import LOOPBACK, WeightsSender

HERE = Path(__file__).parent
WITHIN_S = 60.0
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
)
SMALL = Qwen3Config(
    vocab_size=554,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
)


class Link:
    """The receiving process, and the gateway's part of an update (the `client` of a WeightsSender)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._group: tuple[Any, ...] | None = None
        self._epoch = 0
        self._version = 0
        self.began = 0.0
        self.seconds = 0.0
        """From the answer to `begin` until the receiver had and had checked everything."""

    def tell(self, command: str, **arg: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arg]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the receiving process ended with code {self._process.wait()}")
        answer = json.loads(line)
        if answer.get("error"):
            raise SystemExit(f"the receiver says: {answer['error']}")
        return answer

    def ask(self, command: str, **arg: Any) -> dict[str, Any]:
        self.tell(command, **arg)
        return self.answer()

    def begin(self, *, version: int, manifest: Manifest, store: dict[str, Any], **_: Any) -> dict[str, Any]:
        group = (store["host"], store["port"])
        join = group != self._group
        self._group, self._version = group, version
        self._epoch += join
        if join:
            self.ask(
                "join",
                epoch=self._epoch,
                store=store,
                world_size=2,
                rank_offset=1,
                backend="gloo",
                timeout_s=WITHIN_S,
            )
        given = manifest.model_dump(mode="json")
        self.ask("receive", epoch=self._epoch, version=version, manifest=given, timeout_s=WITHIN_S)
        self.began = time.monotonic()
        return {"update_id": "bench", "epoch": self._epoch, "world_size": 2, "join": join}

    def commit(self, update_id: str, checksums: list[str], timeout_s: float) -> dict[str, Any]:
        status = self.ask("received", within_s=WITHIN_S)
        if status["phase"] != "received" or status["checksums"] != checksums:
            raise SystemExit(f"received {status}, sent were {checksums}")
        self.seconds = status["at"] - self.began
        self.ask("load", version=self._version)
        return {"version": self._version, "engines": 1}

    def abort(self, update_id: str, reason: str) -> None:
        raise SystemExit(f"the update was aborted: {reason}")


class Plain:
    """Bare broadcasts to the receiving process, in a group of their own."""

    def __init__(self, link: Link) -> None:
        timeout = timedelta(seconds=WITHIN_S)
        store = TCPStore(LOOPBACK, 0, None, True, timeout, wait_for_workers=False)
        link.tell("join_plain", port=store.port)
        self._group = get_platform("cpu").process_group(
            PrefixStore("areal/0", store), 0, 2, timeout, loopback=True
        )
        link.answer()
        self._link, self._store = link, store

    def allocate(self, sizes: list[int]) -> None:
        self._buffers = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
        self._link.ask("allocate", sizes=sizes)

    def seconds(self) -> float:
        """One broadcast per buffer, each waited for, until the receiver has the last."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._link.tell("bare")
        time.sleep(0.01)  # so that the receiver waits there, as it does for packed buckets
        began = time.monotonic()
        for buffer in self._buffers:
            self._group.broadcast([buffer], options).wait()
        return self._link.answer()["at"] - began


def measure(quick: bool) -> Report:
    torch.set_num_threads(1)
    report = Report()
    with receiver() as link, join_ranks(get_platform("cpu")) as ranks:
        plain = Plain(link)
        small, large = (10, 5) if quick else (50, 20)
        lm = blank(SMALL)
        sizes = [p.numel() * 4 for p in lm.parameters()]
        one, packed = compare(lm, sizes, link, plain, ranks, small)
        row(report, "small, a broadcast per tensor", sum(sizes), one, one)
        row(report, "small, packed", sum(sizes), packed, one)
        ratio = statistics.median(one) / statistics.median(packed)
        report.target(f"packed is ≥ 3 x a broadcast per tensor for the small model: {ratio:.2f}", ratio >= 3)

        lm = blank(SMOLLM2)
        total = sum(p.numel() * 4 for p in lm.parameters())
        bare, packed = compare(lm, [total], link, plain, ranks, large)
        row(report, "135 M, bare, one buffer", total, bare, bare)
        row(report, "135 M, packed", total, packed, bare)
        ratio = statistics.median(bare) / statistics.median(packed)
        report.target(
            f"packed moves ≥ 0.8 of a bare broadcast's bytes/s for 135 M: {ratio:.2f}", ratio >= 0.8
        )
    return report


def compare(
    lm: PreTrainedModel, sizes: list[int], link: Link, plain: Plain, ranks: Ranks, times: int
) -> tuple[list[float], list[float]]:
    """Seconds of plain broadcasts of `sizes` and of whole packed transfers of `lm`, taken by turns."""
    shard(lm, ranks.mesh)
    sender = WeightsSender(lm, link, ranks, get_platform("cpu"), WeightsConfig(), "float32")  # type: ignore[arg-type]
    plain.allocate(sizes)
    theirs, ours = [], []
    for version in range(1, times + 3):
        a = plain.seconds()
        sender.push(version)
        if version > 2:  # the first two touch fresh memory
            theirs.append(a)
            ours.append(link.seconds)
    sender.close()
    return theirs, ours


def row(report: Report, name: str, nbytes: int, seconds: list[float], base: list[float]) -> None:
    median = statistics.median(seconds)
    report.rows.append(
        {
            "transfer": name,
            "MB": nbytes / 1e6,
            "median ms": median * 1e3,
            "least ms": min(seconds) * 1e3,
            "GB/s": nbytes / median / 1e9,
            "of the first": statistics.median(base) / median,
        }
    )


def blank(config: Any) -> PreTrainedModel:
    """Of the shape, with every weight 0.01: what they are does not change how long they take."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lm.to_empty(device="cpu")
    lm.tie_weights()
    with torch.no_grad():
        for p in lm.parameters():
            p.fill_(0.01)
    return lm


@contextmanager
def receiver() -> Iterator[Link]:
    command = [sys.executable, str(HERE / "_weights_receiver.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Link(process)
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    main(__doc__ or "", measure)
