"""A tokenizer, a scripted fleet and a served gateway: what the gateway's tests stand on.

The fleet speaks the seam of `areal_gateway.fleet.types` and says what it is told to; the tokenizer is a
small byte-level BPE with Qwen3's special tokens, so the renderer is the one that serves Qwen3.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areal_agent.config import RunConfig
from areal_agent.errors import EngineError, WeightUpdateError
from areal_gateway.app import create_app
from areal_gateway.core import GATEWAY, Gateway
from areal_gateway.fleet.types import Chunk, EngineSampling, UnknownEngine
from areal_gateway.ledger import Ledger
from areal_gateway.serving import GatewayRunner
from areal_gateway.tokens import QWEN3_TOKENS, Tokens

ADMIN_KEY = "admin-key-of-the-tests"
PROJECT_KEY = "sk-areal-project-of-the-tests"
CONTEXT = 4096

TRAINING_TEXT = [
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n",
    '{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {}}}',
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is two plus three?<|im_end|>",
]

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def build_model_folder(folder: Path, *, chat_template: str | None = None, model_type: str = "qwen3") -> Path:
    """A folder with a tokenizer and a configuration, and no weights: all that the gateway reads."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(QWEN3_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(TRAINING_TEXT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    hf = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    if chat_template:
        hf.chat_template = chat_template
    hf.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "max_position_embeddings": CONTEXT})
    )
    return folder


@dataclass
class Reply:
    """What the fleet says to one call. `text` is encoded and ended by <|im_end|> unless `finish` is length."""

    text: str = "ok"
    finish: str | None = "stop"
    spans: list[tuple[int, int, int]] | None = None
    version: int | None = None
    drop_logprob: int | None = None
    no_spans: bool = False
    chunk: int = 3
    delay_s: float = 0.0
    gate: asyncio.Event | None = None
    error: Exception | None = None
    ids: list[int] | None = None


@dataclass
class Asked:
    """One call as the fleet got it, and what became of it."""

    session_id: str
    prompt_ids: list[int]
    sampling: EngineSampling
    ended: str = "running"
    output_ids: list[int] = field(default_factory=list)


class ScriptedFleet:
    """Says the scripted replies in order, then a default that depends on the prompt only."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.version = 0
        self.state = "serving"
        self.script: deque[Reply] = deque()
        self.rule: Callable[[list[int]], Reply] | None = None
        self.asked: list[Asked] = []
        self.weights = ScriptedWeights(self)

    def say(self, *replies: Reply | str) -> None:
        self.script.extend(Reply(r) if isinstance(r, str) else r for r in replies)

    def encode(self, text: str) -> list[int]:
        return self.tokens.tokenizer.encode(text)

    def _reply(self, prompt_ids: list[int]) -> Reply:
        if self.script:
            return self.script.popleft()
        if self.rule is not None:
            return self.rule(prompt_ids)
        return Reply(f"answer {zlib.crc32(str(prompt_ids).encode()) % 1000}")

    async def generate(
        self, *, session_id: str, prompt_ids: Sequence[int], sampling: EngineSampling, on_engine: Any = None
    ) -> AsyncIterator[Chunk]:
        prompt_ids = list(prompt_ids)
        asked = Asked(session_id, prompt_ids, sampling)
        self.asked.append(asked)
        reply = self._reply(prompt_ids)
        end = self.tokens.stop_token_ids[:1] if reply.finish == "stop" else []
        ids = list(reply.ids) if reply.ids is not None else self.encode(reply.text) + end
        if len(ids) > sampling.max_tokens:
            ids, reply.finish = ids[: sampling.max_tokens], "length"
        logprobs: list[float | None] = [logprob(prompt_ids, i) for i in range(len(ids))]
        if reply.drop_logprob is not None:
            logprobs[reply.drop_logprob] = None
        version = self.version if reply.version is None else reply.version
        spans = reply.spans or ([(0, len(ids), version)] if ids else [])
        try:
            if reply.gate is not None:
                await reply.gate.wait()
            for at in range(0, len(ids), reply.chunk):
                if reply.delay_s:
                    await asyncio.sleep(reply.delay_s)
                part = slice(at, at + reply.chunk)
                asked.output_ids += ids[part]
                top = likeliest(ids[part], logprobs[part], sampling.top_logprobs)
                yield Chunk(ids[part], logprobs[part], top=top)
            if (error := reply.error) is not None:
                reply = Reply()
                try:
                    raise error
                finally:
                    del error  # a frame that keeps its own error is a circle
            if reply.finish is not None:
                yield Chunk([], [], reply.finish, None if reply.no_spans else spans)
            asked.ended = "done"
        except (asyncio.CancelledError, GeneratorExit):
            asked.ended = "cancelled"
            raise

    async def join(self, url: str) -> dict[str, Any]:
        raise EngineError(f"nothing answers at {url}")

    async def drain(self, id: str) -> dict[str, Any]:
        raise UnknownEngine(f"no engine {id!r}")

    leave = drain

    def status(self) -> dict[str, Any]:
        return {"engines": [], "version": self.version, "state": self.state, "error": None}


class ScriptedWeights:
    """A transaction that only counts: begin, commit, abort."""

    def __init__(self, fleet: ScriptedFleet) -> None:
        self.fleet = fleet
        self.pending: int | None = None

    async def begin(
        self, *, version: int, manifest: Any, store: Any, backend: str, force: bool = False
    ) -> Any:
        if self.pending is not None or (version != self.fleet.version + 1 and not force):
            raise WeightUpdateError(f"version {version} does not follow {self.fleet.version}")
        self.pending = version
        return {"update_id": "u1", "epoch": 1, "world_size": 2, "join": True}

    async def commit(self, update_id: str, checksums: list[str]) -> Any:
        if self.pending is None:
            raise WeightUpdateError("no update is running", retry=True)
        self.fleet.version, self.pending = self.pending, None
        return {"version": self.fleet.version, "pause_s": 0.0, "receive_s": 0.0, "load_s": 0.0, "engines": 1}

    async def abort(self, update_id: str, reason: str) -> Any:
        self.pending = None
        return {"version": self.fleet.version}


def logprob(prompt_ids: list[int], i: int) -> float:
    """Of the scripted fleet's token i: a function of prompt length and position, exact in float32."""
    return -((len(prompt_ids) * 31 + i * 7) % 64) / 64.0


def likeliest(ids: list[int], logprobs: list[float | None], k: int) -> list[list[tuple[int, float]]] | None:
    """The scripted fleet's likeliest k at each position: the sampled token, then letters that are less likely."""
    if not k:
        return None
    return [
        [(t, p or 0.0), *((20 + j, (p or 0.0) - 1 - j) for j in range(k - 1))]
        for t, p in zip(ids, logprobs, strict=True)
    ]


class GatewayServer(TestServer):
    """Served as in production."""

    async def _make_runner(self, **settings: Any) -> GatewayRunner:
        return GatewayRunner(self.app, **settings)


class Served:
    """A gateway on a loopback port, its admin client, and openai clients per session."""

    def __init__(self, app: web.Application, fleet: ScriptedFleet, ledger: Ledger) -> None:
        self.app = app
        self.fleet = fleet
        self.ledger = ledger
        self.server = GatewayServer(app)
        self.clients: list[Any] = []

    @property
    def gateway(self) -> Gateway:
        return self.app[GATEWAY]

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def start(self) -> None:
        await self.server.start_server()
        self.http = aiohttp.ClientSession()

    async def stop(self) -> None:
        for client in self.clients:
            await client.close()
        await self.http.close()
        await self.server.close()
        self.ledger.close()

    async def admin(self, method: str, path: str, body: Any = None, status: int | None = 200) -> Any:
        """One admin request; `status` None accepts any and returns (status, body)."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as r:
            raw = await r.read()
            value = json.loads(raw) if r.content_type == "application/json" and raw else raw
            if status is None:
                return r.status, value
            assert r.status == status, (r.status, value)
            return value

    async def open(self, task_id: str = "t", purpose: str = "train", **fields: Any) -> dict[str, Any]:
        return await self.admin(
            "POST", "/admin/sessions", {"task_id": task_id, "purpose": purpose, **fields}, 201
        )

    async def seal(
        self, session: dict[str, Any], outcome: str = "finished", reward: float | None = None
    ) -> Any:
        if reward is not None:
            await self.reward(session, reward)
        return await self.admin("POST", f"/admin/sessions/{session['session_id']}/seal", {"outcome": outcome})

    async def reward(self, session: dict[str, Any], value: Any, key: str = "k", **fields: Any) -> Any:
        return await self.admin(
            "POST", f"/admin/sessions/{session['session_id']}/rewards", {"value": value, "key": key, **fields}
        )

    async def inspect(self, session: dict[str, Any], trajectory: bool = False) -> Any:
        tail = "?trajectory=1" if trajectory else ""
        return await self.admin("GET", f"/admin/sessions/{session['session_id']}{tail}")

    def openai(self, session: dict[str, Any], **options: Any) -> Any:
        client = AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"], **options)
        self.clients.append(client)
        return client

    def anthropic(self, session: dict[str, Any], **options: Any) -> Any:
        """Its SDK puts /v1 into its paths, and the key into `x-api-key`."""
        client = AsyncAnthropic(base_url=self.url, api_key=session["api_key"], **options)
        self.clients.append(client)
        return client

    async def one_branch(self, session: dict[str, Any]) -> list[int]:
        """Assert that all calls so far are one branch, each prompt beginning with the ids of the call before;
        that is what the trainer gets, every sampled token once. Returns its ids."""
        asked = self.fleet.asked
        for before, after in pairwise(asked):
            stored = before.prompt_ids + before.output_ids
            assert after.prompt_ids[: len(stored)] == stored
        (sequence,) = (await self.inspect(session, trajectory=True))["sequences"]
        assert sequence["token_ids"] == asked[-1].prompt_ids + asked[-1].output_ids
        assert sum(sequence["loss_mask"]) == sum(len(a.output_ids) for a in asked)
        return sequence["token_ids"]

    async def post(
        self,
        session: dict[str, Any],
        body: Any,
        headers: dict[str, str] | None = None,
        path: str = "/v1/chat/completions",
    ) -> tuple[int, Any, Any]:
        """A raw request: (status, headers, parsed body or bytes)."""
        all_headers = {"Authorization": f"Bearer {session['api_key']}", **(headers or {})}
        async with self.http.post(self.url + path, json=body, headers=all_headers) as r:
            raw = await r.read()
            return r.status, r.headers, json.loads(raw) if r.content_type == "application/json" else raw


def make_app(
    tokens: Tokens, folder: Path, *, fleet_type: Callable[[Tokens], Any] = ScriptedFleet, **settings: Any
) -> Served:
    """A gateway over a scripted fleet; `settings` are sections of the run's configuration."""
    config = RunConfig.parse({"model": "models/policy", **settings})
    fleet = fleet_type(tokens)
    ledger = Ledger(folder / "ledger.sqlite")
    app = create_app(
        config=config,
        fleet=fleet,
        ledger=ledger,
        tokens=tokens,
        admin_key=ADMIN_KEY,
        project_key=PROJECT_KEY if config.online.enabled else None,
    )
    return Served(app, fleet, ledger)


def tool_call(name: str = "calculator", arguments: str = '{"expression": "2+3"}') -> str:
    """A tool call as Qwen3 writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def eventually(true: Callable[[], Any], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 (what is waited for has no event to offer)
            await asyncio.sleep(0.005)


def as_schema_1(path: Path) -> None:
    """Take from an empty or small ledger what schema 2 brought."""
    with sqlite3.connect(path) as db:
        for name in ("rewinds", "voids"):
            db.execute(f"DROP TABLE {name}")
        db.execute("DROP TRIGGER calls_have_parents")
        db.execute("ALTER TABLE rewards DROP COLUMN labels")
        db.execute("PRAGMA user_version = 1")
