"""What becomes of each request field, as a table: nothing is dropped without a word.

A field that is neither here nor known is ignored and named in the `x-areal-ignored` response header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from areal_agent.errors import GatewayError


class Treatment(StrEnum):
    """What the gateway does with a field. `meaning` is its sentence."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Treatment:
        self = str.__new__(cls, value)
        self._value_ = value
        self.meaning = meaning
        return self

    HONOURED = "honoured", "it does what the API says"
    PINNED = (
        "pinned",
        "the run decides, whatever the agent asks: it would change the distribution that is trained",
    )
    IGNORED = "ignored", "it has no effect here; the reply is what it would be without it"
    REFUSED = "refused", "serving the request without it would answer something else than was asked: a 400"


def _never(_: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Field:
    """One field's treatment. `neutral(value)`: this value asks for nothing, so nothing is reported."""

    treatment: Treatment
    why: str
    neutral: Callable[[Any], bool] = _never


def parts_without_effect(body: dict[str, Any], name: str, heeded: str) -> tuple[str, ...]:
    """Of a field that is an object: `name.key` of each key that is set beside the one that is heeded."""
    value = body.get(name)
    if not isinstance(value, dict):
        return ()
    return tuple(f"{name}.{key}"[:80] for key, part in value.items() if key != heeded and part is not None)


def treat(fields: dict[str, Field], body: dict[str, Any]) -> tuple[str, ...]:
    """Names of the fields that have no effect, sorted. Raises GatewayError (400) for a refused one."""
    without_effect = []
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is None:
            without_effect.append(name)
            continue
        if field.treatment is Treatment.HONOURED or field.neutral(value):
            continue
        if field.treatment is Treatment.REFUSED:
            raise GatewayError(
                f"{name} is not supported here: {field.why}", status=400, code="unsupported_field"
            )
        without_effect.append(name)
    return tuple(sorted(without_effect))
