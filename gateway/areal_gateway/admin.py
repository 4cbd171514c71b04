"""The admin plane: sessions, rewards, leases, weights, and what there is to see.

Invariant: without the admin key nothing here answers, except /health and /metrics, which tell no secret.
Handlers only read the request and shape the answer; what they do is in the objects of the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from areal_agent.errors import EngineError, GatewayError, WeightUpdateError
from areal_agent.weights import DISK, Manifest
from areal_agent.wire import MEDIA_TYPE, pack
from areal_gateway import auth
from areal_gateway.core import Gateway
from areal_gateway.export import lines, sequences
from areal_gateway.feedback import give
from areal_gateway.fields import bad, choice, integer, labels, mapping, number, text
from areal_gateway.fleet.types import EngineSampling, UnknownEngine
from areal_gateway.http import Handler, admin_error, answer, guarded, read_json, route_of
from areal_gateway.leases import ABANDONED
from areal_gateway.records import CallRecord, Outcome, Sampling, SessionHistory
from areal_gateway.sessions import summary
from areal_gateway.trajectories import fold

log = logging.getLogger(__name__)

PURPOSES = ("train", "eval", "rollout")
EVENT_IDLE_S = 10.0
ERROR_CHARS = 4096
"""Of an agent's error kept with its seal; a traceback may be longer than anybody reads."""

MOST_PROBES = 16
"""Prompts of one weight probe; each is asked of every engine."""


def routes(app: web.Application) -> None:
    router = app.router

    def admin(method: str, path: str, handler: Handler) -> None:
        router.add_route(method, path, guarded(_with_key(handler), admin_error))

    admin("POST", "/admin/sessions", open_session)
    admin("GET", "/admin/sessions/{id}", inspect_session)
    admin("POST", "/admin/sessions/{id}/rewards", reward_session)
    admin("POST", "/admin/sessions/{id}/seal", seal_session)
    admin("GET", "/admin/trajectories/export", export)
    admin("POST", "/admin/trajectories/lease", lease)
    admin("POST", "/admin/trajectories/ack", ack)
    admin("POST", "/admin/trajectories/nack", nack)
    admin("POST", "/admin/trajectories/renew", renew)
    admin("POST", "/admin/trajectories/rewind", rewind)
    admin("GET", "/admin/groups", groups)
    admin("POST", "/admin/groups/abandon", abandon)
    admin("POST", "/admin/metrics", trainer_metrics)
    admin("GET", "/admin/status", status)
    admin("GET", "/admin/fleet", fleet)
    admin("POST", "/admin/fleet/join", join_fleet)
    admin("POST", "/admin/fleet/drain", drain_engine)
    admin("POST", "/admin/fleet/leave", leave_fleet)
    admin("GET", "/admin/events", events)
    admin("POST", "/admin/weights/begin", begin_weights)
    admin("POST", "/admin/weights/commit", commit_weights)
    admin("POST", "/admin/weights/abort", abort_weights)
    admin("POST", "/admin/weights/probe", probe_weights)
    router.add_get("/health", guarded(health, admin_error))
    router.add_get("/metrics", guarded(metrics, admin_error))


def _with_key(handler: Handler) -> Handler:
    async def handle(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        if not auth.same_key(auth.presented_key(request), gateway.admin_key):
            gateway.metrics.unauthorized.labels("admin").inc()
            log.warning("unauthorized request to %s from %s", route_of(request), request.remote)
            raise GatewayError(
                "this needs the admin key (RUN_DIR/admin.key) as `Authorization: Bearer`",
                status=401,
                code="unauthorized",
            )
        return await handler(gateway, request)

    return handle


# -- sessions --------------------------------------------------------------------------------------


async def open_session(gateway: Gateway, request: web.Request) -> web.Response:
    body = mapping(await read_json(request))
    purpose = choice(body, "purpose", PURPOSES)
    session, key = await gateway.sessions.open(
        task_id=text(body, "task_id"),
        group_id=text(body, "group_id", "") or None,
        group_size=integer(body, "group_size", 1, low=1, high=4096),
        purpose=purpose,
        sampling=_sampling(gateway, body, purpose),
        deadline_s=number(body, "deadline_s", gateway.config.rollout.session_timeout_s, low=0.001, high=1e9),
        labels=labels(body),
        version=gateway.fleet.version,
    )
    return answer(
        {
            "session_id": session.id,
            "api_key": key,
            "base_url": f"{request.scheme}://{request.host}/v1",
            "group_id": session.record.group_id,
            "opened_version": session.record.opened_version,
            "deadline_s": session.record.deadline_s,
        },
        201,
    )


def _sampling(gateway: Gateway, body: dict[str, Any], purpose: str) -> Sampling:
    """The run's sampling with the session's overrides; `seed` only where the session has its own."""
    run = gateway.config.sampling
    base = Sampling(run.temperature, run.top_p, run.top_k, run.max_tokens)
    raw = body.get("sampling")
    asked = {} if raw is None else mapping(raw, "sampling")
    known = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    if unknown := sorted(set(asked) - set(known)):
        raise bad(f"sampling has no setting {', '.join(unknown)}; known are {', '.join(known)}")
    result = replace(
        base,
        temperature=number(asked, "temperature", base.temperature, low=0.0, high=100.0),
        top_p=number(asked, "top_p", base.top_p, low=1e-6, high=1.0),
        top_k=integer(asked, "top_k", base.top_k, low=0),
        max_tokens=integer(asked, "max_tokens", 0, low=1) or base.max_tokens,
        seed=None if asked.get("seed") is None else integer(asked, "seed", low=0),
    )
    if purpose == "train" and result.temperature == 0:
        raise bad(
            "sampling.temperature 0 has no distribution to train on; open the session with purpose eval"
        )
    if purpose == "train" and (result.top_p != 1 or result.top_k != 0):
        raise bad(
            f"sampling.top_p {result.top_p:g} and top_k {result.top_k} cut the distribution, and the trainer "
            "cannot compute the logprobs of what is left; sample with top_p 1 and top_k 0, or open the session "
            "with purpose eval"
        )
    return result


async def inspect_session(gateway: Gateway, request: web.Request) -> web.Response:
    history = await gateway.sessions.history(request.match_info["id"])
    credit = gateway.sessions.credit
    head = summary(history, credit)
    own, returns = credit.of_calls(history), credit.returns(history, head["reward"])
    body = {
        **head,
        "task_id": history.session.task_id,
        "group_id": history.session.group_id,
        "purpose": history.session.purpose,
        "sampling": asdict(history.session.sampling),
        "labels": history.session.labels,
        "opened_version": history.session.opened_version,
        "opened_at": history.session.opened_at,
        "counts": head["calls"],
        "calls": [
            {
                **_call(c, history),
                "reward_state": own[c.call_id][0],
                "reward": own[c.call_id][1],
                "return": returns[c.call_id],
            }
            for c in history.calls
        ],
        "rewards": [asdict(r) for r in history.rewards],
    }
    open_session = gateway.sessions.get_open(history.session.session_id)
    body["running"] = sum(e.request.n for e in open_session.running) if open_session else 0
    body["last_error"] = open_session.last_error if open_session else None
    if request.query.get("trajectory", "0") not in ("0", "", "false"):
        trajectory = await asyncio.to_thread(fold, history, body["reward"], credit)
        body["sequences"] = sequences(trajectory)
    return answer(body)


def _call(call: CallRecord, history: SessionHistory) -> dict[str, Any]:
    """`messages` are those beyond the parent call's conversation."""
    n = len(call.output_ids)
    return {
        "call_id": call.call_id,
        "exchange_id": call.exchange_id,
        "index": call.index,
        "parent_id": call.parent_id,
        "branch_cause": call.cause,
        "state": call.state.value,
        "incomplete_reason": call.reason,
        "delivered": call.call_id in history.delivered,
        "finish_reason": call.finish_reason,
        "usage": {
            "prompt_tokens": call.prompt_length,
            "completion_tokens": n,
            "total_tokens": call.prompt_length + n,
        },
        "versions": [{"version": v, "start": a, "end": b} for a, b, v in call.spans],
        "labels": call.labels,
        "messages": call.messages,
        "tools": call.tools,
        "reply": call.reply,
        "started_at": call.started_at,
        "ended_at": call.ended_at,
    }


async def reward_session(gateway: Gateway, request: web.Request) -> web.Response:
    body = mapping(await read_json(request))
    text(body, "key")  # required here: this plane's clients repeat what was not answered
    history = await give(gateway.sessions, request.match_info["id"], body)
    return answer({"session_id": history.session.session_id, "rewards": len(history.rewards)})


async def seal_session(gateway: Gateway, request: web.Request) -> web.Response:
    body = mapping(await read_json(request))
    outcome = Outcome(choice(body, "outcome", tuple(o.value for o in Outcome), Outcome.FINISHED.value))
    error = str(body.get("error") or "")[:ERROR_CHARS] or None
    history = await gateway.sessions.seal(request.match_info["id"], outcome, error)
    return answer(summary(history, gateway.sessions.credit))


# -- trajectories ----------------------------------------------------------------------------------


async def lease(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    body = mapping(await read_json(request))
    staleness = body.get("max_staleness")
    batch = await gateway.leases.lease(
        want=integer(body, "groups", low=1),
        max_staleness=None if staleness is None else integer(body, "max_staleness", low=0),
        wait_s=number(body, "wait_s", 0.0, low=0.0, high=3600.0),
        lease_s=number(body, "lease_s", 600.0, low=0.001, high=1e9),
        version=lambda: gateway.fleet.version,
    )
    if batch is None:
        return web.Response(status=204)
    try:
        response = web.Response(body=await asyncio.to_thread(pack, batch), content_type=MEDIA_TYPE)
        await response.prepare(request)
        await response.write_eof()
    except BaseException:  # the trainer left before it had the batch: nobody else may wait until it expires
        with suppress(GatewayError):  # it ended meanwhile
            await gateway.leases.nack(batch.lease_id)
        raise
    return response


async def ack(gateway: Gateway, request: web.Request) -> web.Response:
    lease_id = text(mapping(await read_json(request)), "lease_id")
    await gateway.leases.ack(lease_id)
    return answer({"lease_id": lease_id})


async def nack(gateway: Gateway, request: web.Request) -> web.Response:
    lease_id = text(mapping(await read_json(request)), "lease_id")
    await gateway.leases.nack(lease_id)
    return answer({"lease_id": lease_id})


async def renew(gateway: Gateway, request: web.Request) -> web.Response:
    body = mapping(await read_json(request))
    lease_id = text(body, "lease_id")
    gateway.leases.renew(lease_id, number(body, "lease_s", low=0.001, high=1e9))
    return answer({"lease_id": lease_id})


async def rewind(gateway: Gateway, request: web.Request) -> web.Response:
    """{version} -> {version, batches}: the trainer resumes at `version`; see Leases.rewind."""
    version = integer(mapping(await read_json(request)), "version", low=0)
    return answer({"version": version, "batches": await gateway.leases.rewind(version)})


async def groups(gateway: Gateway, request: web.Request) -> web.Response:
    """-> {groups: {id: state}} of every training group of the run."""
    return answer({"groups": gateway.leases.states()})


async def abandon(gateway: Gateway, request: web.Request) -> web.Response:
    """A resumed controller: nobody runs the open sessions any more. -> {groups: [id], sessions}"""
    given_up = await gateway.leases.abandon()
    sessions = [s.id for s in gateway.sessions.running()]
    for session_id in sessions:
        await gateway.sessions.seal(session_id, Outcome.FAILED, ABANDONED)
    return answer({"groups": given_up, "sessions": len(sessions)})


async def export(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """?purpose=train&label.NAME=VALUE (repeatable) -> JSON lines of the sealed sessions, streamed; see export.py."""
    query = request.query
    wanted: dict[str, list[str]] = {}
    for name in sorted(set(query)):
        if name.startswith("label.") and name != "label.":
            wanted[name.removeprefix("label.")] = query.getall(name)
        elif name != "purpose":
            raise bad(f"{name!r:.60} is no filter; known are purpose and label.NAME")
    purpose = choice(dict(query), "purpose", PURPOSES, "train")
    found = lines(gateway.ledger, gateway.sessions.credit, labels=wanted, purpose=purpose)
    response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
    await response.prepare(request)
    while (line := await asyncio.to_thread(next, found, None)) is not None:
        await response.write(line)
    await response.write_eof()
    return response


# -- weights ---------------------------------------------------------------------------------------


async def begin_weights(gateway: Gateway, request: web.Request) -> web.Response:
    body = mapping(await read_json(request))
    try:
        manifest = Manifest.model_validate(body.get("manifest"))
    except ValidationError as e:
        raise bad(
            f"manifest is not a weight manifest: {e.errors()[0]['msg']} at {e.errors()[0]['loc']}"
        ) from None
    store = mapping(body.get("store"), "store")
    if text(body, "backend") == DISK:
        where: dict[str, Any] = {"folder": text(store, "folder")}
    else:
        where = {"host": text(store, "host"), "port": integer(store, "port", low=1, high=65535)}
    return await _weights(
        gateway,
        gateway.fleet.weights.begin(
            version=integer(body, "version", low=0),
            manifest=manifest,
            store=where,
            backend=text(body, "backend"),
            force=body.get("force") is True,
        ),
    )


async def commit_weights(gateway: Gateway, request: web.Request) -> web.Response:
    body = mapping(await read_json(request))
    checksums = body.get("checksums")
    if not isinstance(checksums, list) or not all(isinstance(c, str) for c in checksums):
        raise bad("checksums must be a list with one string per bucket")
    return await _weights(gateway, gateway.fleet.weights.commit(text(body, "update_id"), checksums))


async def abort_weights(gateway: Gateway, request: web.Request) -> web.Response:
    body = mapping(await read_json(request))
    return await _weights(
        gateway, gateway.fleet.weights.abort(text(body, "update_id"), text(body, "reason", "not told"))
    )


async def probe_weights(gateway: Gateway, request: web.Request) -> web.Response:
    """{prompts: [[id]], max_tokens, temperature} -> {replies: [{engine, prompt_ids, token_ids, logprobs, versions}]}"""
    body = mapping(await read_json(request))
    prompts = body.get("prompts")
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MOST_PROBES or not all(map(is_ids, prompts)):
        raise bad(f"prompts must be 1 to {MOST_PROBES} lists of token ids")
    sampling = EngineSampling(
        max_tokens=integer(body, "max_tokens", low=1), temperature=number(body, "temperature", low=1e-3)
    )
    try:
        replies = await gateway.fleet.probe(prompts, sampling)
    except EngineError as e:
        raise GatewayError(str(e), status=502, code="engine_error") from e
    return answer({"replies": [asdict(reply) for reply in replies]})


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and 0 <= i < 2**31 for i in value)


async def _weights(gateway: Gateway, step: Any) -> web.Response:
    """Run one step of the transaction; what stops it is a 409 that says whether to try again."""
    try:
        return answer(await step)
    except WeightUpdateError as e:
        gateway.last_error = str(e)
        code = (
            "weights_retry"
            if e.retry
            else "weights_held"
            if "held" in gateway.fleet.state
            else "weights_conflict"
        )
        log.warning("weights: %s (%s)", e, code)
        raise GatewayError(str(e), status=409, code=code) from e
    except EngineError as e:
        gateway.last_error = str(e)
        log.warning("weights: %s", e)
        raise GatewayError(str(e), status=409, code="weights_retry") from e


# -- seeing ----------------------------------------------------------------------------------------


async def trainer_metrics(gateway: Gateway, request: web.Request) -> web.Response:
    body = mapping(await read_json(request))
    integer(body, "step", low=0)
    gateway.trainer = body
    gateway.events.forward({"type": "trainer", **body})
    return answer({})


async def status(gateway: Gateway, request: web.Request) -> web.Response:
    return answer(gateway.status())


async def fleet(gateway: Gateway, request: web.Request) -> web.Response:
    return answer({"version": gateway.fleet.version, "state": gateway.fleet.state, **gateway.fleet.status()})


async def join_fleet(gateway: Gateway, request: web.Request) -> web.Response:
    """{url} -> the engine's status, once it has come up"""
    url = text(mapping(await read_json(request)), "url")
    if not url.startswith(("http://", "https://")):
        raise bad(f"url must be an engine's address, such as http://HOST:PORT; it is {url!r}")
    return await _membership(gateway.fleet.join(url))


async def drain_engine(gateway: Gateway, request: web.Request) -> web.Response:
    """{engine} -> its status; `running` says how many calls it still has"""
    return await _membership(gateway.fleet.drain(text(mapping(await read_json(request)), "engine")))


async def leave_fleet(gateway: Gateway, request: web.Request) -> web.Response:
    """{engine} -> its last status"""
    return await _membership(gateway.fleet.leave(text(mapping(await read_json(request)), "engine")))


async def _membership(change: Awaitable[dict[str, Any]]) -> web.Response:
    try:
        return answer(await change)
    except UnknownEngine as e:
        raise GatewayError(str(e), status=404, code="unknown_engine") from e
    except EngineError as e:
        raise GatewayError(str(e), status=502, code="engine_error") from e


async def events(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """Every event from now on, as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    with gateway.events.listen(EVENT_IDLE_S) as listener:
        await response.write(b": listening\n\n")
        async for event in listener:
            await response.write(
                b": keep-alive\n\n"
                if event is None
                else b"data: " + orjson.dumps(event, default=str) + b"\n\n"
            )
    return response


async def health(gateway: Gateway, request: web.Request) -> web.Response:
    return answer({"status": "ok", "version": gateway.fleet.version, "state": gateway.fleet.state})


async def metrics(gateway: Gateway, request: web.Request) -> web.Response:
    return web.Response(body=gateway.metrics.text(), content_type="text/plain", charset="utf-8")
