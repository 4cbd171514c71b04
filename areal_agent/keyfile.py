"""Random keys in files of mode 600. Invariant: a reader sees a whole key or none, and all readers the same one,
however many processes ask for it first at once."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from areal_agent.errors import ConfigError

KEY_BYTES = 32


def shared_key(path: Path, prefix: str = "") -> str:
    """The key in `path`, made there (readable by its owner only) when nobody did yet. Raises ConfigError."""
    try:
        if not path.exists():
            _make(path, prefix + secrets.token_urlsafe(KEY_BYTES))
        key = path.read_text().strip()
    except OSError as e:
        raise ConfigError(f"cannot use the key file {path}: {e}") from e
    if not key:
        raise ConfigError(f"{path} is empty; delete it, and a new key is made")
    return key


def _make(path: Path, key: str) -> None:
    """Written whole beside it, then linked: the name appears with its contents, and only once."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as f:
            f.write(key + "\n")
        with contextlib.suppress(FileExistsError):  # somebody was faster: theirs is the key
            os.link(fresh, path)
    finally:
        fresh.unlink()
