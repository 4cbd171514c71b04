"""Tasks: read, checked with the line and the value, and ordered by the seed."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.dataset import load, load_both, overlap, passes, remarks, split
from areal_agent.errors import ConfigError

TASKS = [{"q": i} for i in range(10)]


@pytest.mark.parametrize("kind", ["list", "generator", "tuple", "jsonl", "json", "str path"])
def test_every_form_gives_the_same_tasks(tmp_path, kind):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, TASKS)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(TASKS))
    source = {
        "list": TASKS,
        "generator": (t for t in TASKS),
        "tuple": tuple(TASKS),
        "jsonl": tmp_path / "a.jsonl",
        "json": tmp_path / "a.json",
        "str path": str(tmp_path / "a.jsonl"),
    }[kind]
    assert [i.task for i in load(source)] == TASKS


def test_a_missing_parquet_reader_or_file_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"pyarrow|cannot read"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, r"no dataset: pass dataset="),
        ([], "the dataset is empty"),
        (3, "the dataset is a int"),
        ({"q": 1}, "the dataset is a dict; it must be a list"),
        (
            [{"q": 1}, "what is 2+2?"],
            r"item 1: a task must be a JSON object, this one is a str: what is 2\+2\?",
        ),
        ([{"q": 1}, {"q": {1, 2}}], "item 1: a task must be plain JSON"),
        ([{"q": float("nan")}], "item 0: a task must be plain JSON"),
        ("nowhere.jsonl", "cannot read the dataset nowhere.jsonl: .*No such file"),
        ("x.csv", "cannot tell|cannot read"),
    ],
)
def test_bad_input_is_a_sentence(source, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(source)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '{"q": 1}\n[1, 2]\n',
            r"a.jsonl, line 2: a task must be a JSON object, this one is a list: \[1, 2\]",
        ),
        ('{"q": 1}\n\n{"q": \n', r"a.jsonl, line 3 is not JSON"),
        ("", "the dataset is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, sentence):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load(path)


@given(n=st.integers(1, 30), seed=st.integers(0, 5))
def test_each_pass_is_a_fresh_permutation_that_follows_from_the_seed(n, seed):
    items = load([{"q": i} for i in range(n)])
    order = list(itertools.islice(passes(items, seed), 3 * n))
    assert order == list(itertools.islice(passes(items, seed), 3 * n))
    for p in range(3):
        assert sorted(i.task["q"] for i in order[p * n : (p + 1) * n]) == list(range(n))
    if n > 10:
        assert order[:n] != order[n : 2 * n] != order[2 * n :]
        assert order != list(itertools.islice(passes(items, seed + 1), 3 * n))


@given(n=st.integers(2, 200), fraction=st.floats(0.05, 0.95), seed=st.integers(0, 5))
def test_a_split_shares_nothing_and_loses_nothing(n, fraction, seed):
    items = load([{"q": i} for i in range(n)])
    if not 0 < round(n * fraction) < n:
        with pytest.raises(ConfigError, match="leaves one side empty"):
            split(items, fraction, seed)
        return
    training, held = split(items, fraction, seed)
    assert len(held) == round(n * fraction)
    assert sorted(i.task["q"] for i in training + held) == list(range(n))
    assert (training, held) == split(items, fraction, seed)


def test_held_out_tasks_are_given_or_split_off():
    assert [len(x) for x in load_both(TASKS, TASKS[:3], 0)] == [10, 3]
    assert [len(x) for x in load_both(TASKS, 0.2, 0)] == [8, 2]
    assert [len(x) for x in load_both(TASKS, None, 0)] == [10, 0]
    with pytest.raises(ConfigError, match="between 0 and 1"):
        load_both(TASKS, 1.5, 0)


def test_shared_tasks_are_counted_and_remarked():
    a, b = load(TASKS), load([{"q": 3}, {"q": 99}])
    assert overlap(a, b) == 1
    assert any("1 of 2 held-out tasks are also training tasks" in r for r in remarks(a, b))
    assert any("no eval_dataset" in r for r in remarks(a, []))
    assert list(remarks(a, load([{"q": 99}]))) == []
