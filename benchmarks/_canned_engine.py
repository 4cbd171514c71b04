"""An engine that answers every request with the same tokens at once: what is left is what stands before it.

It speaks the endpoints a gateway uses: token ids in and out (`/inference/v1/generate`), and, for gateways that
leave tokenising to the engine, `/v1/chat/completions`, where it spends on the prompt's text what a real engine
spends: one pass of the same tokenizer. Replies are built once; only the prompt's ids are put in per request.

SPEC is a JSON file: `tokenizer` (path of tokenizer.json), `reply_ids`, `content`, `tool_calls`.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import orjson
import tokenizers
import uvloop
from aiohttp import web

STREAM_INTERVAL = 8
"""Tokens per streamed event, the default of `fleet.stream_interval`."""
LOGPROB = -0.5
MODEL = "policy"


class Engine:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(spec["tokenizer"])
        self.ids: list[int] = spec["reply_ids"]
        self.message = {"role": "assistant", "content": spec["content"], "tool_calls": spec["tool_calls"]}
        pieces = [self.ids[i : i + STREAM_INTERVAL] for i in range(0, len(self.ids), STREAM_INTERVAL)]
        self.generated = orjson.dumps({"choices": [self._choice(self.ids, last=True)]})
        self.generated_events = (
            b"".join(
                _event({"choices": [self._choice(p, last=i == len(pieces) - 1)]})
                for i, p in enumerate(pieces)
            )
            + _DONE
        )
        # (with logprobs, with ids) -> reply and stream
        self.chats = {(lp, ids): self._chat(lp, ids) for lp in (False, True) for ids in (False, True)}
        self.streams = {
            (lp, ids): self._stream(pieces, lp, ids) for lp in (False, True) for ids in (False, True)
        }

    def _choice(self, ids: list[int], *, last: bool) -> dict[str, Any]:
        content = [{"token_id": t, "logprob": LOGPROB, "rank": 1} for t in ids]
        choice: dict[str, Any] = {"index": 0, "token_ids": ids, "logprobs": {"content": content}}
        choice["finish_reason"] = "stop" if last else None
        if last:
            choice["weight_versions"] = [{"version": "0", "start": 0, "end": len(self.ids)}]
        return choice

    def _logprobs(self, ids: list[int]) -> dict[str, Any]:
        return {
            "content": [
                {"token": f"token_id:{t}", "logprob": LOGPROB, "bytes": None, "top_logprobs": []} for t in ids
            ]
        }

    def _chat(self, logprobs: bool, with_ids: bool) -> bytes:
        choice: dict[str, Any] = {"index": 0, "message": self.message, "finish_reason": "tool_calls"}
        if logprobs:
            choice["logprobs"] = self._logprobs(self.ids)
        if with_ids:
            choice["token_ids"] = self.ids
        return orjson.dumps({**_head("chat.completion"), "choices": [choice]})[
            :-1
        ]  # open for usage and prompt

    def _stream(self, pieces: list[list[int]], logprobs: bool, with_ids: bool) -> list[bytes]:
        """[first event, open for the prompt's ids; all others]."""
        events = []
        for i, ids in enumerate(pieces):
            delta: dict[str, Any] = {"content": self.tokenizer.decode(ids)}
            if i == 0:
                delta["role"] = "assistant"
            if i == len(pieces) - 1:
                delta = {"tool_calls": [{"index": n, **c} for n, c in enumerate(self.message["tool_calls"])]}
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            if logprobs:
                choice["logprobs"] = self._logprobs(ids)
            if with_ids:
                choice["token_ids"] = ids
            if i == len(pieces) - 1:
                choice["finish_reason"] = "tool_calls"
            events.append({**_head("chat.completion.chunk"), "choices": [choice]})
        return [b"data: " + orjson.dumps(events[0])[:-1], b"".join(_event(e) for e in events[1:]) + _DONE]

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if body.get("stream"):
            return web.Response(body=self.generated_events, content_type="text/event-stream")
        return web.Response(body=self.generated, content_type="application/json")

    async def chat(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        prompt = self.tokenizer.encode_batch_fast([_rendered(body)], add_special_tokens=False)[0].ids
        key = (bool(body.get("logprobs")), bool(body.get("return_token_ids")))
        extra: dict[str, Any] = {"prompt_token_ids": prompt} if key[1] else {}
        extra["usage"] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(self.ids),
            "total_tokens": len(prompt) + len(self.ids),
        }
        tail = b"," + orjson.dumps(extra)[1:]
        if body.get("stream"):
            first, rest = self.streams[key]
            return web.Response(body=first + tail + b"\n\n" + rest, content_type="text/event-stream")
        return web.Response(body=self.chats[key] + tail, content_type="application/json")

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/v1/chat/completions", self.chat)
        for path, value in FIXED.items():
            app.router.add_get(path, _fixed(value))
        for path, value in TAKEN.items():
            app.router.add_post(path, _fixed(value))
        known = sorted({r.resource.canonical for r in app.router.routes() if r.resource is not None})
        app.router.add_get("/openapi.json", _fixed({"paths": {path: {} for path in known}}))
        return app


FIXED: dict[str, Any] = {
    "/health": {},
    "/version": {"version": "0.32.0"},
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 65536}]},
    "/get_world_size": {"world_size": 1},
    "/weight_info": {"weight_version": "0"},
    "/is_paused": {"is_paused": False},
}
TAKEN: dict[str, Any] = {
    "/update_weight_version": {},
    "/pause": {},
    "/resume": {},
    "/collective_rpc": {"results": [{"holds": None}]},
}
_DONE = b"data: [DONE]\n\n"


def _fixed(value: Any) -> Any:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(value), content_type="application/json")

    return handler


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-canned", "object": kind, "created": 0, "model": MODEL}


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _rendered(body: dict[str, Any]) -> str:
    """The prompt's text, about as a chat template lays it out."""
    parts = [orjson.dumps(body["tools"]).decode()] if body.get("tools") else []
    for message in body["messages"]:
        calls = "".join(c["function"]["arguments"] for c in message.get("tool_calls") or ())
        parts.append(f"<|im_start|>{message['role']}\n{message.get('content') or ''}{calls}<|im_end|>\n")
    return "".join(parts)


async def serve(port: int, spec: dict[str, Any]) -> None:
    runner = web.AppRunner(Engine(spec).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--spec", type=Path, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.port, orjson.loads(options.spec.read_bytes())))
