"""The gateway client: what it asks, and the sentence for everything that can go wrong."""

from __future__ import annotations

import httpx
import pytest

from areal_agent import wire
from areal_agent.errors import GatewayError
from areal_agent.trajectory import Batch
from areal_trainers import client as module
from areal_trainers.client import TrainerClient


def client_of(answer) -> TrainerClient:
    return TrainerClient("http://gateway", "key", transport=httpx.MockTransport(answer))


def test_a_lease_is_the_blob_and_carries_the_admin_key() -> None:
    blob = wire.pack(Batch("l", 3))

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        assert request.url.path == "/admin/trajectories/lease"
        return httpx.Response(200, content=blob, headers={"content-type": wire.MEDIA_TYPE})

    assert client_of(answer).lease(groups=2, max_staleness=1, wait_s=1, lease_s=9) == blob


def test_no_batch_yet_is_none() -> None:
    assert (
        client_of(lambda _: httpx.Response(204)).lease(groups=1, max_staleness=0, wait_s=0, lease_s=1) is None
    )


def test_a_refusal_carries_status_code_and_message() -> None:
    refusal = {"error": {"message": "lease l expired", "code": "lease_expired"}}
    with pytest.raises(GatewayError, match="refused /admin/trajectories/ack with 409: lease l expired") as e:
        client_of(lambda _: httpx.Response(409, json=refusal)).ack("l")
    assert (e.value.status, e.value.code) == (409, "lease_expired")


def test_a_refusal_that_is_no_json_is_still_a_sentence() -> None:
    with pytest.raises(GatewayError, match="502: bad gateway"):
        client_of(lambda _: httpx.Response(502, text="bad gateway")).nack("l")


def test_a_stranger_at_the_url_is_told_from_a_gateway() -> None:
    with pytest.raises(GatewayError, match="answered a lease with text/html"):
        client_of(lambda _: httpx.Response(200, html="<p>hello")).lease(
            groups=1, max_staleness=0, wait_s=0, lease_s=1
        )


def test_a_gateway_that_cannot_be_reached_is_tried_again_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.3)
    tries = []

    def refuse(request: httpx.Request) -> httpx.Response:
        tries.append(request)
        raise httpx.ConnectError("connection refused", request=request)

    with pytest.raises(GatewayError, match="no gateway answers at http://gateway"):
        client_of(refuse).ack("l")
    assert len(tries) >= 2


def test_a_request_that_may_have_arrived_is_not_repeated() -> None:
    tries = []

    def lost(request: httpx.Request) -> httpx.Response:
        tries.append(request)
        raise httpx.ReadTimeout("nothing came", request=request)

    with pytest.raises(GatewayError, match="got no answer") as e:
        client_of(lost).metrics(1, {})
    assert e.value.code == "no_answer"
    assert len(tries) == 1
