"""Chat completions as an openai client sees them, and what is recorded of them."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from gateway_support import CALCULATOR, CONTEXT, Reply, Served, logprob, make_app, tool_call

from areal_gateway.tokens import Tokens

ASK = [{"role": "user", "content": "What is two plus three?"}]


async def test_a_plain_reply(served: Served) -> None:
    served.fleet.say("five")
    session = await served.open()
    reply = await served.openai(session).chat.completions.create(model="any", messages=ASK)
    assert reply.choices[0].message.content == "five"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "any"
    assert reply.usage.completion_tokens == len(served.fleet.asked[0].output_ids)
    assert reply.usage.prompt_tokens == len(served.fleet.asked[0].prompt_ids)


async def test_the_prompt_is_the_renderers(served: Served) -> None:
    session = await served.open()
    await served.openai(session).chat.completions.create(model="m", messages=ASK, tools=[CALCULATOR])
    expected = served.gateway.tokens.renderer.render_ids(ASK, tools=[CALCULATOR], add_generation_prompt=True)
    assert served.fleet.asked[0].prompt_ids == expected


async def test_a_tool_call_has_openais_shape(served: Served) -> None:
    served.fleet.say(f"Let me see.\n{tool_call()}")
    session = await served.open()
    reply = await served.openai(session).chat.completions.create(model="m", messages=ASK, tools=[CALCULATOR])
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "calculator"
    assert json.loads(call.function.arguments) == {"expression": "2+3"}
    assert call.id


@pytest.mark.parametrize("choice", [None, "none"])
async def test_tool_markup_is_text_where_no_tool_was_offered(served: Served, choice: str | None) -> None:
    served.fleet.say(tool_call())
    session = await served.open()
    extra = {} if choice is None else {"tools": [CALCULATOR], "tool_choice": choice}
    reply = await served.openai(session).chat.completions.create(model="m", messages=ASK, **extra)
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].message.content == tool_call()
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("broken", ["<tool_call>\n{not json}\n</tool_call>", '<tool_call>\n{"name": "calc'])
async def test_a_broken_tool_call_stays_visible(served: Served, broken: str) -> None:
    served.fleet.say("Hm. " + broken)
    session = await served.open()
    reply = await served.openai(session).chat.completions.create(model="m", messages=ASK, tools=[CALCULATOR])
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].message.content == "Hm.\n" + broken


async def test_a_reply_no_parser_can_read_is_text(served: Served) -> None:
    huge = tool_call(arguments='{"n": ' + "9" * 5000 + "}")
    served.fleet.say(Reply(huge))
    session = await served.open()
    big = served.gateway.tokens
    old, big.context = big.context, 10**6
    try:
        reply = await served.openai(session).chat.completions.create(
            model="m", messages=ASK, tools=[CALCULATOR]
        )
    finally:
        big.context = old
    assert reply.choices[0].message.content == huge


async def test_n_makes_sibling_calls(served: Served) -> None:
    served.fleet.say("one", "two", "three")
    session = await served.open()
    reply = await served.openai(session).chat.completions.create(model="m", messages=ASK, n=3)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert sorted(c.message.content for c in reply.choices) == ["one", "three", "two"]
    calls = (await served.inspect(session))["calls"]
    assert {c["parent_id"] for c in calls} == {None}
    assert len({c["call_id"] for c in calls}) == 3
    assert reply.usage.completion_tokens == sum(c["usage"]["completion_tokens"] for c in calls)


async def test_logprobs_are_the_engines(served: Served) -> None:
    served.fleet.say("five")
    session = await served.open()
    reply = await served.openai(session).chat.completions.create(model="m", messages=ASK, logprobs=True)
    asked = served.fleet.asked[0]
    content = reply.choices[0].logprobs.content
    assert [t.logprob for t in content] == [
        logprob(asked.prompt_ids, i) for i in range(len(asked.output_ids))
    ]
    assert "".join(t.token for t in content) == "five<|im_end|>"


async def test_a_stop_string_ends_the_text_and_is_not_in_it(served: Served) -> None:
    served.fleet.say("one STOP two")
    session = await served.open()
    reply = await served.openai(session).chat.completions.create(model="m", messages=ASK, stop="STOP")
    assert reply.choices[0].message.content == "one "
    assert served.fleet.asked[0].sampling.stop == ["STOP"]


class TestMaxTokens:
    async def test_absent_it_is_the_room_in_the_context(self, served: Served) -> None:
        session = await served.open()
        await served.openai(session).chat.completions.create(model="m", messages=ASK)
        asked = served.fleet.asked[0]
        assert asked.sampling.max_tokens == CONTEXT - len(asked.prompt_ids)

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    async def test_both_names_limit_the_reply(self, served: Served, name: str) -> None:
        served.fleet.say("a long reply that is cut")
        session = await served.open()
        reply = await served.openai(session).chat.completions.create(model="m", messages=ASK, **{name: 4})
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens == 4

    async def test_more_than_the_room_is_lowered(self, served: Served) -> None:
        session = await served.open()
        await served.openai(session).chat.completions.create(model="m", messages=ASK, max_tokens=10**6)
        asked = served.fleet.asked[0]
        assert asked.sampling.max_tokens == CONTEXT - len(asked.prompt_ids)

    async def test_the_sessions_cap_wins_over_a_larger_wish(self, served: Served) -> None:
        session = await served.open(sampling={"max_tokens": 5})
        await served.openai(session).chat.completions.create(model="m", messages=ASK, max_tokens=50)
        assert served.fleet.asked[0].sampling.max_tokens == 5


async def test_a_full_context_is_a_400_the_agent_can_recognise(served: Served) -> None:
    session = await served.open()
    long = [{"role": "user", "content": "x" * 3 * CONTEXT}]
    with pytest.raises(openai.BadRequestError) as e:
        await served.openai(session).chat.completions.create(model="m", messages=long)
    assert e.value.code == "context_length_exceeded"
    assert str(CONTEXT) in e.value.message
    assert served.fleet.asked == []


async def test_sampling_is_pinned_whatever_the_agent_asks(served: Served) -> None:
    session = await served.open(purpose="eval", sampling={"temperature": 0.5, "top_p": 0.9, "top_k": 7})
    status, headers, _ = await served.post(
        session,
        {"messages": ASK, "temperature": 0.0, "top_p": 0.1, "top_k": 1, "seed": 3, "logit_bias": {"5": 100}},
    )
    assert status == 200
    sampling = served.fleet.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, None)
    assert headers["x-areal-ignored"] == "logit_bias, seed, temperature, top_k, top_p"


async def test_evaluation_is_greedy_when_its_session_says_so(served: Served) -> None:
    session = await served.open(purpose="eval", sampling={"temperature": 0})
    await served.openai(session).chat.completions.create(model="m", messages=ASK, temperature=1.0)
    assert served.fleet.asked[0].sampling.temperature == 0.0


class TestSeeds:
    async def ask(self, served: Served, seed: int, times: int) -> list[int | None]:
        session = await served.open(sampling={"seed": seed})
        before = len(served.fleet.asked)
        for _ in range(times):
            await served.openai(session).chat.completions.create(model="m", messages=ASK)
        return [a.sampling.seed for a in served.fleet.asked[before:]]

    async def test_the_same_session_seed_gives_the_same_call_seeds(self, served: Served) -> None:
        assert await self.ask(served, 7, 2) == await self.ask(served, 7, 2)

    async def test_siblings_and_other_seeds_differ(self, served: Served) -> None:
        seeds = await self.ask(served, 7, 3) + await self.ask(served, 8, 3)
        assert len(set(seeds)) == 6


class TestTheRunsSeed:
    """One seed for the run: repeatable as a whole, and different for every session of a group."""

    async def seeds(self, tokens: Tokens, folder: Path) -> list[int | None]:
        served = make_app(tokens, folder, sampling={"seed": 11})
        await served.start()
        try:
            for task in ("a", "a", "b"):
                session = await served.open(task, group_id=task, group_size=2)
                await served.post(session, {"messages": ASK})
            return [a.sampling.seed for a in served.fleet.asked]
        finally:
            await served.stop()

    async def test_it(self, tokens: Tokens, tmp_path: Path) -> None:
        first, second = [await self.seeds(tokens, tmp_path / run) for run in ("1", "2")]
        assert first == second
        assert len(set(first)) == 3
        assert None not in first


@pytest.mark.parametrize(
    "extra",
    [
        {"stream_options": {"include_usage": True}},
        {"parallel_tool_calls": False},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "calculator"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"seed": 1},
        {"user": "me"},
        {"store": True},
        {"reasoning_effort": "low"},
        {"service_tier": "auto"},
        {"presence_penalty": 0.5},
        {"top_logprobs": 3, "logprobs": True},
        {"never_heard_of": {"deep": [1, 2]}},
        {"modalities": ["text"]},
        {"temperature": None, "stop": None, "tools": None},
        {"metadata": {"node": "planner"}},
    ],
)
async def test_fields_of_todays_sdks_are_never_an_error(served: Served, extra: dict) -> None:
    session = await served.open()
    status, _, body = await served.post(session, {"model": "m", "messages": ASK, **extra})
    assert status == 200, body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "text only",
        ),
        ({"messages": ASK, "max_tokens": 0}, "max_completion_tokens"),
        ({"messages": ASK, "max_tokens": "many"}, "max_completion_tokens"),
        ({"messages": ASK, "n": 1000}, "n must be"),
        ({"messages": ASK, "stop": [1]}, "stop"),
        ({"messages": ASK, "stream": "yes"}, "stream"),
        ({"messages": ASK, "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"messages": ASK, "functions": [{"name": "f"}]}, "tools"),
        ({"messages": ASK, "audio": {"voice": "x"}}, "audio"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls[0]"),
        ([], "object"),
    ],
)
async def test_bad_requests_get_a_sentence(served: Served, body: object, says: str) -> None:
    session = await served.open()
    status, _, answer = await served.post(session, body)
    assert status == 400
    assert says in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in json.dumps(answer)


async def test_no_json_is_a_400(served: Served) -> None:
    session = await served.open()
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    async with served.http.post(served.url + "/v1/chat/completions", data=b"{nope", headers=headers) as r:
        assert r.status == 400
        assert (await r.json())["error"]["code"] == "invalid_json"


async def test_labels_come_from_headers_and_metadata(served: Served) -> None:
    session = await served.open()
    await served.post(session, {"messages": ASK, "metadata": {"a": "1"}}, {"X-Areal-Label-Node": "planner"})
    (call,) = (await served.inspect(session))["calls"]
    assert call["labels"] == {"a": "1", "node": "planner"}


async def test_a_wrong_base_url_is_told(served: Served) -> None:
    session = await served.open()
    client = served.openai({**session, "base_url": served.url})
    with pytest.raises(openai.NotFoundError, match="base_url is"):
        await client.chat.completions.create(model="m", messages=ASK)


async def test_models_are_listed(served: Served) -> None:
    session = await served.open()
    names = [m.id async for m in served.openai(session).models.list()]
    assert names == ["policy"]
