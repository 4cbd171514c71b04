"""The tasks: read, checked, and put in order.

Invariant: every task is a JSON object, and each pass over the data set is a fresh permutation that
follows from the seed and the number of the pass alone.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.errors import ConfigError

Task = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """A task and the id it goes by in the ledger."""

    task_id: str
    task: Task


def load(source: Any, what: str = "dataset") -> list[Item]:
    """A list or other finite iterable of JSON objects, or a path to .jsonl, .json or .parquet.

    Args:
        what: how the error's sentence calls it.

    Raises:
        ConfigError: nothing given, empty, unreadable, or a task that is no JSON object (it names which).
    """
    if source is None:
        raise ConfigError(
            f"no {what}: pass {what}=[...] (JSON objects, one a task), or a path to a .jsonl file of them"
        )
    if isinstance(source, (str, Path)):
        rows, where = _read(Path(source), what), f"{source}, line"
    elif isinstance(source, Iterable) and not isinstance(source, (dict, bytes)):
        rows, where = list(enumerate(source)), f"{what}, item"
    else:
        raise ConfigError(
            f"the {what} is a {type(source).__name__}; it must be a list of JSON objects or a path to a file of them"
        )
    items = []
    for number, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(
                f"{where} {number}: a task must be a JSON object, this one is a {type(row).__name__}: {_short(row)}"
            )
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as e:
            raise ConfigError(
                f"{where} {number}: a task must be plain JSON, this one is not ({e}): {_short(row)}"
            ) from None
        items.append(row)
    if not items:
        raise ConfigError(
            f"the {what} is empty ({source if isinstance(source, (str, Path)) else 'no items'})"
        )
    return [Item(str(i), row) for i, row in enumerate(items)]


def split(items: Sequence[Item], fraction: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(training, held-out): a stated fraction is held out, chosen by the seed, at least one task each."""
    if not 0 < fraction < 1:
        raise ConfigError(f"eval_dataset={fraction}: a fraction to hold out lies between 0 and 1")
    order = list(items)
    random.Random(f"split {seed}").shuffle(order)
    held = round(len(order) * fraction)
    if not 0 < held < len(order):
        raise ConfigError(f"eval_dataset={fraction} of {len(order)} tasks leaves one side empty")
    return order[held:], order[:held]


def load_both(dataset: Any, eval_dataset: Any, seed: int) -> tuple[list[Item], list[Item]]:
    """(training, held-out). `eval_dataset`: like `dataset`, or a fraction to split off, or None (no held-out)."""
    training = load(dataset)
    if eval_dataset is None:
        return training, []
    if isinstance(eval_dataset, float):
        return split(training, eval_dataset, seed)
    return training, load(eval_dataset, "eval_dataset")


def overlap(training: Iterable[Item], held_out: Iterable[Item]) -> int:
    """How many held-out tasks are also training tasks, word for word."""
    seen = {_digest(i.task) for i in training}
    return sum(_digest(i.task) in seen for i in held_out)


def remarks(training: Sequence[Item], held_out: Sequence[Item]) -> Iterator[str]:
    """What the user should know of the two sets before numbers are read off them."""
    if not held_out:
        yield "no eval_dataset: reward_before and reward_after will be empty (eval_dataset=0.1 splits a tenth off)"
    shared = overlap(training, held_out)
    if shared:
        yield (
            f"{shared} of {len(held_out)} held-out tasks are also training tasks, word for word: "
            "reward_after will say more of memory than of skill"
        )


def passes(items: Sequence[Item], seed: int) -> Iterator[Item]:
    """The tasks for ever: pass after pass, each in a new order."""
    number = 0
    while True:
        order = list(items)
        random.Random(f"pass {seed} {number}").shuffle(order)
        yield from order
        number += 1


def _read(path: Path, what: str) -> list[tuple[int, Any]]:
    try:
        if path.suffix == ".parquet":
            return list(enumerate(_read_parquet(path), 1))
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the {what} {path}: {e}") from e
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as e:
            raise ConfigError(f"{path} is not JSON: {e}") from e
        if not isinstance(rows, list):
            raise ConfigError(f"{path} holds a {type(rows).__name__}; it must be a list of JSON objects")
        return list(enumerate(rows, 1))
    if path.suffix != ".jsonl":
        raise ConfigError(f"cannot tell what {path} holds; a {what} is a .jsonl, .json or .parquet file")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except ValueError as e:
                raise ConfigError(f"{path}, line {number} is not JSON ({e}): {_short(line)}") from e
    return rows


def _read_parquet(path: Path) -> list[Any]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as e:
        raise ConfigError(
            f"reading {path} needs pyarrow: pip install pyarrow, or convert it to .jsonl"
        ) from e
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as e:  # pyarrow's own errors derive from ValueError
        raise ConfigError(f"cannot read {path}: {e}") from e


def _digest(task: Task) -> bytes:
    return hashlib.blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=16).digest()


def _short(value: Any, most: int = 100) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
