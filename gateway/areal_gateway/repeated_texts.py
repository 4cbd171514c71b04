"""Token ids of the texts that come again: a template's own words, the system prompt and the tools of every session.

Invariant: the ids are those that tokenising gives. A text that comes once takes no room: its hash is noted, and
only a text whose hash is known is kept, so that a thousand different tool results drive out no system prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

SHORT_CHARS, SHORT_TEXTS = 32, 512
"""Texts up to this long are kept the first time, so many of them."""

LONG_CHARS, LONG_TEXTS = 100_000, 64
"""Longest text that is kept, and how many of those; some 64 times 25 000 ids at the very most, 60 MB."""

SEEN = 4096
"""Hashes of texts that came once, the latest."""


class RepeatedTexts:
    """Tokenises with `encode` (text, add special tokens) -> ids, once for what comes again. Any thread may ask."""

    def __init__(self, encode: Callable[[str, bool], list[int]]) -> None:
        self._encode = encode
        self._short = lru_cache(SHORT_TEXTS)(encode)
        self._long = lru_cache(LONG_TEXTS)(encode)
        self._seen: OrderedDict[int, None] = OrderedDict()

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of `text`, in a list of the caller's own."""
        if len(text) <= SHORT_CHARS:
            return list(self._short(text, special))
        if len(text) > LONG_CHARS:
            return self._encode(text, special)
        key = hash(text)
        if key in self._seen:
            return list(self._long(text, special))
        self._seen[key] = None
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return self._encode(text, special)
