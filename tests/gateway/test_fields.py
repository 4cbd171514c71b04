"""The tables of request fields: every dialect has one, it covers its SDK, and the page is made of it."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import MessageCountTokensParams, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import InputTokenCountParams, response_create_params

from areal_gateway.dialects import COUNTERS, DIALECTS
from areal_gateway.dialects.document import page
from areal_gateway.dialects.fields import Treatment

PAGE = Path(__file__).parents[2] / "docs" / "gateway_fields.md"

SDK_PARAMS: dict[str, Any] = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParamsStreaming,
    "/v1/completions": completion_create_params.CompletionCreateParamsStreaming,
    "/v1/responses": response_create_params.ResponseCreateParamsStreaming,
    "/v1/responses/input_tokens": InputTokenCountParams,
    "/v1/messages": message_create_params.MessageCreateParamsStreaming,
    "/v1/messages/count_tokens": MessageCountTokensParams,
}
TABLES = {path: row.fields for path, row in (*DIALECTS.items(), *COUNTERS.items())}


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m areal_gateway.dialects.document docs/gateway_fields.md"


@pytest.mark.parametrize("path", TABLES)
def test_every_field_of_the_sdk_has_a_row(path: str) -> None:
    params = SDK_PARAMS[path]
    known = {name for base in (params, *params.__orig_bases__) for name in _names(base)}
    assert known - set(TABLES[path]) == set()


def _names(params: Any) -> set[str]:
    return set(typing.get_type_hints(params)) if hasattr(params, "__annotations__") else set()


@pytest.mark.parametrize("path", TABLES)
def test_every_row_has_its_sentence(path: str) -> None:
    for name, field in TABLES[path].items():
        assert isinstance(field.treatment, Treatment)
        assert field.why, name
        assert "|" not in field.why, "it would break the page's table"
