"""kill -9 at random moments under load: what a client saw to its end is in the ledger, once, and goes on.

The clients keep their own books: which replies they got whole, which rewards and seals were confirmed, which
batches were confirmed. After the last kill the books and the ledger are compared.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from gateway_support import ADMIN_KEY

from areal_agent.wire import unpack
from areal_gateway.ledger import Ledger

CLIENTS = 6
TURNS = 3
GROUP = 2
LEASE_S = 1.0
GONE = (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError)
PROGRAM = Path(__file__).with_name("gateway_process.py")


@dataclass
class Books:
    """What the clients know for certain."""

    replies: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Exchange id -> (session, text), of replies received to their last byte."""
    rewards: dict[str, float] = field(default_factory=dict)
    seals: set[str] = field(default_factory=set)
    keys: dict[str, str] = field(default_factory=dict)
    acked: list[str] = field(default_factory=list)
    """Sessions of confirmed batches, one entry for each time."""
    unsure: set[str] = field(default_factory=set)
    """Sessions of batches whose ack was sent and not answered."""


class Client:
    def __init__(self, url: str, books: Books) -> None:
        self.url, self.books = url, books
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))

    async def post(self, path: str, body: Any, key: str = ADMIN_KEY, **headers: str) -> tuple[int, bytes]:
        """Until it is answered: a gateway that was killed comes back. Only for what may be repeated."""
        while True:
            try:
                return await self.once(path, body, key, **headers)
            except GONE:
                await asyncio.sleep(0.05)

    async def once(self, path: str, body: Any, key: str = ADMIN_KEY, **headers: str) -> tuple[int, bytes]:
        headers["Authorization"] = f"Bearer {key}"
        async with self.http.post(self.url + path, json=body, headers=headers) as r:
            return r.status, await r.read()

    async def open(self, group: str) -> dict[str, Any] | None:
        body = {"task_id": "t", "purpose": "train", "group_id": group, "group_size": GROUP}
        try:
            status, raw = await self.once("/admin/sessions", body)
        except GONE:
            return None
        assert status == 201, raw
        return orjson.loads(raw)

    async def turn(self, session: dict[str, Any], messages: list[Any], stream: bool, retry: str) -> str:
        """A reply received whole, asked for again under the same Idempotency-Key until it is."""
        body: dict[str, Any] = {"messages": messages, "stream": stream}
        status, raw = await self.post(
            "/v1/chat/completions", body, session["api_key"], **{"Idempotency-Key": retry}
        )
        assert status == 200, (status, raw[:300])
        if stream:
            events = [orjson.loads(e[6:]) for e in raw.split(b"\n\n") if e.startswith(b"data: {")]
            if not raw.endswith(b"data: [DONE]\n\n"):  # the kill cut it, and the connection ended quietly
                return await self.turn(session, messages, stream, retry)
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
            exchange = events[0]["id"]
        else:
            answer = orjson.loads(raw)
            text, exchange = answer["choices"][0]["message"]["content"], answer["id"]
        self.books.replies[exchange.removeprefix("chatcmpl-")] = (session["session_id"], text)
        return text

    async def episode(self, group: str, rng: random.Random) -> None:
        session = await self.open(group)
        if session is None:
            await asyncio.sleep(0.05)
            return
        session_id = session["session_id"]
        self.books.keys[session_id] = session["api_key"]
        messages: list[Any] = [{"role": "user", "content": f"task {session_id}"}]
        for turn in range(TURNS):
            text = await self.turn(session, messages, rng.random() < 0.5, f"{session_id}-{turn}")
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and {turn}?"}]
        value = round(rng.random(), 3)
        path = f"/admin/sessions/{session_id}"
        status, raw = await self.post(f"{path}/rewards", {"value": value, "key": "k"})
        assert status == 200, raw
        self.books.rewards[session_id] = value
        status, raw = await self.post(f"{path}/seal", {"outcome": "finished"})
        assert (status, orjson.loads(raw)["reward"]) == (200, value)
        self.books.seals.add(session_id)

    async def play(self, name: int, stop: asyncio.Event) -> None:
        rng, n = random.Random(name), 0
        while not stop.is_set():
            n += 1
            group = f"g{name}-{n}"
            await asyncio.gather(*(self.episode(group, rng) for _ in range(GROUP)))

    async def train(self, stop: asyncio.Event) -> None:
        """Leases, sometimes gives back or lets expire, else acks; an unanswered ack is repeated."""
        rng = random.Random(0)
        while not stop.is_set():
            body = {"groups": 1, "wait_s": 0.2, "lease_s": LEASE_S}
            status, raw = await self.post("/admin/trajectories/lease", body)
            if status != 200:
                continue
            batch = unpack(raw)
            sessions = {s.session_id for s in batch.sequences}
            lease, roll = {"lease_id": batch.lease_id}, rng.random()
            if roll < 0.1:
                continue
            if roll < 0.2:
                await self.post("/admin/trajectories/nack", lease)
                continue
            self.books.unsure |= sessions
            status, raw = await self.post("/admin/trajectories/ack", lease)
            self.books.unsure -= sessions
            if status == 200:
                self.books.acked += sessions
            else:
                assert status == 409, raw  # it expired while the gateway was away


class Gateways:
    """One gateway after the other on the same file and port, each ended by SIGKILL."""

    def __init__(self, nursery: asyncio.subprocess.Process) -> None:
        self.nursery = nursery

    @classmethod
    @asynccontextmanager
    async def of(cls, folder: Path, port: int) -> AsyncIterator[Gateways]:
        pipe = asyncio.subprocess.PIPE
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        nursery = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), str(folder), str(port), stdin=pipe, stdout=pipe, env=env
        )
        try:
            yield cls(nursery)
        finally:
            nursery.kill()
            await nursery.wait()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        assert self.nursery.stdin is not None
        assert self.nursery.stdout is not None
        self.nursery.stdin.write(b"start\n")
        line = await asyncio.wait_for(self.nursery.stdout.readline(), 120.0)
        assert line.startswith(b"ready "), line
        try:
            yield
        finally:
            os.kill(int(line.split()[1]), signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


async def survive(folder: Path, kills: int) -> Books:
    """Load all the while; then let what runs finish, and stop."""
    books, stop, port = Books(), asyncio.Event(), free_port()
    rng = random.Random(kills)
    clients = [Client(f"http://127.0.0.1:{port}", books) for _ in range(CLIENTS + 1)]
    async with Gateways.of(folder, port) as gateways, asyncio.TaskGroup() as group:
        work = [group.create_task(clients[n].play(n, stop)) for n in range(CLIENTS)]
        work.append(group.create_task(clients[-1].train(stop)))
        for _ in range(kills):
            async with gateways.one():
                await asyncio.sleep(rng.uniform(0.02, 1.0))
        async with gateways.one():
            await asyncio.sleep(0.5)
            stop.set()
            await asyncio.wait(work, timeout=60.0)
            assert all(task.done() for task in work), "clients still wait for an answer"
            await drain(clients[-1], books)
            await keys_work(clients[0], books)
    for client in clients:
        await client.http.close()
    return books


async def drain(client: Client, books: Books) -> None:
    """All leases that nobody confirmed have come back: take what is left, whole."""
    await asyncio.sleep(LEASE_S + 0.1)
    while True:
        status, raw = await client.post("/admin/trajectories/lease", {"groups": 1, "lease_s": 60.0})
        if status == 204:
            return
        batch = unpack(raw)
        assert (await client.post("/admin/trajectories/ack", {"lease_id": batch.lease_id}))[0] == 200
        books.acked += {s.session_id for s in batch.sequences}


async def keys_work(client: Client, books: Books) -> None:
    """Every key still reaches its session: an open one is served, a sealed one is refused as sealed."""
    for session_id, key in books.keys.items():
        body = {"messages": [{"role": "user", "content": "still there?"}]}
        status, raw = await client.post("/v1/chat/completions", body, key)
        assert status == (409 if session_id in books.seals else 200), (session_id, raw)


def compare(folder: Path, books: Books) -> Counter[str]:
    """Books against ledger. Returns what there was, counted."""
    ledger = Ledger(folder / "ledger.sqlite")
    try:
        histories = ledger.histories(s.session_id for s, _ in ledger.sessions())
    finally:
        ledger.close()
    calls = [c for h in histories.values() for c in h.calls]
    whole = {c.exchange_id: c for c in calls if c.state == "complete"}
    assert len(whole) == sum(c.state == "complete" for c in calls)
    for exchange, (session_id, text) in books.replies.items():
        call = whole[exchange]  # KeyError: a reply that the client saw is lost
        assert call.reply is not None
        assert (call.session_id, call.reply["content"]) == (session_id, text)
        assert len(call.output_ids) == len(call.logprobs) == call.spans[-1][1]
    for session_id, value in books.rewards.items():
        assert [r.value for r in histories[session_id].rewards] == [value]
    for session_id in books.seals:
        seal = histories[session_id].seal
        assert seal is not None
        assert (seal.reward, seal.outcome) == (books.rewards[session_id], "finished")
        lengths = Counter(
            (c.parent_id, len(c.messages)) for c in histories[session_id].calls if c.state == "complete"
        )
        assert sum(lengths.values()) >= TURNS
    twice = {s: n for s, n in Counter(books.acked).items() if n > 1}
    assert not twice, f"delivered more than once: {twice}"
    groups: dict[str, list[str]] = {}
    for h in histories.values():
        groups.setdefault(h.session.group_id, []).append(h.session.session_id)
    ready = [g for g in groups.values() if len(g) == GROUP and all(histories[s].seal for s in g)]
    assert not books.unsure
    assert {s for g in ready for s in g} == set(books.acked), (
        "a sealed group never reached the trainer, or half of it"
    )
    return Counter(
        sessions=len(histories),
        calls=len(calls),
        replies=len(books.replies),
        aborted=sum(c.state == "aborted" for c in calls),
        trained=len(books.acked),
    )


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=(pytest.mark.slow, pytest.mark.timeout(3600)))])
async def test_what_a_client_saw_is_kept_and_a_batch_is_delivered_once(
    kills: int, tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "policy").symlink_to(model_folder)
    counts = compare(tmp_path, await survive(tmp_path, kills))
    print(f"{kills} kills: {dict(counts)}")
    assert counts["replies"] > 2 * kills
    assert counts["trained"] > 0
