"""Keys in files: private, whole, and one for everybody."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_agent.errors import ConfigError
from areal_agent.keyfile import shared_key


def test_it_is_made_once_private_and_leaves_nothing_else(tmp_path: Path) -> None:
    key = shared_key(tmp_path / "admin.key")
    assert len(key) >= 32
    assert shared_key(tmp_path / "admin.key") == key
    assert (tmp_path / "admin.key").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["admin.key"]


def test_all_who_ask_first_at_once_get_the_same_whole_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for i in range(50):
            keys = set(pool.map(shared_key, [tmp_path / f"{i}.key"] * 16))
            assert len(keys) == 1
            assert len(keys.pop()) >= 32


def test_an_empty_or_unreadable_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.key").write_text("\n")
    with pytest.raises(ConfigError, match="is empty; delete it"):
        shared_key(tmp_path / "a.key")
    with pytest.raises(ConfigError, match="cannot use the key file"):
        shared_key(tmp_path / "no" / "folder.key")
