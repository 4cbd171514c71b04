"""A fake engine: an aiohttp app that speaks the part of vLLM 0.32's HTTP that this project uses.

Invariant: whatever the contract suite (tests/fleet/test_engine_contract.py) finds true of real vLLM is
true of this one; the suite runs on both, so the fake cannot lie.

    from fakes.engine import FakeEngine          # tests/ is on pytest's path
    from fakes.policy import Reply

    async with FakeEngine() as engine:           # a loopback port of its own; `engine.url`
        engine.set_version(3)                    # as a committed update would: policy and label
        engine.faults.drop_logprob_at = 5        # switches, see Faults
        engine.script.append(Reply([1, 2, 3]))   # the next reply, instead of the policy's
        engine.kill()                            # cut every connection, accept no more

Endpoints: /inference/v1/generate and /v1/completions with token ids (streaming and not),
/pause?mode=keep|abort|wait, /resume, /is_paused, /weight_info, /update_weight_version, /collective_rpc,
/get_world_size, /openapi.json, /health, /v1/models.

`FakeEngine(older="generate")` is a server before vLLM 0.32: no version label and no spans. With
older="completions" it has no token-in/token-out endpoint either.

What it samples is in fakes/policy.py; a request without a seed at temperature > 0 draws its seed from the
engine's own counter.

Versions. `weights_version` is what is loaded (and decides the tokens), `label` is what
/update_weight_version last said (and ends up in the spans). Only `set_version` and `areal_load` move the
former, so a mislabelled update shows.

Weight transfer. `FakeEngine(receiver="simulated")`, the default, needs no torch: a receive is complete at
once with the checksums `simulated_checksums(version, n_buckets)`. `receiver="gloo"` runs the very receiver
of areal_gateway.worker_extension, so real broadcasts happen; what was loaded is in `engine.loaded`
(name -> torch tensor).

As a process of its own: `python tests/fakes/engine.py --port P [--faults JSON] [...vLLM flags, ignored]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

if __name__ == "__main__":  # as a process, only this file's own folder is on the path
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from fakes.policy import VOCAB, Faults, Prefix, Reply, policy
from fakes.receivers import GlooReceiver, SimulatedReceiver


class _Cut(Exception):
    """The stream is to be cut without an end."""


class _Request:
    """One request in flight: its tokens so far and the label each was sampled under."""

    def __init__(self, prompt: list[int], params: dict[str, Any]) -> None:
        self.prompt, self.params = prompt, params
        self.tokens: list[int] = []
        self.logprobs: list[float | None] = []
        self.labels: list[str] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.aborted = False
        self.id = ""
        self.text_shape = False
        """Asked through /v1/completions."""

    def spans(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for i, label in enumerate(self.labels):
            if out and out[-1]["version"] == label:
                out[-1]["end"] = i + 1
            else:
                out.append({"version": label, "start": i, "end": i + 1})
        return out


class FakeEngine:
    """See the module's docstring. All state is plain attributes; tests read and set them."""

    def __init__(
        self,
        *,
        model: str = "fake",
        vocab: int = VOCAB,
        seed: int = 0,
        eos: int | None = None,
        max_model_len: int = 4096,
        stream_interval: int = 8,
        step_s: float = 0.0,
        version: int = 0,
        receiver: str = "simulated",
        older: str | None = None,
        decode: Callable[[list[int]], str] | None = None,
        on_die: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.vocab, self.seed, self.eos = model, vocab, seed, eos
        self.max_model_len, self.stream_interval, self.step_s = max_model_len, stream_interval, step_s
        self.weights_version = version
        self.label = "default"
        self.receiver = SimulatedReceiver(self) if receiver == "simulated" else GlooReceiver(self)
        self.older = older
        self.decode = decode
        self.script: list[Reply] = []
        self.faults = Faults()
        self.loaded: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        """Every generate body received, in order."""
        self.calls: list[tuple[str, Any]] = []
        """Every control call received, in order: (path or worker method, its argument)."""
        self.running: set[_Request] = set()
        self.disconnects = 0
        """Requests whose client left before the end."""
        self.port = 0
        self.dead = False
        self._on_die = on_die
        self._unseeded = 0
        self._go = asyncio.Event()
        self._go.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner: web.AppRunner | None = None

    # life

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paused(self) -> bool:
        return not self._go.is_set()

    async def start(self, port: int = 0) -> str:
        self._runner = web.AppRunner(
            self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self.url

    async def stop(self) -> None:
        self.receiver.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def kill(self) -> None:
        """As kill -9 looks from outside: connections reset, nothing listens any more."""
        if self.dead:
            return
        self.dead = True
        if self._on_die is not None:
            self._on_die()
        server = self._runner.server if self._runner else None
        if self._runner is not None:
            for site in list(self._runner.sites):
                listener = getattr(site, "_server", None)
                if listener is not None:
                    listener.close()
        for connection in list(server.connections) if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()

    def set_version(self, version: int) -> None:
        """Both the weights and the label, at once: a committed update."""
        self.weights_version, self.label = version, str(version)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        routes = [
            web.post("/v1/completions", self._completions),
            web.post("/pause", self._control(self._pause)),
            web.post("/resume", self._control(self._resume)),
            web.get("/is_paused", self._control(self._is_paused)),
            web.get("/get_world_size", self._control(self._world_size)),
            web.post("/collective_rpc", self._rpc),
            web.get("/health", self._control(self._health)),
            web.get("/v1/models", self._control(self._models)),
        ]
        if self.older != "completions":
            routes.append(web.post("/inference/v1/generate", self._generate))
        if self.older is None:
            routes.append(web.get("/weight_info", self._control(self._weight_info)))
            routes.append(web.post("/update_weight_version", self._control(self._update_version)))
        paths = {route.path: {} for route in routes}
        routes.append(web.get("/openapi.json", self._control(lambda _: _json({"paths": paths}))))
        app.add_routes(routes)
        return app

    # control plane

    async def _fault(self, kind: str | None) -> web.Response | None:
        if kind in (None, "lie"):
            return None
        if self.faults.times is not None:
            if self.faults.times <= 0:
                return None
            self.faults.times -= 1
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind == "die":
            self.kill()
            await asyncio.sleep(3600)
        return _error(500, f"injected fault {kind}")

    def _control(self, handler: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
        async def run(request: web.Request) -> web.Response:
            if request.path not in ("/health", "/v1/models", "/openapi.json"):
                self.calls.append((request.path, dict(request.query)))
            return await self._fault(self.faults.http.get(request.path)) or await handler(request)

        return run

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "owned_by": "fake", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("keep", "abort", "wait"):
            return _error(422, f"unknown mode {mode}")
        if mode == "wait":
            await self._idle.wait()
        self._go.clear()
        if mode == "abort":
            for r in self.running:
                r.aborted = True
        await asyncio.sleep(0)
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._go.set()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not isinstance(body.get("new_version"), str):
            return _error(422, "new_version must be a string")
        if self.faults.http.get("/update_weight_version") != "lie":
            self.label = body["new_version"]
        return web.json_response({"success": True, "new_version": body["new_version"]})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method, args = body["method"], body.get("args", [])
        if not all(isinstance(a, str) for a in args):
            return _error(400, "args must be strings")
        self.calls.append((method, json.loads(args[0]) if args else None))
        if fault := await self._fault(self.faults.rpc.get(method)):
            return fault
        handler = getattr(self.receiver, method, None)
        if handler is None:
            return _error(500, f"no worker method {method}")
        return web.json_response({"results": [handler(*args)]})

    # generation

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        return await self._reply(http, body, body["token_ids"], body.get("sampling_params", {}))

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if not body.get("return_token_ids"):
            return _error(400, "this fake answers in token ids only")
        return await self._reply(http, body, body["prompt"], body)

    async def _reply(
        self, http: web.Request, body: dict[str, Any], prompt: list[int], params: dict[str, Any]
    ) -> web.StreamResponse:
        self.requests.append(body)
        if self.faults.generate_status is not None:
            return _error(self.faults.generate_status, "injected fault")
        if body.get("model") not in (None, self.model):
            return _error(404, f"the model {body['model']} does not exist")
        if not prompt or len(prompt) >= self.max_model_len:
            why = f"prompt of {len(prompt)} tokens does not fit {self.max_model_len}"
            if not body.get("stream"):
                return _error(400, why)
            told = _event(_error_body(400, why)) + b"data: [DONE]\n\n"  # inside a 200, as vLLM does
            return web.Response(body=told, content_type="text/event-stream")
        r = _Request(prompt, params)
        r.id, r.text_shape = body.get("request_id", ""), "prompt" in body
        self.running.add(r)
        self._idle.clear()
        try:
            if body.get("stream"):
                return await self._stream(http, r)
            async for _ in self._steps(r):
                pass
            return web.json_response(self._whole(r))
        except _Cut:
            if http.transport is not None:
                http.transport.abort()
            return web.Response(status=500)
        except (asyncio.CancelledError, ConnectionResetError):
            self.disconnects += 1
            raise
        finally:
            self.running.discard(r)
            if not self.running:
                self._idle.set()

    async def _stream(self, http: web.Request, r: _Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        sent = 0
        # vLLM sends the first token at once, then one event per `stream_interval` tokens.
        async for n in self._steps(r):
            if n - sent >= (self.stream_interval if sent else 1) and r.finish is None:
                await response.write(_event(self._piece(r, sent, n)))
                sent = n
            if self.faults.error_after is not None and n >= self.faults.error_after:
                await response.write(_event(_error_body(500, "injected fault")) + b"data: [DONE]\n\n")
                return response
        await response.write(_event(self._piece(r, sent, len(r.tokens))) + b"data: [DONE]\n\n")
        return response

    async def _steps(self, r: _Request):
        """Decode one token at a time; yields the number of tokens so far. Ends with r.finish set."""
        params, faults = r.params, self.faults
        reply = self._scripted(r.prompt)
        seed = None
        if params.get("temperature", 1.0) > 0:
            seed = params.get("seed")
            if seed is None:
                self._unseeded += 1
                seed = int.from_bytes(hashlib.blake2b(b"%d.%d" % (self.seed, self._unseeded)).digest()[:4])
        stops: set[int] = set(params.get("stop_token_ids") or ())
        if self.eos is not None and not params.get("ignore_eos"):
            stops.add(self.eos)
        limit = min(params.get("max_tokens") or 16, self.max_model_len - len(r.prompt))
        prefix = Prefix(r.prompt)
        while r.finish is None:
            step_s = self.step_s if faults.step_s is None else faults.step_s
            await asyncio.sleep(step_s)
            if not r.aborted:
                await self._wait_go(r)
            if r.aborted:
                r.finish = "abort"
                return
            n = len(r.tokens)
            token, logprob = policy(prefix, self.weights_version, seed, self.vocab)
            if reply is not None:
                token = reply.tokens[n]
                if reply.logprobs is not None:
                    logprob = reply.logprobs[n]
            prefix.push(token)
            r.tokens.append(token)
            r.logprobs.append(None if n == faults.drop_logprob_at else logprob)
            r.labels.append(self.label)
            n += 1
            if reply is not None and n == len(reply.tokens):
                r.finish = reply.finish_reason
            elif n >= params.get("min_tokens", 0) and token in stops:
                r.finish = "stop"
                r.stop_reason = None if token == self.eos else token
            elif self.decode and any(s in self.decode(r.tokens) for s in params.get("stop") or ()):
                r.finish = "stop"
            elif n >= limit:
                r.finish = "length"
            elif faults.abort_after is not None and n >= faults.abort_after:
                r.finish = "abort"
            if faults.die_after is not None and n >= faults.die_after:
                self.kill()
                raise _Cut
            yield n
            if faults.cut_after is not None and n >= faults.cut_after:
                raise _Cut

    async def _wait_go(self, r: _Request) -> None:
        while not self._go.is_set() and not r.aborted:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._go.wait(), 0.02)

    def _scripted(self, prompt: list[int]) -> Reply | None:
        for i, reply in enumerate(self.script):
            if reply.match is None or reply.match(prompt):
                if reply.times is not None:
                    reply.times -= 1
                    if reply.times <= 0:
                        del self.script[i]
                return reply
        return None

    def _logprobs(self, r: _Request, start: int, end: int) -> dict[str, Any] | None:
        if r.params.get("logprobs") is None:
            return None
        if r.text_shape:
            return self._columns(r, start, end)
        content = []
        for token, logprob in zip(r.tokens[start:end], r.logprobs[start:end], strict=True):
            entry = {"token_id": token, "logprob": logprob, "rank": 1}
            content.append({**entry, "top_logprobs": self._top(entry, max(1, r.params["logprobs"]))})
        return {"content": content}

    def _columns(self, r: _Request, start: int, end: int) -> dict[str, Any]:
        """The schema of completions. It names a token by its text, or, asked to, by its id."""
        name = "token_id:{}" if r.params.get("return_tokens_as_token_ids") else "t{}"
        tops = []
        for token, logprob in zip(r.tokens[start:end], r.logprobs[start:end], strict=True):
            top = self._top({"token_id": token, "logprob": logprob}, max(1, r.params["logprobs"]))
            tops.append({name.format(e["token_id"]): e["logprob"] for e in top})
        return {
            "tokens": [name.format(t) for t in r.tokens[start:end]],
            "token_logprobs": r.logprobs[start:end],
            "top_logprobs": tops,
        }

    def _top(self, sampled: dict[str, Any], k: int) -> list[dict[str, Any]]:
        """The sampled token, then less likely ones, `k` in all; no distribution is known of a missing logprob."""
        if sampled["logprob"] is None:
            return []
        rest = min(sampled["logprob"], math.log1p(-math.exp(sampled["logprob"])) - math.log(self.vocab))
        return [
            sampled,
            *(
                {"token_id": (sampled["token_id"] + i) % self.vocab, "logprob": rest - i, "rank": i + 1}
                for i in range(1, k)
            ),
        ]

    def _choice(self, r: _Request, start: int, end: int) -> dict[str, Any]:
        choice = {
            "index": 0,
            "token_ids": r.tokens[start:end],
            "logprobs": self._logprobs(r, start, end),
            "finish_reason": r.finish,
            "stop_reason": r.stop_reason,
        }
        if self.older is None and not r.text_shape:
            choice["weight_versions"] = r.spans() if r.finish is not None else None
        return choice

    def _piece(self, r: _Request, start: int, end: int) -> dict[str, Any]:
        return {"request_id": f"fake-{id(r)}", "choices": [self._choice(r, start, end)], "usage": None}

    def _whole(self, r: _Request) -> dict[str, Any]:
        n, m = len(r.prompt), len(r.tokens)
        return {
            "request_id": f"fake-{id(r)}",
            "model": self.model,
            "choices": [self._choice(r, 0, m)],
            "usage": {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m},
        }


# --- odds and ends ---------------------------------------------------------------------------------------


async def _json(body: dict[str, Any]) -> web.Response:
    return web.json_response(body)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _error_body(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "FakeEngineError", "param": None, "code": status}}


def _error(status: int, message: str) -> web.Response:
    return web.json_response(_error_body(status, message), status=status)


async def _serve(args: argparse.Namespace) -> None:
    if args.crash:
        print(args.crash, file=sys.stderr)
        raise SystemExit(1)
    engine = FakeEngine(
        model=args.served_model_name,
        receiver=args.receiver,
        step_s=args.step_s,
        older=args.older,
        on_die=lambda: os._exit(9),
    )
    for name, value in json.loads(args.faults).items():
        setattr(engine.faults, name, value)
    await engine.start(args.port)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="fake vLLM server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--receiver", choices=("simulated", "gloo"), default="simulated")
    parser.add_argument("--older", choices=("generate", "completions"), default=None)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--faults", default="{}", help="Faults as a JSON object")
    parser.add_argument("--crash", default="", help="print this to stderr and exit 1")
    asyncio.run(_serve(parser.parse_known_args()[0]))


if __name__ == "__main__":
    main()
