"""Leased batches, the same on every rank.

Invariant: at most one lease is held; it is renewed while it is held, and acked or given back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from areal_agent import wire
from areal_agent.config import RunConfig
from areal_agent.errors import GatewayError, TrainerError, WeightUpdateError
from areal_agent.trajectory import Batch
from areal_trainers.client import POLL_S, TrainerClient
from areal_trainers.heartbeat import Heartbeat
from areal_trainers.ranks import Ranks


class BatchSource:
    """Rank 0 leases from the gateway; the others get its bytes.

    Args:
        client: of rank 0; None on the other ranks.
        stop: where this file is, no further batch is taken (see `RunDir.stop_path`).
    """

    def __init__(
        self, client: TrainerClient | None, ranks: Ranks, config: RunConfig, stop: Path | None = None
    ) -> None:
        self._client, self._ranks, self._config, self._stop = client, ranks, config, stop
        self.lease_id: str | None = None
        self._heartbeat: Heartbeat | None = None

    def rewind(self, version: int) -> None:
        """The trainer stands at `version`: what was leased since comes again, in the same order."""
        if self._client is not None and (batches := self._client.rewind(version)):
            print(
                f"areal_trainers: {batches} batches were leased at version {version} or later; they are trained again",
                flush=True,
            )

    def next(self, version: int, repush: Callable[[int], object]) -> Batch | None:
        """Wait for the next batch; None when the run was asked to stop.

        Raises TrainerError when none came within `trainer.wait_s`. An online run has no such limit: how busy a
        service is says nothing of the run's health.
        Engines that all restarted wait for the current `version`, and no batch becomes ready without them:
        every rank then calls `repush(version)`.
        """
        wait_s = math.inf if self._config.online.enabled else self._config.trainer.wait_s
        end = time.monotonic() + wait_s
        # An empty message tells the other ranks that rank 0 still waits, within their own deadline.
        while not (blob := self._ranks.broadcast_bytes(self._poll(end))):
            stopped, late, needed = self._ranks.max(self._signs(end))
            if stopped:
                return None
            if late:
                raise TrainerError(
                    f"no batch of {self._config.rollout.groups_per_step} groups became ready within "
                    f"trainer.wait_s = {wait_s:g} s; is the controller still running sessions? "
                    "logs/gateway.log and GET /admin/status of the gateway say what the groups wait for"
                )
            if needed:
                self._push_again(version, repush)
        batch = wire.unpack(blob)
        self.lease_id = batch.lease_id
        if self._client is not None:
            self._heartbeat = Heartbeat(self._client, batch.lease_id, self._config.trainer.lease_s)
        return batch

    def _poll(self, end: float) -> bytes | None:
        if self._client is None:
            return None
        if self._stopped:
            return b""
        blob = self._client.lease(
            groups=self._config.rollout.groups_per_step,
            max_staleness=self._config.rollout.max_staleness,
            wait_s=max(0.0, min(POLL_S, end - time.monotonic())),
            lease_s=self._config.trainer.lease_s,
        )
        return blob or b""

    @property
    def _stopped(self) -> bool:
        return self._stop is not None and self._stop.exists()

    def _signs(self, end: float) -> list[float]:
        """[was it stopped, is it too late, do the engines need weights], as rank 0 knows."""
        if self._client is None:
            return [0.0, 0.0, 0.0]
        late = time.monotonic() >= end
        return [float(self._stopped), float(late), float(self._client.needs_weights())]

    def _push_again(self, version: int, repush: Callable[[int], object]) -> None:
        said = f"an engine waits for version {version}: pushing it again"
        try:
            repush(version)
        except WeightUpdateError as e:  # every rank's; an engine may have crashed again and will be back
            said += f" failed, the next poll sees whether it is still needed: {e}"
        if self._ranks.first:
            print(f"areal_trainers: {said}", flush=True)

    def ack(self) -> None:
        """The batch was trained and its version committed.

        Until the gateway has said so the lease counts as held: a state written meanwhile would lack nothing, and
        the batch would be trained again from it.
        """
        lease_id = self.lease_id
        self._still()
        if self._client is None or lease_id is None:
            self.lease_id = None  # rank 0 speaks for the others
            return
        try:
            self._client.ack(lease_id)
        except GatewayError as e:
            if e.status == 409:
                raise GatewayError(  # no TrainerError: those are raised by every rank together
                    f"lease {lease_id} ended before it was acked, so its groups would be trained twice: the "
                    f"gateway heard nothing of this trainer for trainer.lease_s = {self._config.trainer.lease_s:g} s, "
                    "or another trainer resumed this run; `--resume` goes on from the last checkpoint",
                    status=e.status,
                    code=e.code,
                ) from e
            raise
        self.lease_id = None

    def give_back(self) -> None:
        """Nack the lease held, if any. Best effort: an unconfirmed lease comes back by itself in the end."""
        lease_id = self._release()
        if self._client is not None and lease_id is not None:
            try:
                self._client.nack(lease_id)
            except GatewayError as e:
                print(f"areal_trainers: lease {lease_id} returns only when it expires: {e}", flush=True)

    def _release(self) -> str | None:
        """The lease held until now; it is renewed no more."""
        self._still()
        lease_id, self.lease_id = self.lease_id, None
        return lease_id

    def _still(self) -> None:
        """Renew the lease no more."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
