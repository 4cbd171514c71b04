"""What the gateway adds to a call: a canned engine alone, and behind the gateway, in one run.

Fresh prompts (each rendered and tokenised by the gateway; the engine alone is sent ids) of 200, 2000 and
16000 tokens with replies of 50, 300 and 1000, from 1 and 16 clients. `added` is the difference of the medians,
`ratio` the gateway's calls per second over the bare engine's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from _face import Report, main

from areal_agent.config import RunConfig
from areal_agent.rundir import RunDir

HERE = Path(__file__).parent
SIZES = ((200, 50), (2000, 300), (16000, 1000))
CLIENTS = (1, 16)
READY_S = 60.0

Call = Callable[[aiohttp.ClientSession, int], Awaitable[None]]


def measure(quick: bool) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        model = blank_model(Path(scratch))
        for prompt, reply in SIZES[: 2 if quick else 3]:
            calls = max(32, (40_000 if quick else 200_000) // (prompt + reply))
            with engine(reply) as url, gateway(Path(scratch) / f"run-{prompt}", model, url, reply) as run:
                sent = asyncio.run(compare(report, prompt, reply, calls, url, run))
                recorded = ledger_calls(run.path)
                report.target(f"{prompt}x{reply}: all {sent} calls are in the ledger", recorded == sent)
    return report


async def compare(report: Report, prompt: int, reply: int, calls: int, engine_url: str, run: RunDir) -> int:
    """One row per number of clients and way of answering; returns the calls sent through the gateway."""
    info = run.read("gateway.json") or {}
    sent = 0
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as http:
        admin = {"authorization": f"Bearer {run.admin_key()}"}
        opened = {"task_id": "bench", "purpose": "rollout"}
        async with http.post(f"{info['url']}/admin/sessions", json=opened, headers=admin) as answer:
            key = (await answer.json())["api_key"]
        for clients, stream in itertools.product(CLIENTS, (False, True)):
            bare = await load(http, direct(engine_url, prompt, reply, stream), clients, calls)
            ours = await load(http, through(info["url"], key, prompt, stream), clients, calls)
            sent += calls + warm_up(clients)
            report.rows.append(
                {
                    "prompt x reply": f"{prompt} x {reply}",
                    "clients": clients,
                    "stream": stream,
                    "engine p50 ms": bare[0] * 1e3,
                    "gateway p50 ms": ours[0] * 1e3,
                    "added ms": (ours[0] - bare[0]) * 1e3,
                    "gateway calls/s": ours[1],
                    "ratio": ours[1] / bare[1],
                }
            )
    return sent


async def load(http: aiohttp.ClientSession, call: Call, clients: int, calls: int) -> tuple[float, float]:
    """(median seconds, calls per second) of `calls` calls by `clients` clients, after a warm-up."""
    seeds = itertools.count(random.getrandbits(30))
    times: list[float] = []

    async def client(n: int, keep: bool) -> None:
        for _ in range(n):
            start = time.perf_counter()
            await call(http, next(seeds))
            if keep:
                times.append(time.perf_counter() - start)

    shares = [calls // clients + (i < calls % clients) for i in range(clients)]
    await asyncio.gather(*(client(warm_up(clients) // clients, False) for _ in shares))
    start = time.perf_counter()
    await asyncio.gather(*(client(n, True) for n in shares))
    return statistics.median(times), calls / (time.perf_counter() - start)


def warm_up(clients: int) -> int:
    return 4 * clients


def direct(url: str, prompt: int, reply: int, stream: bool) -> Call:
    async def call(http: aiohttp.ClientSession, seed: int) -> None:
        ids = [random.Random(seed).randrange(10, 200)] * prompt
        params = {"max_tokens": reply, "temperature": 1.0, "logprobs": 0}
        body = {"model": "fake", "token_ids": ids, "sampling_params": params, "stream": stream}
        async with http.post(f"{url}/inference/v1/generate", json=body) as answer:
            await drain(answer)

    return call


def through(url: str, key: str, prompt: int, stream: bool) -> Call:
    headers = {"authorization": f"Bearer {key}"}

    async def call(http: aiohttp.ClientSession, seed: int) -> None:
        digits = "".join(random.Random(seed).choices("0123456789", k=prompt))  # a digit is a token
        body = {"model": "policy", "stream": stream, "messages": [{"role": "user", "content": digits}]}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            await drain(answer)

    return call


async def drain(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise SystemExit(f"{answer.url} answered {answer.status}: {(await answer.text())[:300]}")
    async for _ in answer.content.iter_any():
        pass


@contextmanager
def engine(tokens: int) -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(HERE / "_canned_engine.py"), "--port", str(port), "--tokens", str(tokens)]
    with started(command, lambda: listens(port)):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def gateway(folder: Path, model: Path, engine_url: str, reply: int) -> Iterator[RunDir]:
    values: dict[str, Any] = {"model": str(model), "run_dir": str(folder), "sampling": {"max_tokens": reply}}
    values["fleet"] = {"attach": [engine_url]}
    run = RunDir.create(RunConfig.parse(values))
    command = [sys.executable, "-m", "areal_agent.cli", "gateway", "--run-dir", str(folder)]
    with started(command, lambda: run.read("gateway.json") is not None):
        yield run


@contextmanager
def started(command: list[str], ready: Callable[[], bool]) -> Iterator[None]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + READY_S
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"not ready (code {process.poll()}): {' '.join(command)}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(30)


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def ledger_calls(folder: Path) -> int:
    with sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        return ledger.execute(
            "SELECT count(*) FROM calls WHERE state IN ('complete', 'truncated')"
        ).fetchone()[0]


def blank_model(scratch: Path) -> Path:
    """The examples' tokenizer and model shape, with a context long enough for every size."""
    sys.path.insert(0, str(HERE.parent / "examples" / "agents"))
    from small_model.warm_start import RECIPE, blank

    folder = blank(scratch / "model", RECIPE, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    return folder


if __name__ == "__main__":
    main(__doc__ or "", measure)
