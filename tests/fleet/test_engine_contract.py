"""What this project relies on in an engine, found true of real vLLM and of the fake alike."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from fakes.engine import FakeEngine

from areal_agent.errors import EngineError
from areal_gateway.fleet.continuation import remaining
from areal_gateway.fleet.drivers import drive
from areal_gateway.fleet.event import GENERATE
from areal_gateway.fleet.http import EngineHTTP
from areal_gateway.fleet.protocol import EngineDriver, EngineRefused
from areal_gateway.fleet.replies import sampling_params
from areal_gateway.fleet.resubmit import ResubmitDriver
from areal_gateway.fleet.types import INTERRUPTED, Chunk, EngineSampling, Span

PROMPT = [7, 8, 9, 10, 11]

real = [pytest.mark.engine, pytest.mark.timeout(400)]
CASES = [
    ("fake", "spans"),
    ("fake", "resubmit"),
    ("fake", "completions"),
    ("fake before 0.32", "auto"),
    ("fake before token ids", "auto"),
    pytest.param(("vllm", "spans"), marks=real),
    pytest.param(("vllm", "resubmit"), marks=real),
    pytest.param(("vllm", "completions"), marks=real),
]
"""(server, driver): every driver on the server that has everything, and what an older server gets by itself.
`completions` is the resubmit driver on a server whose token-in/token-out endpoint it does not know."""

OLDER = {"fake": None, "fake before 0.32": "generate", "fake before token ids": "completions"}


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
async def client(request: pytest.FixtureRequest) -> AsyncIterator[EngineDriver]:
    server, kind = request.param
    async with AsyncExitStack() as stack:
        if server == "vllm":
            url = request.getfixturevalue("vllm_url")
        else:
            fake = FakeEngine(max_model_len=1024, eos=1, older=OLDER[server], step_s=0.002)
            url = (await stack.enter_async_context(fake)).url
        client = await driver(url, kind)
        stack.push_async_callback(client.close)
        client.model = await client.model_name(5)
        await client.resume(5)
        await client.stamp(0, 5)
        async for _ in client.generate(PROMPT, EngineSampling(max_tokens=4), 60):
            pass  # compiles, on a real engine
        yield client


async def driver(url: str, kind: str) -> EngineDriver:
    if kind != "completions":
        return await drive(url, None, kind, 10)  # pyright: ignore[reportArgumentType]
    http = EngineHTTP(url, None)
    paths = await http.paths(10)
    await http.close()
    return ResubmitDriver(url, None, paths - {GENERATE})


def http_of(client: EngineDriver) -> EngineHTTP:
    """For what no driver asks of a server, and tests do."""
    assert isinstance(client, EngineHTTP)
    return client


def long(n: int = 400, **kw) -> EngineSampling:
    return EngineSampling(max_tokens=n, extra={"ignore_eos": True}, **kw)


async def collect(
    client: EngineDriver, sampling: EngineSampling, prompt: list[int] = PROMPT
) -> tuple[list[int], list[float | None], str, list[Span]]:
    chunks = [c async for c in client.generate(prompt, sampling, 60)]
    assert all(c.finish_reason is None and c.spans is None for c in chunks[:-1])
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.spans is not None
    ids = [t for c in chunks for t in c.token_ids]
    return ids, [x for c in chunks for x in c.logprobs], last.finish_reason, last.spans


async def test_every_token_has_a_logprob_and_a_version(client: EngineDriver) -> None:
    ids, logprobs, finish, spans = await collect(client, long(37, temperature=1.0))
    assert (len(ids), len(logprobs), finish) == (37, 37, "length")
    assert all(x is not None and x <= 0 for x in logprobs)
    assert spans == [(0, 37, 0)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_likeliest_tokens_are_told_beside_the_sampled_one(
    client: EngineDriver, temperature: float
) -> None:
    sampling = long(20, temperature=temperature, top_logprobs=5)
    chunks = [c async for c in client.generate(PROMPT, sampling, 60)]
    ids = [t for c in chunks for t in c.token_ids]
    logprobs = [p for c in chunks for p in c.logprobs]
    tops = [top for c in chunks for top in c.top or ()]
    assert len(ids) == len(logprobs) == len(tops) == 20
    for token, logprob, top in zip(ids, logprobs, tops, strict=True):
        assert logprob is not None
        assert len({t for t, _ in top}) == 5
        assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)
        assert sum(math.exp(p) for _, p in top) < 1 + 1e-4
        # Among the likeliest it is told as it was recorded; outside of them it is less likely than all.
        assert dict(top).get(token, logprob) == logprob
        assert token in dict(top) or logprob <= top[-1][1]
        assert temperature > 0 or top[0][0] == token


async def test_a_stream_carries_many_tokens_per_event(client: EngineDriver) -> None:
    chunks = [c async for c in client.generate(PROMPT, long(64), 60)]
    assert 2 <= len(chunks) <= 20


async def test_greedy_is_deterministic_and_streaming_changes_nothing(client: EngineDriver) -> None:
    sampling = long(48, temperature=0.0)
    streamed, logprobs, _, _ = await collect(client, sampling)
    again, _, _, _ = await collect(client, sampling)
    assert streamed == again
    if client.kind == "resubmit":
        return
    body = {"model": client.model, "token_ids": PROMPT, "sampling_params": sampling_params(sampling)}
    async with http_of(client).session.post(client.url + GENERATE, json=body) as response:
        choice = (await response.json())["choices"][0]
    assert choice["token_ids"] == streamed
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [c["token_id"] for c in content] == streamed
    assert [c["logprob"] for c in content] == pytest.approx(logprobs, abs=1e-4)
    assert [(s["start"], s["end"], int(s["version"])) for s in choice["weight_versions"]] == [(0, 48, 0)]


async def test_a_greedy_reply_goes_on_from_its_own_prefix(client: EngineDriver) -> None:
    whole, _, _, _ = await collect(client, long(40, temperature=0.0))
    rest, _, _, _ = await collect(client, long(25, temperature=0.0), PROMPT + whole[:15])
    assert whole[15:] == rest


async def test_a_seed_makes_sampling_repeatable(client: EngineDriver) -> None:
    one, _, _, _ = await collect(client, long(30, temperature=1.0, seed=5))
    two, _, _, _ = await collect(client, long(30, temperature=1.0, seed=5))
    other, _, _, _ = await collect(client, long(30, temperature=1.0, seed=6))
    assert one == two != other


async def test_a_stop_token_ends_the_reply_and_is_part_of_it(client: EngineDriver) -> None:
    whole, _, _, _ = await collect(client, long(40, temperature=0.0))
    stop = whole[5]
    first = whole.index(stop)
    ids, logprobs, finish, spans = await collect(client, long(40, temperature=0.0, stop_token_ids=[stop]))
    assert (ids, finish) == (whole[: first + 1], "stop")
    assert len(logprobs) == len(ids)
    assert spans == [(0, len(ids), 0)]


async def test_a_prompt_that_does_not_fit_is_refused(client: EngineDriver) -> None:
    with pytest.raises(EngineRefused) as caught:
        await collect(client, long(8), [5] * 1100)
    assert caught.value.status == 400


async def test_max_tokens_beyond_the_context_end_at_the_context(client: EngineDriver) -> None:
    ids, _, finish, _ = await collect(client, long(500), [5] * 1000)
    assert finish == "length"
    assert len(ids) == 24


class Reading:
    """A reply read in the background."""

    def __init__(self, client: EngineDriver, sampling: EngineSampling) -> None:
        self.chunks: list[Chunk] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, sampling))

    async def _read(self, client: EngineDriver, sampling: EngineSampling) -> None:
        async for chunk in client.generate(PROMPT, sampling, 60):
            self.chunks.append(chunk)
            self._more.set()

    @property
    def ids(self) -> list[int]:
        return [t for c in self.chunks for t in c.token_ids]

    @property
    def logprobs(self) -> list[float | None]:
        return [x for c in self.chunks for x in c.logprobs]

    @property
    def n(self) -> int:
        return sum(len(c.token_ids) for c in self.chunks)

    async def until(self, n: int) -> None:
        async with asyncio.timeout(30):
            while self.n < n:
                await self._more.wait()
                self._more.clear()


async def test_a_suspended_engine_samples_nothing_and_its_replies_go_on_as_they_would_have(
    client: EngineDriver,
) -> None:
    """The heart of an update: what came before, and what comes after, is the reply that nobody disturbed."""
    sampling = long(600, temperature=0.0)
    whole, logprobs, _, _ = await collect(client, sampling)
    reading = Reading(client, sampling)
    await reading.until(20)
    await client.suspend(10)
    await asyncio.sleep(0.1)
    frozen = reading.n
    late = Reading(client, sampling)
    await asyncio.sleep(0.3)
    assert reading.n == frozen < 600
    assert late.n == 0, "a request sent to a suspended engine waits"
    await client.resume(5)
    await asyncio.wait_for(asyncio.gather(reading.task, late.task), 60)
    ids, got = reading.ids, reading.logprobs
    if client.kind == "resubmit":
        assert reading.chunks[-1].finish_reason == INTERRUPTED
        assert reading.chunks[-1].spans == [(0, len(ids), 0)]
        rest, more, _, spans = await collect(client, remaining(sampling, len(ids)), PROMPT + ids)
        assert spans == [(0, len(rest), 0)]
        ids, got = ids + rest, got + more
    assert ids == late.ids == whole
    assert got == pytest.approx(logprobs, abs=1e-4)


async def test_versions_are_numbers_that_the_engine_confirms(client: EngineDriver) -> None:
    """One driver sets them, so any will do; the other may say only what the workers have loaded."""
    assert (await client.held_version(5) or 0) == 0
    if client.kind == "resubmit":
        with pytest.raises(EngineError, match="given version 7 and its workers say they hold"):
            await client.stamp(7, 5)
        return
    reading = Reading(client, long(600))
    await reading.until(20)
    await client.suspend(10)
    await asyncio.sleep(0.1)
    frozen = reading.n
    queued = Reading(client, long(10))
    await asyncio.sleep(0.1)
    await client.stamp(7, 5)
    assert await client.held_version(5) == 7
    await client.resume(5)
    await asyncio.wait_for(asyncio.gather(reading.task, queued.task), 30)
    last = reading.chunks[-1]
    assert last.finish_reason == "length"
    assert last.spans is not None
    (a, b, v), (c, d, w) = last.spans
    assert (a, v, w, d) == (0, 0, 7, 600)
    # Tokens not yet streamed when the pause came (fewer than one event holds) are old ones too.
    assert b == c
    assert frozen <= b < frozen + 8
    assert queued.chunks[-1].spans == [(0, 10, 7)]


async def test_the_versions_of_a_reply_are_known_before_its_last_chunk(client: EngineDriver) -> None:
    """A stream that is cut after a change of versions: to the token what an undisturbed one would have said."""
    if client.kind == "resubmit":
        pytest.skip("no reply of this driver lives through a change of versions")
    readings = [Reading(client, long(500, temperature=0.0)) for _ in range(4)]
    for i, reading in enumerate(readings):
        await reading.until(10 + 5 * i)
    await client.suspend(10)
    await client.stamp(5, 5)
    await client.resume(5)
    for reading in readings[:2]:
        await reading.until(reading.n + 40)
    boundaries = {}
    for id, flight in list(client._flights.items()):  # pyright: ignore[reportAttributeAccessIssue]
        boundaries[id] = flight.marks
        assert flight.spans()[-1][1] == flight.n
    assert len(boundaries) == 4
    await asyncio.wait_for(asyncio.gather(*(r.task for r in readings)), 30)
    stamped = sorted(r.chunks[-1].spans[0][1] for r in readings if r.chunks[-1].spans)
    assert stamped == sorted(at for ((at, _),) in boundaries.values())


async def test_an_abort_that_is_not_ours_ends_requests_with_what_they_have(client: EngineDriver) -> None:
    reading = Reading(client, long(900))
    await reading.until(20)
    http = http_of(client)
    async with http.session.post(client.url + "/pause", params={"mode": "abort"}) as response:
        assert response.status == 200
    await asyncio.wait_for(reading.task, 10)
    last = reading.chunks[-1]
    assert last.finish_reason == "abort"
    assert last.spans == [(0, reading.n, 0)]
    assert 20 <= reading.n < 900
    await client.resume(5)


async def test_leaving_a_stream_frees_the_engine(client: EngineDriver) -> None:
    """Asked of the engine itself: a waiting pause returns only once nothing runs."""
    readings = [Reading(client, long(900)) for _ in range(4)]
    for reading in readings:
        await reading.until(8)
    for reading in readings:
        reading.task.cancel()
    await asyncio.gather(*(r.task for r in readings), return_exceptions=True)
    began = asyncio.get_running_loop().time()
    async with http_of(client).session.post(
        client.url + "/pause", params={"mode": "wait"}, timeout=aiohttp.ClientTimeout(total=20)
    ) as response:
        assert response.status == 200
    assert asyncio.get_running_loop().time() - began < 0.5
    await client.resume(5)


async def test_many_requests_at_once_keep_their_tokens_apart(client: EngineDriver) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randrange(4, 40))] for _ in range(12)]
    sampling = long(24, temperature=0.0)
    alone = [(await collect(client, sampling, p))[0] for p in prompts]
    together = await asyncio.gather(*(collect(client, sampling, p) for p in prompts))
    assert [t[0] for t in together] == alone


async def test_worker_methods_answer_one_result_per_worker(client: EngineDriver) -> None:
    assert await client.world_size(5) == 1
    (progress,) = await client.rpc("areal_progress", {}, 5)
    assert isinstance(progress["sampled"], dict)
    results = await client.rpc("areal_status", {}, 5)
    assert [r["phase"] for r in results] == ["idle"]
    assert await client.rpc("areal_abort", {"epoch": 1}, 5) == [{}]
    with pytest.raises(EngineRefused):
        await client.rpc("areal_nothing", {}, 5)
    await client.health(5)
