"""The trainer's side of the gateway's admin API. Every request has a deadline; errors are GatewayError."""

from __future__ import annotations

import time
from typing import Any

import httpx

from areal_agent import wire
from areal_agent.errors import GatewayError
from areal_agent.tls import client_context
from areal_agent.weights import Manifest

CONNECT_S = 5.0
ANSWER_S = 15.0
"""Beyond what a request itself may wait for."""

POLL_S = 10.0
"""Longest one lease request is held open; between two of them ranks exchange signs of life."""

REWIND_S = 120.0
"""The gateway reads its whole list of leases."""

PROBE_S = 60.0
"""Engines answer a probe between the calls they are at; the gateway's own deadline is shorter."""

UNREACHABLE_S = 30.0
"""A gateway that cannot be reached for this long is gone."""


class TrainerClient:
    """Lease, ack, nack, metrics and weights, of one gateway.

    Args:
        url: `http://HOST:PORT`.
        key: the admin key.
        transport: replaces the network in tests.
    """

    def __init__(self, url: str, key: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            # The gateway may close a connection that idled through a long step: keep none that old.
            limits=httpx.Limits(max_connections=4, keepalive_expiry=2.0),
            transport=transport,
            verify=client_context(self.url),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    # trajectories

    def lease(self, *, groups: int, max_staleness: int | None, wait_s: float, lease_s: float) -> bytes | None:
        """One long poll: a packed batch, or None when no batch was ready within `wait_s`."""
        body = {"groups": groups, "max_staleness": max_staleness, "wait_s": wait_s, "lease_s": lease_s}
        response = self._post("/admin/trajectories/lease", body, wait_s + ANSWER_S)
        if response.status_code == 204:
            return None
        kind = response.headers.get("content-type", "").split(";")[0]
        if kind != wire.MEDIA_TYPE:
            raise GatewayError(
                f"{self.url} answered a lease with {kind or 'no type'}; expected {wire.MEDIA_TYPE}"
            )
        return response.content

    def ack(self, lease_id: str) -> None:
        """Confirm that the lease was trained. Raises GatewayError (409) when it had expired."""
        self._post("/admin/trajectories/ack", {"lease_id": lease_id}, ANSWER_S)

    def nack(self, lease_id: str) -> None:
        """Give the lease back at once."""
        self._post("/admin/trajectories/nack", {"lease_id": lease_id}, ANSWER_S)

    def renew(self, lease_id: str, lease_s: float) -> None:
        """Hold the lease for `lease_s` from now. Raises GatewayError (409) when it has ended."""
        self._post("/admin/trajectories/renew", {"lease_id": lease_id, "lease_s": lease_s}, ANSWER_S)

    def rewind(self, version: int) -> int:
        """Have the batches leased at `version` or later given out again; how many there are."""
        body = {"version": version}
        return int(self._json(self._post("/admin/trajectories/rewind", body, REWIND_S))["batches"])

    def metrics(self, step: int, numbers: dict[str, float]) -> None:
        self._post("/admin/metrics", {"step": step, **numbers}, ANSWER_S)

    def needs_weights(self) -> bool:
        """Whether an engine waits for the weights of the current version: it joined or came back since."""
        fleet = self._json(self._request("GET", "/admin/status", None, ANSWER_S)).get("fleet") or {}
        return bool(fleet.get("needs_weights"))

    # weights

    def begin(
        self,
        *,
        version: int,
        manifest: Manifest,
        store: dict[str, Any],
        backend: str,
        force: bool,
        timeout_s: float,
    ) -> dict[str, Any]:
        """-> {update_id, epoch, world_size, join}"""
        body = {
            "version": version,
            "manifest": manifest.model_dump(mode="json"),
            "store": store,
            "backend": backend,
            "force": force,
        }
        return self._json(self._post("/admin/weights/begin", body, timeout_s))

    def commit(self, update_id: str, checksums: list[str], timeout_s: float) -> dict[str, Any]:
        """-> {version, pause_s, receive_s, load_s, engines}. May be repeated: the answer is the same."""
        body = {"update_id": update_id, "checksums": checksums}
        return self._json(self._post("/admin/weights/commit", body, timeout_s))

    def abort(self, update_id: str, reason: str) -> None:
        self._post("/admin/weights/abort", {"update_id": update_id, "reason": reason}, ANSWER_S)

    def probe(self, prompts: list[list[int]], max_tokens: int, temperature: float) -> list[dict[str, Any]]:
        """Sampled tokens of every engine -> [{engine, prompt_ids, token_ids, logprobs, versions}]"""
        body = {"prompts": prompts, "max_tokens": max_tokens, "temperature": temperature}
        return self._json(self._post("/admin/weights/probe", body, PROBE_S + ANSWER_S))["replies"]

    # requests

    def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> httpx.Response:
        return self._request("POST", path, body, timeout_s)

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> httpx.Response:
        """Retries only where the request cannot have arrived. Raises GatewayError."""
        give_up = time.monotonic() + UNREACHABLE_S
        pause = 0.1
        while True:
            try:
                timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
                response = self._http.request(method, path, json=body, timeout=timeout)
                break
            except (httpx.ConnectError, httpx.ConnectTimeout) as e:
                if time.monotonic() > give_up:
                    raise GatewayError(
                        f"no gateway answers at {self.url} ({e}); is its process alive? See logs/gateway.log"
                    ) from e
                time.sleep(pause)
                pause = min(2.0, pause * 2)
            except httpx.HTTPError as e:
                raise GatewayError(
                    f"{method} {path} of {self.url} got no answer ({type(e).__name__}: {e}); see logs/gateway.log",
                    code="no_answer",
                ) from e
        if response.status_code >= 400:
            raise _refusal(path, response)
        return response

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            value = response.json()
        except ValueError as e:
            raise GatewayError(f"{response.url} answered with something that is no JSON: {e}") from e
        if not isinstance(value, dict):
            raise GatewayError(f"{response.url} answered with a {type(value).__name__}, not an object")
        return value


def _refusal(path: str, response: httpx.Response) -> GatewayError:
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError):
        message, code = response.text[:300] or "no message", ""
    return GatewayError(
        f"the gateway refused {path} with {response.status_code}: {message}",
        status=response.status_code,
        code=code,
    )
