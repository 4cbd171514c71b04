"""One event of a reply's stream, as either token endpoint of a vLLM server words it, in one shape.

Invariant: a token has its own logprob, or None where the engine gave none or gave another token's; a value
that no sampled token can have is none.

Events are decoded into typed structs: this is most of what a reply costs the gateway, and a struct of the
four fields that are read costs half of a dictionary of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

MASKED = -9999.0
"""vLLM writes a logprob of minus infinity as this; a sampled token cannot have it."""

ID = "token_id:"
"""How completions spells a token id in place of the token's text."""

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

Top = list[list[tuple[int, float]]]
"""For each token, the likeliest at its place: (token id, logprob)."""


class _Likely(Struct, gc=False):
    token_id: int | None = None
    logprob: float | None = None


class _Sampled(Struct, gc=False):
    token_id: int | None = None
    logprob: float | None = None


class _SampledTop(Struct, gc=False):
    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: list[_Likely] | None = None


class _Content(Struct, gc=False):
    content: list[_Sampled | None] | None = None


class _ContentTop(Struct, gc=False):
    content: list[_SampledTop | None] | None = None


class _Columns(Struct, gc=False):
    token_logprobs: list[float | None] | None = None


class _ColumnsTop(_Columns, gc=False):
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(Struct, gc=False):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    weight_versions: list[dict[str, Any]] | None = None


class _Generated(_Choice, gc=False):
    logprobs: _Content | None = None


class _GeneratedTop(_Choice, gc=False):
    logprobs: _ContentTop | None = None


class _Completed(_Choice, gc=False):
    logprobs: _Columns | None = None


class _CompletedTop(_Choice, gc=False):
    logprobs: _ColumnsTop | None = None


Choice = _Generated | _GeneratedTop | _Completed | _CompletedTop


class _Event(Struct, gc=False):
    error: Any = None


class GeneratedEvent(_Event, gc=False):
    """Of GENERATE."""

    choices: list[_Generated] | None = None


class GeneratedTopEvent(_Event, gc=False):
    """Of GENERATE, with the likeliest tokens."""

    choices: list[_GeneratedTop] | None = None


class CompletedEvent(_Event, gc=False):
    """Of COMPLETIONS."""

    choices: list[_Completed] | None = None


class CompletedTopEvent(_Event, gc=False):
    """Of COMPLETIONS, with the likeliest tokens."""

    choices: list[_CompletedTop] | None = None


Event = GeneratedEvent | GeneratedTopEvent | CompletedEvent | CompletedTopEvent

Reader = Callable[[bytes], Sequence[Event]]
"""Reads a JSON list of events. It raises msgspec.DecodeError."""

_READERS: dict[tuple[str, bool], Reader] = {
    (GENERATE, False): msgspec.json.Decoder(list[GeneratedEvent]).decode,
    (GENERATE, True): msgspec.json.Decoder(list[GeneratedTopEvent]).decode,
    (COMPLETIONS, False): msgspec.json.Decoder(list[CompletedEvent]).decode,
    (COMPLETIONS, True): msgspec.json.Decoder(list[CompletedTopEvent]).decode,
}


def reader(path: str, *, top: bool) -> Reader:
    """Of events of `path`, with the likeliest tokens or without."""
    return _READERS[path, top]


def read_events(read: Reader, batch: list[bytes]) -> tuple[Sequence[Event], tuple[bytes, str] | None]:
    """The events of a batch, up to the first that cannot be read; of that, what it is and what is wrong with it."""
    try:
        # All in one go: each alone would be read as fast, but not called for as fast.
        events = read(b"[%b]" % b",".join(batch))
        if len(events) == len(batch):  # else two broken ones happened to make a whole
            return events, None
    except msgspec.DecodeError:
        pass
    found: list[Event] = []
    for data in batch:
        try:
            alone = read(b"[%b]" % data)
        except msgspec.DecodeError as e:
            return found, (data, str(e))
        if len(alone) != 1:
            return found, (data, f"it is {len(alone)} events")
        found += alone
    return found, None


def said_of(choice: Choice) -> list[Any]:
    """What it says of each of its tokens' logprobs; of none where it does not say as much as it has tokens.

    Completions names tokens by their text, so that there only the count can be checked.
    """
    said: list[Any] | None
    if isinstance(choice, _Generated | _GeneratedTop):
        said = choice.logprobs and choice.logprobs.content  # type: ignore[assignment]
    else:
        said = choice.logprobs and choice.logprobs.token_logprobs  # type: ignore[assignment]
    n = len(choice.token_ids or ())
    return said if said is not None and len(said) == n else [None] * n


def logprobs_of(said: list[Any], ids: list[int]) -> list[float | None]:
    """One per id, from what was said of them; None in place of what no sampled token can have."""
    try:  # what nearly every reply is: an entry for every token, and for that token
        if [e.token_id for e in said] == ids:
            return _possible([e.logprob for e in said])
    except AttributeError:  # bare numbers, or None for an entry
        pass
    return _possible([_own(e, t) for e, t in zip(said, ids, strict=True)])


def _own(said: _Sampled | _SampledTop | float | None, token_id: int) -> float | None:
    if said is None or isinstance(said, float | int):
        return said
    return said.logprob if said.token_id == token_id else None


def _possible(logprobs: list[float | None]) -> list[float | None]:
    try:
        if not logprobs or MASKED < min(logprobs) <= max(logprobs) < math.inf:  # type: ignore[type-var]
            return logprobs
    except TypeError:  # a None among them
        pass
    return [p if p is not None and MASKED < p < math.inf else None for p in logprobs]


def top_of(choice: Choice, ids: list[int], k: int) -> Top:
    """For each id the likeliest `k`, those of probability 0 left out; none where the engine told none."""
    found: list[list[tuple[int | None, float | None]]] = []
    if isinstance(choice, _CompletedTop):
        columns = (choice.logprobs and choice.logprobs.top_logprobs) or []
        found = [[(int(n.removeprefix(ID)), p) for n, p in (at or {}).items()] for at in columns]
    elif isinstance(choice, _GeneratedTop):
        entries = (choice.logprobs and choice.logprobs.content) or []
        found = [[(e.token_id, e.logprob) for e in (at and at.top_logprobs) or ()] for at in entries]
    if len(found) != len(ids):
        return [[] for _ in ids]
    known = [[(t, p) for t, p in at if t is not None and p is not None and p > MASKED] for at in found]
    return [sorted(at, key=lambda e: -e[1])[:k] for at in known]
