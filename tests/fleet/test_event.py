"""What engines write in an event, with and without the values that some leave out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from areal_gateway.fleet.event import COMPLETIONS, GENERATE, decoder
from areal_gateway.fleet.replies import _piece


def piece(path: str, top: int, *choices: dict[str, Any]) -> Any:
    batch = [*(orjson.dumps({"choices": [c]}) for c in choices), b"[DONE]"]
    found, fault = _piece("http://engine", decoder(path, top=bool(top)), batch, 0, top)
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
