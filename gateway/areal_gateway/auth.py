"""Keys. Invariant: an agent's key reaches its own session and nothing else; the admin key makes no calls.

Keys are random, compared in constant time (sessions' by looking up their hash, which tells a guesser
nothing about the key), and never logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from aiohttp import web

from areal_agent.errors import ConfigError

SESSION_PREFIX = "sk-areal-"
KEY_BYTES = 24


def new_session_key() -> str:
    return SESSION_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def same_key(given: str | None, expected: str) -> bool:
    return given is not None and hmac.compare_digest(hash_key(given), hash_key(expected))


def presented_key(request: web.Request) -> str | None:
    """The key of a request: in the path, else `Authorization: Bearer`, else `x-api-key`."""
    if key := request.match_info.get("key"):
        return key
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return request.headers.get("x-api-key") or None


def admin_key(run_dir: Path) -> str:
    """Read RUN_DIR/admin.key, or make it (mode 600) when nobody did yet. Raises ConfigError."""
    path, fresh = run_dir / "admin.key", run_dir / f".admin.key.{os.getpid()}"
    try:
        if not path.exists():
            fresh.unlink(missing_ok=True)
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as f:
                f.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
            with contextlib.suppress(FileExistsError):  # somebody was faster: theirs is the key
                os.link(fresh, path)
            fresh.unlink()
        key = path.read_text().strip()
    except OSError as e:
        raise ConfigError(f"cannot use {path}: {e}") from e
    if not key:
        raise ConfigError(f"{path} is empty; delete it, and a new key is made")
    return key
