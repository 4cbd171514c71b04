"""Signs of life for a lease: it is renewed while its batch is trained, however long that takes.

Invariant: a lease ends early only where its trainer stopped, not where a step was slow.
"""

from __future__ import annotations

import threading

from areal_agent.errors import GatewayError
from areal_trainers.client import TrainerClient

BEATS = 3
"""Renewals within one `lease_s`: two may be lost, and a lost one costs nothing."""


class Heartbeat:
    """Renews one lease from a thread of its own until it is stopped, or the gateway says the lease is gone."""

    def __init__(self, client: TrainerClient, lease_id: str, lease_s: float) -> None:
        self._client, self._lease_id, self._lease_s = client, lease_id, lease_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"renew {lease_id}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns once no renewal is under way."""
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(self._lease_s / BEATS):
            try:
                self._client.renew(self._lease_id, self._lease_s)
            except GatewayError as e:
                print(f"areal_trainers: lease {self._lease_id} was not renewed: {e}", flush=True)
                if e.status in (404, 409):  # the ack will fail, and say why to whoever waits for it
                    return
