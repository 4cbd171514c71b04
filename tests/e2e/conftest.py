"""Fixtures of the tests that start real engines: a blank model, and a proof that nothing is left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tree import descendants, left_of


@pytest.fixture(scope="session")
def examples() -> Iterator[Path]:
    """Folder of the examples, importable while the tests run."""
    folder = Path(__file__).parents[2] / "examples" / "agents"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def blank_model(tmp_path_factory, examples) -> Path:
    """The quick start's model without its warm start: same tokenizer and shape, random weights."""
    from small_model.warm_start import RECIPE, blank

    return blank(tmp_path_factory.mktemp("model") / "blank", RECIPE, seed=0)


@pytest.fixture
def nothing_left():
    """After the test, no process that it started may live."""
    before = descendants(os.getpid())
    yield
    assert not left_of(descendants(os.getpid()) - before, within_s=15)
