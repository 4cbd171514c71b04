"""Updates under load: two real engines, 64 streaming calls, 20 weight updates back to back.

Every call has to end whole, and around each boundary between two versions the logprobs have to be those of
the version that the span names, to 1e-4 nats in float32 (a Hugging Face forward is the oracle). The pause of
an update is compared with a bare gloo broadcast of the same bytes to two receivers under the same load.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _face import Report, main
from torch._C._distributed_c10d import PrefixStore, TCPStore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fleet"))

from fakes.sender import Sender
from fleet_kit import Policies, run_config, tiny_qwen3

from areal_gateway.fleet import EngineSampling, Fleet

CALLS, UPDATES = 64, 20
PROMPT = list(range(10, 30))
TOLERANCE = 1e-4
AROUND = 4
"""Tokens compared on each side of a boundary."""

REPLY = 800
GIVE_UP_S = 420.0


def measure(quick: bool) -> Report:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_qwen3(Path(scratch) / "model", tied=True)
        return asyncio.run(asyncio.wait_for(run(model, Path(scratch), 24 if quick else 96), GIVE_UP_S))


async def run(model: Path, scratch: Path, checked: int) -> Report:
    config = run_config(
        fleet={
            "engines": 2,
            "dtype": "float32",
            "max_model_len": 1024,
            "kv_cache_gib": 0.5,
            "memory_gib": 2.0,
            "start_timeout_s": 240,
            "call_timeout_s": GIVE_UP_S,
            "probe_s": 2.0,
            # A pause waits for the step that runs, and after each update a step recomputes KV caches.
            "extra_args": ["--max-num-batched-tokens", "512"],
        },
        weights={"join_timeout_s": 30, "transfer_timeout_s": 30, "pause_timeout_s": 30},
        gateway={"hold_timeout_s": 60},
    )
    config.model = str(model)
    policies, sender, bare = Policies(model), Sender(), Bare(receivers=2)
    events: list[dict[str, Any]] = []
    fleet = Fleet(config, scratch, lambda event: events.append(event | {"at": time.monotonic()}))
    await fleet.start()
    try:
        done = asyncio.Event()
        calls = [asyncio.create_task(stream(fleet, i, done)) for i in range(CALLS)]
        await asyncio.sleep(2.0)
        pauses, loads, plain = [], [], []
        began = time.monotonic()
        for version in range(1, UPDATES + 1):
            tensors = policies.tensors(version)
            result = await sender.push(fleet.weights, version, tensors)
            pauses.append(result["pause_s"])
            loads.append(result["load_s"])
            plain.append(await asyncio.to_thread(bare.seconds, sum(t.nbytes for t in tensors.values())))
        took = time.monotonic() - began
        done.set()
        replies = [reply for of_one in await asyncio.gather(*calls) for reply in of_one]
    finally:
        await fleet.stop()
    moved = sum(e["type"] == "call_moved" for e in events)
    parts = {
        "pause to resume": pauses,
        **phases(events),
        "load (slower engine)": loads,
        "bare broadcast": plain,
    }
    return report(policies, replies, checked, parts, took, moved)


def phases(events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds that each update spent in each phase of the pause."""
    spent: dict[str, list[float]] = {"holding": [], "loading": [], "verifying": []}
    states = [e for e in events if e["type"] == "weights"]
    for this, then in itertools.pairwise(states):
        if this["state"] in spent:
            spent[this["state"]].append(then["at"] - this["at"])
    return {f"  of it {phase}": seconds for phase, seconds in spent.items()}


async def stream(fleet: Fleet, i: int, done: asyncio.Event) -> list[tuple[list[int], list[float], list]]:
    """One caller: one reply after the other until `done`; the last is read to its end."""
    replies = []
    while not done.is_set():
        n = REPLY - 7 * (i % 40)
        sampling = EngineSampling(max_tokens=n, temperature=1.0, extra={"ignore_eos": True})
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list = []
        calls = fleet.generate(session_id=f"s{i}", prompt_ids=PROMPT, sampling=sampling)
        async with aclosing(calls) as chunks:
            async for chunk in chunks:
                ids += chunk.token_ids
                logprobs += [x for x in chunk.logprobs if x is not None]
                spans = chunk.spans or spans
        if not len(ids) == len(logprobs) == n:
            raise SystemExit(f"a call for {n} tokens got {len(ids)} and {len(logprobs)} logprobs")
        replies.append((ids, logprobs, spans))
    return replies


def report(
    policies: Policies,
    replies: list[tuple[list[int], list[float], list]],
    checked: int,
    parts: dict[str, list[float]],
    took: float,
    moved: int,
) -> Report:
    whole = all([a for a, _, _ in s] == [0, *(b for _, b, _ in s[:-1])] for _, _, s in replies)
    whole = whole and all(s[-1][1] == len(ids) for ids, _, s in replies)
    crossing = [r for r in replies if len(r[2]) > 1]
    crossing = crossing[:: max(1, len(crossing) // checked)]
    worst, tokens, seen = 0.0, 0, set()
    wrong = 10.0
    for version in range(UPDATES + 1):
        of_it = [r for r in crossing if any(v == version for _, _, v in r[2])]
        wanted = policies.logprobs_of_all(version, PROMPT, [ids for ids, _, _ in of_it])
        for (_, logprobs, spans), want in zip(of_it, wanted, strict=True):
            for (start, end, v), after in zip(spans, [*spans[1:], None], strict=True):
                if v != version:
                    continue
                near = {*range(start, min(start + AROUND, end)), *range(max(start, end - AROUND), end)}
                worst = max(worst, *(abs(want[i] - logprobs[i]) for i in near))
                tokens += len(near)
                if after is not None:
                    # The neighbour's tokens under this version: what a wrong span looks like.
                    seen.add((v, after[2]))
                    beyond = range(end, min(end + AROUND, after[1]))
                    wrong = min(wrong, max(abs(want[i] - logprobs[i]) for i in beyond))
    rows = []
    for name, values in parts.items():
        ms = [1e3 * x for x in values]
        rows.append({"ms": name, "median": statistics.median(ms), "least": min(ms), "most": max(ms)})
    out = Report(rows=rows)
    out.facts = {
        "calls": f"{len(replies)} of {len(replies)} ended whole, {moved} moved between engines",
        "updates": f"{UPDATES} in {took:.1f} s",
        "boundaries checked": f"{tokens} tokens of {len(crossing)} replies, between {len(seen)} pairs of versions",
        "largest gap, nats": worst,
        "least gap under the neighbour's weights, nats": wrong,
    }
    out.facts["load average of the machine"] = f"{os.getloadavg()[0]:.1f}"
    out.target(f"all {len(replies)} calls ended whole, none moved", whole and moved == 0)
    out.target(f"logprobs agree to {TOLERANCE:g} nats around every boundary: {worst:.1e}", worst <= TOLERANCE)
    most = 1.5 * statistics.median(parts["bare broadcast"]) + 0.150
    pause = statistics.median(parts["pause to resume"])
    out.target(
        f"median pause {1e3 * pause:.0f} ms ≤ 1.5 x bare broadcast + 150 ms = {1e3 * most:.0f} ms",
        pause <= most,
    )
    return out


class Bare:
    """A gloo group of one sender and `receivers`, each of them a thread with buffers of its own."""

    def __init__(self, receivers: int) -> None:
        timeout = timedelta(seconds=30)
        self._store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        self._groups: list[Any] = [None] * (receivers + 1)

        def join(rank: int) -> None:
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timeout
            store = TCPStore("127.0.0.1", self._store.port, None, False, timeout, wait_for_workers=False)
            self._groups[rank] = dist.ProcessGroupGloo(
                PrefixStore("bare", store), rank, receivers + 1, options
            )

        self._each(join)

    def _each(self, do: Any) -> None:
        threads = [threading.Thread(target=do, args=(rank,)) for rank in range(len(self._groups))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def seconds(self, nbytes: int) -> float:
        buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in self._groups]

        def take_part(rank: int) -> None:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self._groups[rank].broadcast([buffers[rank]], options).wait()

        began = time.monotonic()
        self._each(take_part)
        return time.monotonic() - began


if __name__ == "__main__":
    main(__doc__ or "", measure)
