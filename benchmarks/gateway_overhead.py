"""What the gateway adds to a call, beside the engine alone and two other gateways, in one run.

Two kinds of traffic. `conversation`: an agent with a tool whose turns grow to the size; its calls are timed from
three quarters of the size on. `fresh`: every call a new prompt of the size. Sizes are prompt x reply tokens of Qwen3's tokenizer. The
engine answers canned replies at once; from whoever sends it text (engine alone, peers) it asks one pass of the
tokenizer, as a real engine does. Here the gateway tokenises: `tokenizer ms` is what `tokenizers` alone needs for a
fresh prompt's text. `added` is the difference of the medians to the engine that is sent ids. Columns: medians in ms of the
engine sent `ids` or `text`, of this gateway (`ours`) and the peers (`rllm`, `agl`); with `/s`, calls per second.

Peers: rllm-model-gateway (SQLite store) and agentlightning (LLM proxy, in-memory store; it turns streaming calls
into plain ones), from PyPI, each in its own environment. --quick leaves out streams, and the peers with 200 clients.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from _face import Report, main
from _qwen3 import model_folder
from _systems import System, agentlightning, areal, bare, canned_engine, metrics, resident_mib, rllm
from _traffic import TOOLS, Plan, Size, body, plan, text

from areal_agent.config import GatewayConfig
from areal_gateway.tokens import Tokens

SIZES = (Size(200, 50), Size(2000, 300), Size(16000, 1000))
CLIENTS = (1, 16, 200)
SHORT = {"engine": "text", "areal_agent": "ours", "rllm-model-gateway": "rllm", "agentlightning": "agl"}
"""Columns: the engine alone, asked in text (asked in ids it is `ids`), then the gateways; medians in ms, then calls a second."""
CELL_S, QUICK_CELL_S = 2.0, 1.2
ROUNDS = {1: 3, 16: 3, 200: 1}
"""Everybody has its turn, so many times, by clients: a shared machine is slow for some seconds, and then is not.
Two hundred whole conversations take a slow system minutes, which are average enough."""
LATE = 0.75
"""A conversation's call is timed when its prompt has this share of the size."""
ADDED_MS = {200: 2.0, 2000: 2.0, 16000: 4.0}
TOKENIZER_FACTOR = 1.5
PEER_FACTOR = 5.0
LAG_S = 0.02


@dataclass
class Cell:
    """One system under one kind of load: seconds of the timed calls, and all calls per second."""

    seconds: list[float] = field(default_factory=list)
    calls: int = 0
    elapsed: float = 0.0

    def __iadd__(self, other: Cell) -> Cell:
        self.seconds += other.seconds
        self.calls += other.calls
        self.elapsed += other.elapsed
        return self

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.seconds) * 1e3 if self.seconds else float("nan")

    @property
    def rate(self) -> float:
        return self.calls / self.elapsed


def measure(quick: bool) -> Report:
    report = Report()
    model = model_folder()
    tokens = Tokens.load(model, GatewayConfig())
    clients = CLIENTS[:2] if quick else CLIENTS
    streams = (False,) if quick else (False, True)
    cell_s = QUICK_CELL_S if quick else CELL_S
    with tempfile.TemporaryDirectory() as scratch:
        for size in SIZES:
            folder = Path(scratch) / str(size)
            folder.mkdir()
            p = plan(tokens, str(model / "tokenizer.json"), size)
            spec = folder / "spec.json"
            spec.write_text(json.dumps(p.spec))
            tokenizer_ms = bare_tokenizer_ms(tokens, p)
            with ExitStack() as stack:
                engine = stack.enter_context(canned_engine(spec))
                ours = stack.enter_context(areal(folder / "run", model, engine))
                peers = [stack.enter_context(make(folder, engine)) for make in (rllm, agentlightning)]
                systems = [by_ids(engine), bare(engine), ours, *peers]
                cells = itertools.product(("conversation", "fresh"), streams, clients)
                for traffic, stream, n in cells:
                    found = {s.name: Cell() for s in systems}
                    for system in systems * ROUNDS[n]:
                        load = under_load(system, p, traffic, stream, n, cell_s / ROUNDS[n])
                        found[system.name] += asyncio.run(load)
                    ids = found.pop(systems[0].name)
                    row(report, p, traffic, stream, n, ids, found, tokenizer_ms)
                    print(json.dumps(report.rows[-1], default=str), file=sys.stderr, flush=True)  # as it goes
                if quick:
                    asyncio.run(under_load(ours, p, "conversation", False, CLIENTS[-1], cell_s))
                check_lag(report, ours, size, CLIENTS[-1])
                report.facts[f"{size}: gateway's resident memory, MiB"] = resident_mib(ours.run)  # type: ignore[arg-type]
    return report


def row(
    report: Report,
    p: Plan,
    traffic: str,
    stream: bool,
    clients: int,
    ids: Cell,
    found: dict[str, Cell],
    tokenizer_ms: float,
) -> None:
    ours = found["areal_agent"]
    added = ours.p50_ms - ids.p50_ms
    report.rows.append(
        {
            "size": str(p.size),
            "traffic": traffic + (" stream" if stream else ""),
            "clients": clients,
            "ids": ids.p50_ms,
            **{SHORT[name]: cell.p50_ms for name, cell in found.items()},
            "added": added,
            "tokenizer": tokenizer_ms if traffic == "fresh" else "",
            **{f"{SHORT[name]}/s": cell.rate for name, cell in found.items()},
        }
    )
    if clients == 1 and p.size.prompt > 200:
        bound = ADDED_MS[p.size.prompt] + (TOKENIZER_FACTOR * tokenizer_ms if traffic == "fresh" else 0.0)
        how = ", streaming" if stream else ""
        report.target(f"{p.size} {traffic}{how}: added {added:.2f} ms <= {bound:.2f} ms", added <= bound)
    if clients == 16 and traffic == "conversation":
        for name in ("rllm-model-gateway", "agentlightning"):
            ratio = ours.rate / found[name].rate
            how = ", streaming" if stream else ""
            report.target(
                f"{p.size}{how}, 16 clients: {ratio:.1f} x the calls per second of {name} (>= {PEER_FACTOR:g})",
                ratio >= PEER_FACTOR,
            )


def check_lag(report: Report, ours: System, size: Size, clients: int) -> None:
    """The event loop's lag over the whole run at this size, up to `clients` sessions at once."""
    found = asyncio.run(metrics(ours.run))  # type: ignore[arg-type]
    total = found["areal_event_loop_lag_seconds_count"]
    within = found[f'areal_event_loop_lag_seconds_bucket{{le="{LAG_S}"}}']
    report.target(
        f"{size}, up to {clients} sessions: event loop lag <= {LAG_S * 1e3:g} ms in {within / total:.2%} of "
        f"{total:.0f} looks (>= 99 %)",
        within / total >= 0.99,
    )


async def under_load(
    system: System, p: Plan, traffic: str, stream: bool, clients: int, seconds: float
) -> Cell:
    """`clients` of them, each calling again as soon as it has its reply, for `seconds` after a warm-up.

    A conversation that was begun goes on to its end: else a slow system would be asked short prompts only.
    Sessions are opened over connections that are not the agents': it is not an agent that opens its session.
    """
    cell = Cell()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
    seeds = itertools.count(int(time.time() * 1e3))
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as http,
        aiohttp.ClientSession() as opening,
    ):
        makers = [conversation if traffic == "conversation" else fresh for _ in range(clients)]
        await asyncio.gather(
            *(client(http, opening, system, p, make, stream, seeds, Cell(), seconds * 0.2) for make in makers)
        )
        start = time.perf_counter()
        await asyncio.gather(
            *(
                client(
                    http,
                    opening,
                    system,
                    p,
                    make,
                    stream,
                    seeds,
                    cell,
                    seconds,
                    whole=traffic == "conversation",
                )
                for make in makers
            )
        )
        cell.elapsed = time.perf_counter() - start
    return cell


async def client(
    http: aiohttp.ClientSession,
    opening: aiohttp.ClientSession,
    system: System,
    p: Plan,
    make: Callable[[Plan, bool, int], Iterator[tuple[bytes, bool]]],
    stream: bool,
    seeds: Iterator[int],
    cell: Cell,
    seconds: float,
    whole: bool = False,
) -> None:
    url, headers = await system.open(opening)
    end = time.perf_counter() + seconds
    while True:
        for sent, timed in make(p, stream, next(seeds)):
            if system.name == "engine(ids)":
                sent = id_body(p, stream)
            start = time.perf_counter()
            async with http.post(
                url, data=sent, headers={"content-type": "application/json", **headers}
            ) as answer:
                if answer.status != 200:
                    raise SystemExit(f"{answer.url} answered {answer.status}: {(await answer.text())[:300]}")
                async for _ in answer.content.iter_any():
                    pass
            took = time.perf_counter() - start
            cell.calls += 1
            if timed:
                cell.seconds.append(took)
            if not whole and time.perf_counter() > end:
                return
        if time.perf_counter() > end:
            return


def conversation(p: Plan, stream: bool, seed: int) -> Iterator[tuple[bytes, bool]]:
    """The calls of one agent, growing; whether each is timed."""
    messages = p.opening(seed)
    for turn in range(p.turns):
        yield body(messages, stream), turn >= LATE * (p.turns - 1) and turn > 0
        messages += p.answered(seed + turn)


def fresh(p: Plan, stream: bool, seed: int) -> Iterator[tuple[bytes, bool]]:
    """A handful of unrelated prompts of one session."""
    for i in range(8):
        yield body(p.fresh(seed * 8 + i), stream), True


def by_ids(engine: str) -> System:
    """The engine, asked in ids, as this gateway asks it."""

    async def opened(_: aiohttp.ClientSession) -> tuple[str, dict[str, str]]:
        return f"{engine}/inference/v1/generate", {}

    return System("engine(ids)", opened)


def id_body(p: Plan, stream: bool) -> bytes:
    params: dict[str, Any] = {"max_tokens": p.size.reply, "temperature": 1.0, "logprobs": 0}
    return json.dumps(
        {"model": "policy", "token_ids": p.ids, "sampling_params": params, "stream": stream}
    ).encode()


def bare_tokenizer_ms(tokens: Tokens, p: Plan) -> float:
    """Median milliseconds of `tokenizers` for the text of a fresh prompt."""
    tools = json.dumps(TOOLS)
    times = []
    for seed in range(15):
        words = tools + text(p.fresh_words, seed)
        start = time.perf_counter()
        tokens.tokenizer.encode(words)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def ledger_calls(folder: Path) -> int:
    with sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        return ledger.execute(
            "SELECT count(*) FROM calls WHERE state IN ('complete', 'truncated')"
        ).fetchone()[0]


if __name__ == "__main__":
    main(__doc__ or "", measure)
