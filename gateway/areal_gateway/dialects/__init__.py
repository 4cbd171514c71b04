"""The APIs that agents speak, as a table: path -> Dialect. Adding one adds a file and a line here."""

from __future__ import annotations

from areal_gateway.dialects.base import Dialect, Served, StreamEncoder
from areal_gateway.dialects.chat import ChatCompletions

DIALECTS: dict[str, Dialect] = {d.path: d for d in (ChatCompletions(),)}

__all__ = ["DIALECTS", "Dialect", "Served", "StreamEncoder"]
