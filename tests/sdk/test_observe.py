"""A request inside a session goes to that session; every other request is untouched."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import threading

import httpx
import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI

from areal_agent import observe as observe_function
from areal_agent.observe import (
    PLACEHOLDER_KEY,
    add_label_source,
    bind,
    client_environment,
    current,
    observe,
    unobserve,
)

SECRET = "sk-session-secret"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def recorder(library, seen):
    """A transport that records the request it gets, in place of the network."""

    def handle(request):
        seen.append(request)
        return library.Response(200, json={})

    return library.MockTransport(handle)


@pytest.fixture(autouse=True)
def clean():
    yield
    unobserve()


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def library(request):
    return request.param


@pytest.mark.parametrize(
    "url",
    [
        "https://api.openai.com/v1/chat/completions",
        "https://api.openai.com/v1/responses",
        "https://api.anthropic.com/v1/messages?beta=true",
        "https://proxy.example/llm/v1/chat/completions",
        "http://127.0.0.1:9/v1/chat/completions",
        "http://localhost:9/v1/chat/completions",
    ],
)
def test_a_model_request_reaches_the_sessions_gateway_with_its_key(library, url, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "https://proxy.example/llm/v1")
    seen = []
    client = library.Client(transport=recorder(library, seen))  # built before observe()
    observe()
    with bind("http://127.0.0.1:9/v1", SECRET) as binding:
        client.post(url, json=BODY, headers={"authorization": "Bearer sk-real", "api-key": "azure"})
    (request,) = seen
    tail = "/v1/" + url.split("/v1/")[1]
    assert str(request.url) == f"http://127.0.0.1:9{tail}"
    assert request.headers["host"] == "127.0.0.1:9"
    assert request.headers["authorization"] == f"Bearer {SECRET}"
    assert "api-key" not in request.headers
    assert json.loads(request.content) == BODY
    assert binding.captured == 1


def test_an_x_api_key_is_replaced_as_well(library):
    seen = []
    observe()
    with bind("http://127.0.0.1:9/v1", SECRET), library.Client(transport=recorder(library, seen)) as client:
        client.post("https://api.anthropic.com/v1/messages", headers={"x-api-key": "sk-ant"})
    assert seen[0].headers["x-api-key"] == SECRET


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/v1/chat/completions",
        "https://api.openai.com.evil.example/v1/chat/completions",
        "https://api.openai.com/v1/embeddings",
        "http://api.openai.com/v1/chat/completions",
        "https://api.openai.com:444/v1/chat/completions",
        "http://127.0.0.1:9/admin/status",
        "http://127.0.0.1:10/v1/chat/completions",
    ],
)
def test_every_other_request_is_untouched_and_never_sees_the_key(library, url):
    def send():
        seen = []
        client = library.Client(transport=recorder(library, seen), auth=("user", "pass"))
        client.post(url, json=BODY, headers={"x-own": "1"})
        return str(seen[0].url), sorted(seen[0].headers.items()), seen[0].content

    before = send()
    observe()
    with bind("http://127.0.0.1:9/v1", SECRET) as binding:
        assert send() == before
    assert SECRET not in str(before)
    assert binding.captured == 0


def test_outside_a_session_nothing_changes(library):
    seen = []
    observe()
    client = library.Client(transport=recorder(library, seen))
    client.post("https://api.openai.com/v1/chat/completions", headers={"authorization": "Bearer sk-real"})
    assert str(seen[0].url) == "https://api.openai.com/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer sk-real"
    assert current() is None


def test_a_session_named_by_hand_wins_over_the_context(library):
    seen = []
    observe()
    client = library.Client(transport=recorder(library, seen))
    with bind("http://127.0.0.1:9/v1", "sk-other") as other, bind("http://127.0.0.1:9/v1", SECRET) as inner:
        client.post("http://127.0.0.1:9/v1/chat/completions", headers={"authorization": "Bearer sk-other"})
        client.post("http://127.0.0.1:9/s/sk-other/v1/chat/completions")
    assert seen[0].headers["authorization"] == "Bearer sk-other"
    assert seen[1].url.path == "/s/sk-other/v1/chat/completions"
    assert "authorization" not in seen[1].headers
    assert (other.captured, inner.captured) == (2, 0)


def test_labels_come_from_the_session_and_from_every_source(library):
    seen = []
    observe()
    remove = add_label_source(lambda: {"node": "größe\r\nx: y", "Odd Name": "1"})
    client = library.Client(transport=recorder(library, seen))
    with bind("http://127.0.0.1:9/v1", SECRET, labels={"run": "a"}):
        client.post("https://api.openai.com/v1/chat/completions")
        remove()
        client.post("https://api.openai.com/v1/chat/completions")
    first, second = ({k: v for k, v in r.headers.items() if k.startswith("x-areal-label-")} for r in seen)
    assert first == {
        "x-areal-label-run": "a",
        "x-areal-label-node": "gr%C3%B6%C3%9Fe%0D%0Ax: y",
        "x-areal-label-odd-name": "1",
    }
    assert second == {"x-areal-label-run": "a"}


def test_a_stray_model_call_is_remembered_for_the_explanation(library):
    seen = []
    observe()
    with bind("http://127.0.0.1:9/v1", SECRET) as binding:
        library.Client(transport=recorder(library, seen)).post("https://my.llm/v1/chat/completions?k=secret")
    assert binding.strays == {"https://my.llm/v1/chat/completions"}


def test_further_hosts_can_be_named(library):
    seen = []
    observe(hosts=["https://my.llm/v1"])
    with bind("http://127.0.0.1:9/v1", SECRET):
        library.Client(transport=recorder(library, seen)).post("https://my.llm/v1/chat/completions")
    assert str(seen[0].url) == "http://127.0.0.1:9/v1/chat/completions"


def test_observing_twice_wraps_once_and_unobserve_restores(library):
    before = (library.Client.send, library.AsyncClient.send)
    assert observe() is True
    once = library.Client.send
    assert observe() is False
    assert library.Client.send is once
    unobserve()
    assert (library.Client.send, library.AsyncClient.send) == before
    assert observe_function is observe


def test_a_client_of_an_earlier_run_follows_to_the_gateway_of_the_next(library):
    seen = []
    client = library.Client(transport=recorder(library, seen))
    observe()
    with bind("http://127.0.0.1:11/v1", "sk-first"):
        client.post("http://127.0.0.1:11/v1/chat/completions")
    unobserve()
    observe()
    with bind("http://127.0.0.1:12/v1", SECRET) as second:
        client.post("http://127.0.0.1:11/v1/chat/completions")
        client.post("http://127.0.0.1:11/v1/messages")
        client.post("http://127.0.0.1:11/admin/sessions")
        with bind("http://127.0.0.1:11/v1", "sk-by-hand"), bind("http://127.0.0.1:12/v1", "sk-inner"):
            bearer = {"authorization": "Bearer sk-by-hand"}
            client.post("http://127.0.0.1:11/v1/chat/completions", headers=bearer)
    first, *others, last = seen
    assert (first.url.port, first.headers["authorization"]) == (11, "Bearer sk-first")
    assert [r.url.port for r in others] == [12, 12, 11]
    assert [r.headers.get("authorization") for r in others] == [f"Bearer {SECRET}"] * 2 + [None]
    assert second.captured == 2
    assert (last.url.port, last.headers["authorization"]) == (11, "Bearer sk-by-hand"), "chosen by hand"


async def test_many_sessions_at_once_in_one_process(library):
    seen = []

    def handle(request):
        seen.append((request.headers["authorization"], request.headers["x-mine"]))
        return library.Response(200, json={})

    client = library.AsyncClient(transport=library.MockTransport(handle))
    observe()

    async def one(i: int) -> None:
        with bind("http://127.0.0.1:9/v1", f"key-{i}"):
            for _ in range(3):
                await client.post("https://api.openai.com/v1/chat/completions", headers={"x-mine": f"{i}"})
                await asyncio.sleep(0)

    await asyncio.gather(*(one(i) for i in range(20)))
    assert len(seen) == 60
    assert all(key == f"Bearer key-{mine}" for key, mine in seen)


def test_a_thread_with_a_copied_context_is_in_the_session_and_a_bare_one_is_not(library):
    seen = []
    client = library.Client(transport=recorder(library, seen))
    observe()

    def call():
        client.post("https://api.openai.com/v1/chat/completions")

    with bind("http://127.0.0.1:9/v1", SECRET):
        context = contextvars.copy_context()
        for target in (lambda: context.run(call), call):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert [r.url.host for r in seen] == ["127.0.0.1", "api.openai.com"]


async def test_openai_clients_built_with_no_arguments_find_the_session(standin, client, observed):
    sessions = [await client.open_session(str(i)) for i in range(4)]

    async def ask(session):
        with bind(session.base_url, session.api_key):
            reply = await AsyncOpenAI().chat.completions.create(**BODY)
            text = await asyncio.to_thread(lambda: OpenAI().chat.completions.create(**BODY))
        return [json.loads(r.choices[0].message.content)["session"] for r in (reply, text)]

    assert await asyncio.gather(*map(ask, sessions)) == [[s.id, s.id] for s in sessions]


def test_the_environment_is_set_where_absent_and_restored():
    with client_environment("http://127.0.0.1:9"):
        assert os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
        assert os.environ["OPENAI_API_KEY"] == PLACEHOLDER_KEY
        assert os.environ["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
        assert "127.0.0.1" in os.environ["NO_PROXY"].split(",")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"):
        assert name not in os.environ


def test_a_users_own_key_and_address_stay(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://mine")
    with client_environment("http://127.0.0.1:9"):
        assert os.environ["OPENAI_API_KEY"] == "sk-mine"
        assert "OPENAI_BASE_URL" not in os.environ, "the user's key must not be sent to the gateway"
        assert os.environ["ANTHROPIC_BASE_URL"] == "https://mine"
    assert os.environ["OPENAI_API_KEY"] == "sk-mine"
