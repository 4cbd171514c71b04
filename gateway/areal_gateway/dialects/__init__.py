"""The APIs that agents speak, as tables: path -> Dialect, path -> Counter. Adding one adds a file and a line."""

from __future__ import annotations

from areal_gateway.dialects.base import Counter, Dialect, Past, Served, StreamEncoder
from areal_gateway.dialects.chat import ChatCompletions

DIALECTS: dict[str, Dialect] = {d.path: d for d in (ChatCompletions(),)}

COUNTERS: dict[str, Counter] = {}

__all__ = ["COUNTERS", "DIALECTS", "Counter", "Dialect", "Past", "Served", "StreamEncoder"]
