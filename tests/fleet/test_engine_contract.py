"""What this project relies on in an engine, found true of real vLLM and of the fake alike."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator

import aiohttp
import pytest
from fakes.engine import FakeEngine

from areal_gateway.fleet.engine import EngineClient, EngineRefused, sampling_params
from areal_gateway.fleet.types import Chunk, EngineSampling, Span

PROMPT = [7, 8, 9, 10, 11]


@pytest.fixture(params=["fake", pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.timeout(400)])])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    if request.param == "fake":
        async with FakeEngine(max_model_len=1024, eos=1) as fake:
            fake.step_s = 0.002
            client = await ready(EngineClient(fake.url, None))
            yield client
            await client.close()
    else:
        client = await ready(EngineClient(request.getfixturevalue("vllm_url"), None))
        yield client
        await client.close()


async def ready(client: EngineClient) -> EngineClient:
    client.model = await client.model_name(5)
    await client.resume(5)
    await client.set_label(0, 5)
    async for _ in client.generate(PROMPT, EngineSampling(max_tokens=4), 60):
        pass  # compiles, on a real engine
    return client


def long(n: int = 400, **kw) -> EngineSampling:
    return EngineSampling(max_tokens=n, extra={"ignore_eos": True}, **kw)


async def collect(
    client: EngineClient, sampling: EngineSampling, prompt: list[int] = PROMPT
) -> tuple[list[int], list[float | None], str, list[Span]]:
    chunks = [c async for c in client.generate(prompt, sampling, 60)]
    assert all(c.finish_reason is None and c.spans is None for c in chunks[:-1])
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.spans is not None
    ids = [t for c in chunks for t in c.token_ids]
    return ids, [x for c in chunks for x in c.logprobs], last.finish_reason, last.spans


async def test_every_token_has_a_logprob_and_a_version(client: EngineClient) -> None:
    ids, logprobs, finish, spans = await collect(client, long(37, temperature=1.0))
    assert (len(ids), len(logprobs), finish) == (37, 37, "length")
    assert all(x is not None and x <= 0 for x in logprobs)
    assert spans == [(0, 37, 0)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_likeliest_tokens_are_told_beside_the_sampled_one(
    client: EngineClient, temperature: float
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


async def test_a_stream_carries_many_tokens_per_event(client: EngineClient) -> None:
    chunks = [c async for c in client.generate(PROMPT, long(64), 60)]
    assert 2 <= len(chunks) <= 20


async def test_greedy_is_deterministic_and_streaming_changes_nothing(client: EngineClient) -> None:
    sampling = long(48, temperature=0.0)
    streamed, logprobs, _, _ = await collect(client, sampling)
    again, _, _, _ = await collect(client, sampling)
    assert streamed == again
    body = {"model": client.model, "token_ids": PROMPT, "sampling_params": sampling_params(sampling)}
    async with client.session.post(client.url + "/inference/v1/generate", json=body) as response:
        choice = (await response.json())["choices"][0]
    assert choice["token_ids"] == streamed
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [c["token_id"] for c in content] == streamed
    assert [c["logprob"] for c in content] == pytest.approx(logprobs, abs=1e-4)
    assert [(s["start"], s["end"], int(s["version"])) for s in choice["weight_versions"]] == [(0, 48, 0)]


async def test_a_greedy_reply_goes_on_from_its_own_prefix(client: EngineClient) -> None:
    whole, _, _, _ = await collect(client, long(40, temperature=0.0))
    rest, _, _, _ = await collect(client, long(25, temperature=0.0), PROMPT + whole[:15])
    assert whole[15:] == rest


async def test_a_seed_makes_sampling_repeatable(client: EngineClient) -> None:
    one, _, _, _ = await collect(client, long(30, temperature=1.0, seed=5))
    two, _, _, _ = await collect(client, long(30, temperature=1.0, seed=5))
    other, _, _, _ = await collect(client, long(30, temperature=1.0, seed=6))
    assert one == two != other


async def test_a_stop_token_ends_the_reply_and_is_part_of_it(client: EngineClient) -> None:
    whole, _, _, _ = await collect(client, long(40, temperature=0.0))
    stop = whole[5]
    first = whole.index(stop)
    ids, logprobs, finish, spans = await collect(client, long(40, temperature=0.0, stop_token_ids=[stop]))
    assert (ids, finish) == (whole[: first + 1], "stop")
    assert len(logprobs) == len(ids)
    assert spans == [(0, len(ids), 0)]


async def test_a_prompt_that_does_not_fit_is_refused(client: EngineClient) -> None:
    with pytest.raises(EngineRefused) as caught:
        await collect(client, long(8), [5] * 1100)
    assert caught.value.status == 400


async def test_max_tokens_beyond_the_context_end_at_the_context(client: EngineClient) -> None:
    ids, _, finish, _ = await collect(client, long(500), [5] * 1000)
    assert finish == "length"
    assert len(ids) == 24


class Reading:
    """A reply read in the background."""

    def __init__(self, client: EngineClient, sampling: EngineSampling) -> None:
        self.chunks: list[Chunk] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, sampling))

    async def _read(self, client: EngineClient, sampling: EngineSampling) -> None:
        async for chunk in client.generate(PROMPT, sampling, 60):
            self.chunks.append(chunk)
            self._more.set()

    @property
    def n(self) -> int:
        return sum(len(c.token_ids) for c in self.chunks)

    async def until(self, n: int) -> None:
        async with asyncio.timeout(30):
            while self.n < n:
                await self._more.wait()
                self._more.clear()


async def test_a_paused_engine_keeps_its_requests_and_a_new_label_makes_a_second_span(
    client: EngineClient,
) -> None:
    reading = Reading(client, long(600))
    await reading.until(20)
    await client.pause(10)
    await asyncio.sleep(0.1)
    frozen = reading.n
    await asyncio.sleep(0.3)
    assert reading.n == frozen < 600, "a paused engine decodes nothing"
    await client.set_label(7, 5)
    assert await client.label(5) == "7"
    await client.resume(5)
    await asyncio.wait_for(reading.task, 30)
    last = reading.chunks[-1]
    assert last.finish_reason == "length"
    assert last.spans is not None
    (a, b, v), (c, d, w) = last.spans
    assert (a, v, w, d) == (0, 0, 7, 600)
    # Tokens not yet streamed when the pause came (fewer than one event holds) are old ones too.
    assert b == c
    assert frozen <= b < frozen + 8


async def test_a_request_sent_to_a_paused_engine_waits_for_the_resume(client: EngineClient) -> None:
    await client.pause(10)
    reading = Reading(client, long(10))
    await asyncio.sleep(0.3)
    assert reading.n == 0
    await client.set_label(3, 5)
    await client.resume(5)
    await asyncio.wait_for(reading.task, 30)
    assert reading.chunks[-1].spans == [(0, 10, 3)]


async def test_an_aborting_pause_ends_requests_with_what_they_have(client: EngineClient) -> None:
    reading = Reading(client, long(900))
    await reading.until(20)
    async with client.session.post(client.url + "/pause", params={"mode": "abort"}) as response:
        assert response.status == 200
    await asyncio.wait_for(reading.task, 10)
    last = reading.chunks[-1]
    assert last.finish_reason == "abort"
    assert last.spans == [(0, reading.n, 0)]
    assert 20 <= reading.n < 900
    await client.resume(5)


async def test_leaving_a_stream_frees_the_engine(client: EngineClient) -> None:
    """Asked of the engine itself: a waiting pause returns only once nothing runs."""
    readings = [Reading(client, long(900)) for _ in range(4)]
    for reading in readings:
        await reading.until(8)
    for reading in readings:
        reading.task.cancel()
    await asyncio.gather(*(r.task for r in readings), return_exceptions=True)
    began = asyncio.get_running_loop().time()
    async with client.session.post(
        client.url + "/pause", params={"mode": "wait"}, timeout=aiohttp.ClientTimeout(total=20)
    ) as response:
        assert response.status == 200
    assert asyncio.get_running_loop().time() - began < 0.5
    await client.resume(5)


async def test_many_requests_at_once_keep_their_tokens_apart(client: EngineClient) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randrange(4, 40))] for _ in range(12)]
    sampling = long(24, temperature=0.0)
    alone = [(await collect(client, sampling, p))[0] for p in prompts]
    together = await asyncio.gather(*(collect(client, sampling, p) for p in prompts))
    assert [t[0] for t in together] == alone


async def test_worker_methods_answer_one_result_per_worker(client: EngineClient) -> None:
    assert await client.world_size(5) == 1
    results = await client.rpc("areal_status", {}, 5)
    assert [r["phase"] for r in results] == ["idle"]
    assert await client.rpc("areal_abort", {"epoch": 1}, 5) == [{}]
    with pytest.raises(EngineRefused):
        await client.rpc("areal_nothing", {}, 5)
    await client.health(5)
