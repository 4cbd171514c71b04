"""Where a request belongs, which ids it becomes, and how it is sampled: all that is decided before it runs.

Invariant: preparing changes nothing. The sampling is the session's, unless the run lets requests decide
(`sampling.pinned: false`); a call whose logprobs the trainer could not compute is then context only.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, replace
from typing import Any

from areal_gateway.exchange import CallRequest, ContextLengthError, Prompt
from areal_gateway.fleet.types import EngineSampling
from areal_gateway.raw import place_raw
from areal_gateway.records import Sampling, ints
from areal_gateway.sessions import Session
from areal_gateway.tokens import Tokens
from areal_gateway.tree import Attachment, Cause, conversation
from areal_gateway.wishes import Wishes


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where a request belongs and what it asks of the engine. Making one changed nothing.

    `context_only`: why its replies are not trained, None where they are.
    """

    attachment: Attachment
    prompt_ids: array[int]
    shared: int
    sampling: EngineSampling
    context_only: str | None = None


def settle(
    tokens: Tokens, request: CallRequest, *, constrain: bool, wishes: Wishes | None = None
) -> CallRequest:
    """The request without a constraint that cannot be kept (or may not, `constrain` False), which it then says,
    and with the sampling it wishes where it may."""
    if wishes is not None:
        ignored = tuple(name for name in request.ignored if name not in wishes.names)
        request = replace(request, wishes=wishes, ignored=ignored)
    constraint = request.constraint
    if constraint is None or (constrain and _structured_outputs(tokens, request)):
        return request
    ignored = tuple(sorted({*request.ignored, *constraint.fields}))
    return replace(request, constraint=None, ignored=ignored)


def _structured_outputs(tokens: Tokens, request: CallRequest) -> dict[str, Any] | None:
    if request.constraint is None:
        return None
    return request.constraint.structured_outputs(request.tools if request.parse_tools else [], tokens.syntax)


Placed = tuple[Attachment, "array[int]", int]
"""(attachment, prompt ids, how many of them are the parent's)"""


def place(tokens: Tokens, session: Session, request: CallRequest, prompt: Prompt | None = None) -> Placed:
    """Attach, then bridge or render. Raises GatewayError (400)."""
    if prompt is not None:
        return place_raw(tokens, session.tree, prompt)
    attachment = session.tree.attach(request.messages, request.tools, request.after)
    return bridged(tokens, attachment, request) or rendered(tokens, attachment, request)


def bridged(tokens: Tokens, attachment: Attachment, request: CallRequest) -> Placed | None:
    """The parent's ids and what is new, tokenised; None where there is no parent or no exact way to go on."""
    if (parent := attachment.parent) is None:
        return None
    before, sampled = parent.prompt_ids(), parent.record.output_ids
    new = tokens.bridge(
        conversation(parent), before, sampled.tolist(), attachment.new_messages, request.tools
    )
    return None if new is None else (attachment, before + sampled + ints(new), len(before) + len(sampled))


def rendered(tokens: Tokens, attachment: Attachment, request: CallRequest) -> Placed:
    """All of it, as a root."""
    if attachment.parent is not None:
        attachment = attachment.detached(Cause.BRIDGE_REFUSED)
    return attachment, ints(tokens.render(request.messages, request.tools)), 0


def prepare(tokens: Tokens, session: Session, request: CallRequest, prompt: Prompt | None = None) -> Prepared:
    """Place the request, check the room and pin the sampling. Raises GatewayError (400)."""
    return ready(tokens, session, request, place(tokens, session, request, prompt))


def ready(tokens: Tokens, session: Session, request: CallRequest, placed: Placed) -> Prepared:
    """As `prepare`, of a request that is placed."""
    attachment, prompt_ids, shared = placed
    room = tokens.context - len(prompt_ids)
    if room < 1:
        raise ContextLengthError(len(prompt_ids), tokens.context)
    pinned = session.record.sampling
    # What an evaluation measures is not the agent's to choose: its sessions are sampled alike, mostly greedily.
    wishes = request.wishes if session.record.purpose != "eval" else None
    wished = pinned if wishes is None else wishes.over(pinned)
    limits = [room, *(m for m in (request.max_tokens, pinned.max_tokens) if m is not None)]
    sampling = EngineSampling(
        max_tokens=min(limits),
        temperature=wished.temperature,
        top_p=wished.top_p,
        top_k=wished.top_k,
        stop=list(request.stop),
        stop_token_ids=list(dict.fromkeys([*tokens.stop_token_ids, *request.stop_token_ids])),
        top_logprobs=request.top_logprobs,
        extra={"structured_outputs": outputs} if (outputs := _structured_outputs(tokens, request)) else {},
    )
    constraint = request.constraint
    why = constraint.reason if constraint else wishes.untrained(pinned) if wishes else None
    return Prepared(attachment, prompt_ids, shared, sampling, why)


def prepare_all(tokens: Tokens, session: Session, request: CallRequest) -> list[Prepared]:
    """Each of a request's prompts, or its conversation."""
    return [prepare(tokens, session, request, prompt) for prompt in request.prompts or (None,)]


def seed_of(pinned: Sampling, prompt_ids: array[int], sibling: int) -> int | None:
    """A call's seed: repeatable from the session's seed, the prompt, and how often it was asked before."""
    if pinned.seed is None:
        return None
    h = hashlib.blake2b(digest_size=4)
    h.update(f"{pinned.seed}|{sibling}|".encode())
    h.update(prompt_ids.tobytes())
    return int.from_bytes(h.digest(), "little") & 0x7FFF_FFFF
