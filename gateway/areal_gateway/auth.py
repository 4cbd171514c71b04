"""Keys. Invariant: an agent's key reaches its own session and nothing else; the admin key makes no calls.

Keys are random, compared in constant time (sessions' by looking up their hash, which tells a guesser
nothing about the key), and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from areal_gateway.plain import Incoming

SESSION_PREFIX = "sk-areal-"
KEY_BYTES = 24


def new_session_key() -> str:
    return SESSION_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def same_key(given: str | None, expected: str) -> bool:
    return given is not None and hmac.compare_digest(hash_key(given), hash_key(expected))


def presented_key(request: Incoming) -> str | None:
    """The key of a request: in the path, else `Authorization: Bearer`, else `x-api-key`."""
    if key := request.match_info.get("key"):
        return key
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return request.headers.get("x-api-key") or None
