"""Leased batches, the same on every rank. At most one lease is held, and it is acked or given back."""

from __future__ import annotations

import time

from areal_agent import wire
from areal_agent.config import RunConfig
from areal_agent.errors import GatewayError, TrainerError
from areal_agent.trajectory import Batch
from areal_trainers.client import POLL_S, TrainerClient
from areal_trainers.ranks import Ranks


class BatchSource:
    """Rank 0 leases from the gateway; the others get its bytes.

    Args:
        client: of rank 0; None on the other ranks.
    """

    def __init__(self, client: TrainerClient | None, ranks: Ranks, config: RunConfig) -> None:
        self._client, self._ranks, self._config = client, ranks, config
        self.lease_id: str | None = None

    def next(self) -> Batch:
        """Wait for the next batch. Raises TrainerError when none came within `trainer.wait_s`."""
        wait_s = self._config.trainer.wait_s
        end = time.monotonic() + wait_s
        # An empty message tells the other ranks that rank 0 still waits, within their own deadline.
        while not (blob := self._ranks.broadcast_bytes(self._poll(end))):
            if self._ranks.max([float(self._ranks.first and time.monotonic() >= end)])[0]:
                raise TrainerError(
                    f"no batch of {self._config.rollout.groups_per_step} groups became ready within "
                    f"trainer.wait_s = {wait_s:g} s; is the controller still running sessions? "
                    "`areal-agent status` and logs/gateway.log say what the groups wait for"
                )
        batch = wire.unpack(blob)
        self.lease_id = batch.lease_id
        return batch

    def _poll(self, end: float) -> bytes | None:
        if self._client is None:
            return None
        blob = self._client.lease(
            groups=self._config.rollout.groups_per_step,
            max_staleness=self._config.rollout.max_staleness,
            wait_s=max(0.0, min(POLL_S, end - time.monotonic())),
            lease_s=self._config.trainer.lease_s,
        )
        return blob or b""

    def ack(self) -> None:
        """The batch was trained and its version committed."""
        lease_id, self.lease_id = self.lease_id, None
        if self._client is None or lease_id is None:
            return
        try:
            self._client.ack(lease_id)
        except GatewayError as e:
            if e.status == 409:
                raise TrainerError(
                    f"lease {lease_id} expired before it was acked, so its groups would be trained twice; "
                    f"raise trainer.lease_s (now {self._config.trainer.lease_s:g} s)"
                ) from e
            raise

    def give_back(self) -> None:
        """Nack the lease held, if any. Best effort: an unconfirmed lease comes back by itself in the end."""
        lease_id, self.lease_id = self.lease_id, None
        if self._client is not None and lease_id is not None:
            try:
                self._client.nack(lease_id)
            except GatewayError as e:
                print(f"areal_trainers: lease {lease_id} returns only when it expires: {e}", flush=True)
