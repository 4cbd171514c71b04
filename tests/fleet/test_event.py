"""What engines write in an event, with and without the values that some leave out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gateway.fleet.event import COMPLETIONS, GENERATE, reader
from areal_gateway.fleet.replies import _piece


def piece(path: str, top: int, *choices: dict[str, Any]) -> Any:
    batch = [*(orjson.dumps({"choices": [c]}) for c in choices), b"[DONE]"]
    found, fault = _piece("http://engine", reader(path, top=bool(top)), batch, 0, top)
    if fault is not None:
        raise fault
    return found


def generated(ids: list[int], *entries: Any) -> dict[str, Any]:
    return {"token_ids": ids, "logprobs": {"content": list(entries)}}


def completed(ids: list[int], values: list[Any], top: list[Any] | None = None) -> dict[str, Any]:
    return {"token_ids": ids, "logprobs": {"token_logprobs": values, "top_logprobs": top}}


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize(
    ("path", "choice", "logprobs"),
    [
        (GENERATE, generated([7], {"token_id": 7, "logprob": -0.5}), [-0.5]),
        (GENERATE, generated([7], {"token_id": 8, "logprob": -0.5}), [None]),
        (GENERATE, generated([7], {"token_id": 7, "logprob": None}), [None]),
        (GENERATE, generated([7], {"token_id": 7, "logprob": -9999.0}), [None]),
        (GENERATE, generated([7], None), [None]),
        (GENERATE, generated([7, 8], {"token_id": 7, "logprob": -0.5}), [None, None]),
        (GENERATE, {"token_ids": [7], "logprobs": None}, [None]),
        (COMPLETIONS, completed([7, 8], [-0.5, None]), [-0.5, None]),
        (COMPLETIONS, completed([7], [None], [{"token_id:7": None}]), [None]),
        (COMPLETIONS, completed([7], [-0.5], [None]), [-0.5]),
    ],
)
def test_a_token_has_its_own_logprob_or_none(
    path: str, choice: dict[str, Any], logprobs: list[float | None], top: int
) -> None:
    found = piece(path, top, choice)
    assert found.token_ids == choice["token_ids"]
    assert found.logprobs == logprobs


def test_the_likeliest_are_those_that_were_told() -> None:
    likely = [
        {"token_id": 1, "logprob": -2.0},
        {"token_id": 2, "logprob": None},
        {"token_id": 3, "logprob": -1.0},
    ]
    said = {"token_id": 1, "logprob": -2.0, "top_logprobs": likely}
    assert piece(GENERATE, 2, generated([1], said)).top == [[(3, -1.0), (1, -2.0)]]
    columns = [{"token_id:1": -2.0, "token_id:2": None, "token_id:3": -1.0, "token_id:4": -9999.0}]
    assert piece(COMPLETIONS, 2, completed([1], [-2.0], columns)).top == [[(3, -1.0), (1, -2.0)]]


def test_what_comes_at_once_is_one_piece_and_its_end_is_the_last_ones() -> None:
    last = generated([9], {"token_id": 9, "logprob": -1.0}) | {
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    found = piece(GENERATE, 0, generated([7], {"token_id": 7, "logprob": -0.5}), last)
    assert (found.token_ids, found.logprobs, found.finish_reason) == ([7, 9], [-0.5, -1.0], "stop")
    assert found.weight_versions == [{"version": "3", "start": 0, "end": 2}]


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 5),
                st.none() | st.floats(-10_000, 0.5) | st.sampled_from([-9999.0, 1e308]),
                st.sampled_from(["own", "own", "own", "own", "other", "none"]),
            ),
            max_size=4,
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_of_any_events_each_token_keeps_its_place(
    events: list[list[tuple[int, float | None, str]]], columns: bool
) -> None:
    """Whatever one of several events leaves out is left out of its own tokens only."""
    choices: list[dict[str, Any]] = []
    wanted: list[float | None] = []
    for event in events:
        ids = [t for t, _, _ in event]
        said = [{"own": t, "other": t + 9, "none": None}[how] for t, _, how in event]
        fits = [p if p is not None and p > -9999.0 else None for _, p, _ in event]
        if columns:
            choices.append(completed(ids, [p for _, p, _ in event]))
            wanted += fits
        else:
            entries = [
                None if s is None else {"token_id": s, "logprob": p}
                for s, (_, p, _) in zip(said, event, strict=True)
            ]
            choices.append(generated(ids, *entries))
            wanted += [p if how == "own" else None for p, (_, _, how) in zip(fits, event, strict=True)]
    found = piece(COMPLETIONS if columns else GENERATE, 0, *choices)
    if not choices:
        assert found is None
        return
    assert found.token_ids == [t for event in events for t, _, _ in event]
    assert found.logprobs == wanted


@pytest.mark.parametrize(
    "broken", [[b"{"], [b'{"choices": [', b"]}"], [b'{"choices": []}, {"choices": []}'], [b""]]
)
def test_what_cannot_be_read_is_an_error_after_what_can(broken: list[bytes]) -> None:
    """Also where several broken events would make a whole one, or one of them several."""
    said = orjson.dumps({"choices": [generated([7], {"token_id": 7, "logprob": -0.5})]})
    found, fault = _piece("http://engine", reader(GENERATE, top=False), [said, *broken, said], 0, 0)
    assert found is not None
    assert found.token_ids == [7]
    assert "cannot be read" in str(fault)
    assert repr(broken[0]) in str(fault)
