"""The APIs that agents speak, as tables: path -> Dialect, path -> Counter. Adding one adds a file and a line."""

from __future__ import annotations

from areal_gateway.dialects.base import Counter, Dialect, Past, Served, StreamEncoder
from areal_gateway.dialects.chat import ChatCompletions
from areal_gateway.dialects.completions import Completions
from areal_gateway.dialects.messages import CountTokens, Messages
from areal_gateway.dialects.responses import InputTokens, Responses

DIALECTS: dict[str, Dialect] = {
    d.path: d for d in (ChatCompletions(), Completions(), Responses(), Messages())
}

COUNTERS: dict[str, Counter] = {c.path: c for c in (InputTokens(), CountTokens())}

__all__ = ["COUNTERS", "DIALECTS", "Counter", "Dialect", "Past", "Served", "StreamEncoder"]
