"""A client that leaves after any chunk, and new weights at any token: each leaves an exact record behind."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import FakeEngine
from fakes.policy import Prefix, policy
from fakes.policy import Reply as EngineReply
from gateway_support import CALCULATOR, Reply, ScriptedFleet, Served, eventually, make_app, tool_call

from areal_gateway.dialects.chat import ChatCompletions
from areal_gateway.fleet.spans import SpansDriver
from areal_gateway.fleet.types import Chunk, EngineSampling
from areal_gateway.tokens import Tokens

ASK = [{"role": "user", "content": "What is two plus three?"}]
SAID = "Let me think about it, then call." + tool_call()
CANCEL_S = 0.2
"""How soon the engine has to be free after its client left."""

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "tools": [CALCULATOR]},
    "/v1/responses": {"input": "two?"},
    "/v1/messages": {"messages": ASK, "max_tokens": 500},
    "/v1/completions": {"prompt": "two? "},
}


async def leave_after(served: Served, path: str, body: dict[str, Any], k: int) -> tuple[bool, float]:
    """Read `k` pieces of a stream whose engine waits after each token, then go: (it had ended, s until free)."""
    session = await served.open()
    served.fleet.say(Reply(SAID, chunk=1, delay_s=0.002))
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    asked_before = len(served.fleet.asked)
    response = await served.http.post(served.url + path, json={**body, "stream": True}, headers=headers)
    read = 0
    async for line in response.content:
        read += line.startswith(b"data:")
        if read > k:
            break
    ended = response.content.at_eof()
    response.close()
    left = time.perf_counter()
    asked = served.fleet.asked[asked_before]
    await eventually(lambda: asked.ended != "running")
    seconds = time.perf_counter() - left
    opened = served.gateway.sessions.get_open(session["session_id"])
    assert opened is not None
    await eventually(lambda: len(opened.history.calls) == 1)
    (call,) = (await served.inspect(session, trajectory=True))["calls"]
    if asked.ended == "cancelled":
        assert (call["state"], call["delivered"]) == ("aborted", False)
        assert call["usage"]["completion_tokens"] == len(asked.output_ids)
        assert (await served.inspect(session, trajectory=True))["sequences"] == []
    else:
        assert call["state"] == "complete"
    return ended or asked.ended == "done", seconds


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_after_any_chunk_frees_the_engine(served: Served, path: str) -> None:
    seconds, k = [], 0
    while True:
        ended, after = await leave_after(served, path, PATHS[path], k)
        if ended:
            break
        seconds.append(after)
        k += 1
    assert k >= 8
    print(
        f"\n{path}: {k} chunks; free after p50 {statistics.median(seconds):.4f} s, max {max(seconds):.4f} s"
    )
    assert statistics.median(seconds) < CANCEL_S


@pytest.mark.parametrize("tokens_before", [0, 1, 5, 20])
async def test_without_a_stream_too(served: Served, tokens_before: int) -> None:
    session = await served.open()
    served.fleet.say(Reply(SAID, chunk=1, delay_s=0.003))
    request = asyncio.create_task(served.post(session, {"messages": ASK}))
    await eventually(lambda: served.fleet.asked and len(served.fleet.asked[0].output_ids) >= tokens_before)
    request.cancel()
    left = time.perf_counter()
    await eventually(lambda: served.fleet.asked[0].ended == "cancelled")
    print(f"\nfree after {time.perf_counter() - left:.4f} s")
    await eventually(lambda: served.gateway.calls.totals["aborted"] == 1)
    (call,) = (await served.inspect(session))["calls"]
    assert (call["state"], call["delivered"]) == ("aborted", False)


async def test_a_reply_is_delivered_only_with_its_last_byte(served: Served) -> None:
    """The client leaves between the last token and the last event: the call is complete, and not delivered."""
    session = await served.open()
    opened = served.gateway.sessions.get_open(session["session_id"])
    assert opened is not None
    served.fleet.say("five")
    request = ChatCompletions().read({"messages": ASK, "stream": True}, opened)
    ahead = await served.gateway.calls.prepare(opened, request)
    exchange = served.gateway.calls.start(opened, request, b"digest", None, ahead)
    with exchange.subscribed(patient=False):
        await exchange.wait()
    (call,) = (await served.inspect(session, trajectory=True))["calls"]
    assert (call["state"], call["delivered"]) == ("complete", False)
    assert (await served.inspect(session, trajectory=True))["sequences"] == []


class Switching(FakeEngine):
    """An engine that gets new weights after so many tokens of a reply."""

    switch_at = 0

    async def _steps(self, r: Any):  # type: ignore[override]
        self.set_version(1 if self.switch_at == 0 else 0)
        async for n in super()._steps(r):
            if n == self.switch_at:
                self.set_version(1)
            yield n


class OneEngine(ScriptedFleet):
    """A fleet that is one engine behind its own client, HTTP and all."""

    client: SpansDriver

    async def generate(
        self, *, session_id: str, prompt_ids: list[int], sampling: EngineSampling, on_engine: Any = None
    ) -> AsyncGenerator[Chunk]:
        async for chunk in self.client.generate(prompt_ids, sampling, 30):
            yield chunk


@pytest.mark.parametrize("interval", [1, 3, 8])
@pytest.mark.parametrize("stream", [False, True])
async def test_new_weights_at_any_token_give_exact_spans(
    tokens: Tokens, tmp_path: Path, interval: int, stream: bool
) -> None:
    said = [*tokens.tokenizer.encode("Two plus three is five."), tokens.stop_token_ids[0]]
    served = make_app(tokens, tmp_path, fleet_type=OneEngine, sampling={"seed": 7})
    async with Switching(stream_interval=interval) as engine:
        engine.step_s = 0.0
        served.fleet.client = SpansDriver(engine.url, engine.model)
        await served.start()
        for at in range(len(said) + 1):
            engine.switch_at = at
            engine.script.append(EngineReply(said))
            session = await served.open()
            status, _, _ = await served.post(session, {"messages": ASK, "stream": stream})
            assert status == 200
            body = await served.inspect(session, trajectory=True)
            (call,), (sequence,) = body["calls"], body["sequences"]
            ends = [(v, s, e) for v, s, e in ((0, 0, at), (1, at, len(said))) if s < e]
            assert [(v["version"], v["start"], v["end"]) for v in call["versions"]] == ends
            asked = engine.requests[-1]
            prefix, expected = Prefix(asked["token_ids"]), []
            for i, token in enumerate(said):
                expected.append(
                    policy(prefix, int(i >= at), asked["sampling_params"]["seed"], engine.vocab)[1]
                )
                prefix.push(token)
            n = len(asked["token_ids"])
            assert sequence["token_ids"][n:] == said
            assert sequence["logprobs"][n:] == pytest.approx(expected, abs=1e-6)
            assert sequence["versions"] == [-1] * n + [int(i >= at) for i in range(len(said))]
        await served.fleet.client.close()
        await served.stop()
