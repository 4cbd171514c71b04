"""OpenAI's older completions as its SDK sees them, and what is recorded of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_support import CONTEXT, Reply, Served, logprob, make_app, tool_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_agent.errors import EngineError
from areal_gateway import agent
from areal_gateway.reply import Pace, ReplyFormat, ReplyStream, read_reply
from areal_gateway.tokens import Tokens

PROMPT = "<|im_start|>user\nWhat is two plus three?<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>\n"
THEN = "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


async def ask(client: Any, stream: bool, **fields: Any) -> tuple[list[str], list[Any], Any]:
    """(texts, finish reasons, the last chunk or the whole) by choice."""
    fields = {"model": "m", "prompt": PROMPT, **fields}
    if not stream:
        whole = await client.completions.create(**fields)
        return [c.text for c in whole.choices], [c.finish_reason for c in whole.choices], whole
    texts: dict[int, str] = {}
    ends: dict[int, Any] = {}
    async for chunk in await client.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ends[choice.index] = choice.finish_reason
    return [texts[i] for i in sorted(texts)], [ends[i] for i in sorted(ends)], chunk


async def post(served: Served, session: Any, body: Any) -> Any:
    return await served.post(session, body, path="/v1/completions")


def stored(served: Served, i: int = 0) -> list[int]:
    asked = served.fleet.asked[i]
    return asked.prompt_ids + asked.output_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["five", "  five \n", f"<think>hm</think>{tool_call()}", ""])
async def test_the_text_is_what_was_sampled(served: Served, stream: bool, said: str) -> None:
    served.fleet.say(said)
    session = await served.open()
    texts, ends, _ = await ask(served.openai(session), stream)
    assert (texts, ends) == ([said], ["stop"])
    assert served.fleet.asked[0].prompt_ids == served.fleet.encode(PROMPT)
    (call,) = (await served.inspect(session))["calls"]
    assert (call["state"], call["delivered"], call["branch_cause"]) == ("complete", True, "root")


async def test_absent_a_limit_is_the_room_in_the_context(served: Served) -> None:
    session = await served.open()
    await ask(served.openai(session), False)
    asked = served.fleet.asked[0]
    assert asked.sampling.max_tokens == CONTEXT - len(asked.prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_ids(served: Served, stream: bool) -> None:
    ids = served.fleet.encode(PROMPT)
    session = await served.open()
    await ask(served.openai(session), stream, prompt=ids)
    assert served.fleet.asked[0].prompt_ids == ids


@pytest.mark.parametrize("stream", [False, True])
async def test_many_prompts_and_siblings_are_numbered_prompt_by_prompt(served: Served, stream: bool) -> None:
    prompts = ["alpha", "beta"]
    answers = {str(served.fleet.encode(p)): p.upper() for p in prompts}
    served.fleet.rule = lambda ids: Reply(answers[str(ids)])
    session = await served.open()
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    texts, _, last = await ask(served.openai(session), stream, prompt=prompts, n=2, **options)
    assert texts == ["ALPHA", "ALPHA", "BETA", "BETA"]
    assert last.usage.prompt_tokens == sum(len(served.fleet.encode(p)) for p in prompts)
    assert last.usage.completion_tokens == sum(len(a.output_ids) for a in served.fleet.asked)
    assert len((await served.inspect(session))["calls"]) == 4


class TestTurns:
    """A prompt that begins with what was asked and sampled begins with those ids."""

    @pytest.mark.parametrize("stream", [False, True])
    async def test_text(self, served: Served, stream: bool) -> None:
        served.fleet.say(Reply(ids=served.fleet.encode("fi") + served.fleet.encode("ve <|im_end|>")), " yes ")
        session = await served.open()
        client = served.openai(session)
        prompt = PROMPT
        for _ in range(3):
            (text,), _, _ = await ask(client, stream, prompt=prompt)
            prompt += text + END + THEN
        await served.one_branch(session)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_ids(self, served: Served, stream: bool) -> None:
        session = await served.open()
        prompt = served.fleet.encode(PROMPT)
        for _ in range(3):
            body = {"prompt": prompt, "return_token_ids": True, "stream": stream}
            _, _, answer = await served.post(session, body, path="/v1/completions")
            events = (
                [json.loads(e[5:]) for e in answer.split(b"\n\n") if e[5:8] == b' {"'] if stream else [answer]
            )
            told = [t for e in events for c in e["choices"] for t in c["token_ids"]]
            assert told == served.fleet.asked[-1].output_ids
            prompt = [*prompt, *told, *served.fleet.encode("\n" + THEN)]
        await served.one_branch(session)

    async def test_a_stop_string_that_the_client_puts_back(self, served: Served) -> None:
        """The loop of a ReAct agent: the engine ends at `Observation:`, the agent writes what was observed."""
        served.fleet.say(Reply(ids=served.fleet.encode("Action: look\nObservation:")), "done")
        session = await served.open()
        client = served.openai(session)
        (text,), ends, _ = await ask(client, False, stop=["Observation:"])
        assert (text, ends) == ("Action: look\n", ["stop"])
        await ask(client, False, prompt=PROMPT + text + "Observation: a door\n", stop=["Observation:"])
        await served.one_branch(session)

    async def test_without_the_end_of_turn_it_is_no_continuation(self, served: Served) -> None:
        """The model ended its turn; a text in which it did not is another text."""
        session = await served.open()
        client = served.openai(session)
        (text,), _, _ = await ask(client, False)
        await ask(client, False, prompt=PROMPT + text + " and so on")
        calls = (await served.inspect(session))["calls"]
        assert [c["branch_cause"] for c in calls] == ["root", "bridge_refused"]
        assert served.fleet.asked[1].prompt_ids == served.fleet.encode(PROMPT + text + " and so on")

    async def test_siblings_are_told_apart_by_what_they_said(self, served: Served) -> None:
        served.fleet.say("alpha", "beta")
        session = await served.open()
        client = served.openai(session)
        texts, _, _ = await ask(client, False, n=2)
        for text in texts:
            await ask(client, False, prompt=PROMPT + text + END + THEN)
        calls = (await served.inspect(session))["calls"]
        by_index = {c["call_id"] for c in calls[:2]}
        assert {c["parent_id"] for c in calls[2:]} == by_index

    async def test_after_a_restart(self, tokens: Tokens, tmp_path: Path) -> None:
        one = make_app(tokens, tmp_path)
        await one.start()
        session = await one.open()
        prompt = PROMPT
        for _ in range(2):
            (text,), _, _ = await ask(one.openai(session), False, prompt=prompt)
            prompt += text + END + THEN
        before = stored(one, 1)
        await one.stop()
        two = make_app(tokens, tmp_path)
        await two.start()
        try:
            await ask(two.openai({**session, "base_url": two.url + "/v1"}), False, prompt=prompt)
            assert two.fleet.asked[0].prompt_ids[: len(before)] == before
        finally:
            await two.stop()

    async def test_the_ledger_keeps_each_text_once(self, served: Served) -> None:
        session = await served.open()
        prompt = PROMPT
        for _ in range(3):
            (text,), _, _ = await ask(served.openai(session), False, prompt=prompt)
            prompt += text + END + THEN
        told = [c.messages for c in served.gateway.sessions.get_open(session["session_id"]).history.calls]
        assert told[1] == told[2] == [{"role": "prompt", "content": "\n" + THEN}]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_the_schema_of_completions(served: Served, stream: bool) -> None:
    served.fleet.say(Reply("one two three", chunk=2))
    session = await served.open()
    client = served.openai(session)
    if stream:
        chunks = await client.completions.create(model="m", prompt=PROMPT, logprobs=1, stream=True)
        parts = [c.choices[0].logprobs async for c in chunks]
    else:
        parts = [(await client.completions.create(model="m", prompt=PROMPT, logprobs=1)).choices[0].logprobs]
    asked = served.fleet.asked[0]
    tokens = [t for p in parts for t in p.tokens]
    assert "".join(tokens) == "one two three<|im_end|>"
    assert [v for p in parts for v in p.token_logprobs] == [
        logprob(asked.prompt_ids, i) for i in range(len(asked.output_ids))
    ]
    assert [o for p in parts for o in p.text_offset] == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert all(len(p.tokens) == len(p.token_logprobs) == len(p.top_logprobs) for p in parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_length_limit(served: Served, stream: bool) -> None:
    served.fleet.say("one two three four")
    session = await served.open()
    _, ends, _ = await ask(served.openai(session), stream, max_tokens=3)
    assert ends == ["length"]


PIECES = st.sampled_from(
    ["Hello", " world", "\n\n", " ", "naïve ☃ 漢字", "STOP", "ST", "<think>", tool_call()]
)


class EveryTime(Pace):
    def interval(self, cost_s: float) -> float:
        return 0.0


@given(
    pieces=st.lists(PIECES, max_size=8),
    chunk=st.integers(1, 7),
    stop=st.sampled_from([(), ("STOP",), ("world", "STOP")]),
    end=st.booleans(),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_stream_joined_is_the_whole_text(
    tokens: Tokens, pieces: list[str], chunk: int, stop: Any, end: bool
) -> None:
    text = "".join(pieces)
    ids = tokens.tokenizer.encode(text) + (tokens.stop_token_ids[:1] if end else [])
    fmt = ReplyFormat([], False, stop, plain=True)
    whole = read_reply(tokens, fmt, [1], ids, "c")
    assert whole["content"] == text[: min([i for s in stop if (i := text.find(s)) != -1], default=len(text))]
    stream = ReplyStream(tokens, fmt, [1], EveryTime())
    deltas = [d for at in range(chunk, len(ids), chunk) for d in stream.feed(ids[:at])]
    assert "".join(d.content for d in [*deltas, *stream.finish(whole)]) == whole["content"]


async def test_bytes_flow_while_the_engine_is_silent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "KEEP_ALIVE_S", 0.05)
    gate = asyncio.Event()
    served.fleet.say(Reply("five", gate=gate))
    session = await served.open()
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    body = {"prompt": PROMPT, "stream": True}
    async with served.http.post(served.url + "/v1/completions", json=body, headers=headers) as r:
        assert (await r.content.readline()) == b": keep-alive\n"
        gate.set()
        assert (await r.content.read()).endswith(b"data: [DONE]\n\n")


async def test_a_full_context(served: Served) -> None:
    session = await served.open()
    with pytest.raises(openai.BadRequestError) as e:
        await ask(served.openai(session), False, prompt="x" * 3 * CONTEXT)
    assert (e.value.code, e.value.param) == ("context_length_exceeded", "prompt")


async def test_an_engine_that_fails_in_the_middle(served: Served) -> None:
    served.fleet.say(Reply("one two three four", chunk=2, error=EngineError("the engine caught fire")))
    session = await served.open()
    with pytest.raises(openai.APIError, match="caught fire"):
        await ask(served.openai(session), True)


async def test_a_retry_of_many_prompts_is_replayed(served: Served) -> None:
    session = await served.open()
    body = {"prompt": ["alpha", "beta"], "n": 2}
    _, _, first = await post(served, session, body)
    headers = {"x-stainless-retry-count": "1"}
    _, _, second = await served.post(session, body, headers, "/v1/completions")
    assert first == second
    assert len(served.fleet.asked) == 4


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [-1]}, "token ids"),
        ({"prompt": [2**40]}, "token ids"),
        ({"prompt": ["a"] * 65, "n": 2}, "128"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": "x"}, "logprobs"),
        ([], "object"),
    ],
)
async def test_bad_requests_get_a_sentence(served: Served, body: Any, says: str) -> None:
    session = await served.open()
    status, _, answer = await post(served, session, body)
    assert status == 400
    assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0.1, "top_p": 0.5, "seed": 3, "logit_bias": {"5": 1}},
        {"echo": False, "best_of": 1, "suffix": None, "logprobs": None, "stop": None},
        {"user": "me", "never_heard_of": {"deep": [1, 2]}},
    ],
)
async def test_fields_of_todays_sdks_are_never_an_error(served: Served, extra: Any) -> None:
    session = await served.open()
    status, _, body = await post(served, session, {"prompt": PROMPT, **extra})
    assert status == 200, body
