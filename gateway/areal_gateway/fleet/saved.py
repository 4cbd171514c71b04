"""The current weights on disk: an engine that comes up late gets them without the trainer.

Invariant: an engine is let serve the fleet's version only after it loaded exactly what the engines committed
(the same checksums) and reads that version back. One that fails on the way is taken out; calls of the others
do not notice. An update that begins meanwhile goes first, and takes the newcomer in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_agent.config import WeightsConfig
from areal_agent.errors import EngineError
from areal_agent.weights import Manifest
from areal_gateway.fleet.member import Member

if TYPE_CHECKING:
    from areal_gateway.fleet.fleet import Fleet

POLL_S = 0.05


@dataclass(frozen=True)
class _Saved:
    version: int
    folder: str
    manifest: Manifest
    checksums: list[str]


class SavedWeights:
    """Remembers where the last committed version lies, and gives it to engines that lack it."""

    def __init__(self, fleet: Fleet, config: WeightsConfig, next_epoch: Callable[[], int]) -> None:
        self._fleet, self._config, self._next_epoch = fleet, config, next_epoch
        self._saved: _Saved | None = None
        self._giving: dict[Member, asyncio.Task[None]] = {}
        self._loading: set[Member] = set()

    def remember(self, version: int, saved: tuple[str, Manifest] | None, checksums: list[str]) -> None:
        """`saved` is (folder, layout) of a version that was committed; None forgets the one before."""
        self._saved = _Saved(version, *saved, checksums) if saved is not None else None

    def has(self, version: int) -> bool:
        """Whether engines get `version` from here."""
        return self._saved is not None and self._saved.version == version

    def offer(self) -> None:
        """Start giving the current version to every engine that waits for it, where that can be done."""
        saved = self._saved
        if saved is None or saved.version != self._fleet.version or self._fleet.weights.busy:
            return
        for member in self._fleet.members:
            if member.ready and member.version != saved.version and member not in self._giving:
                task = self._giving[member] = asyncio.create_task(self._give(member, saved))
                task.add_done_callback(lambda _, m=member: self._giving.pop(m, None))

    async def stop(self) -> None:
        """Break off what is still being read, and wait for what is being loaded."""
        for member, task in self._giving.items():
            if member not in self._loading:
                task.cancel()
        if self._giving:
            await asyncio.wait(list(self._giving.values()))

    async def _give(self, member: Member, saved: _Saved) -> None:
        fleet = self._fleet
        try:
            await self._stage(member, saved)
            self._loading.add(member)
            try:
                await self._load(member, saved.version)
            finally:
                self._loading.discard(member)
        except EngineError as e:
            fleet.quarantine(member, f"cannot take version {saved.version} from disk: {e}")
            return
        fleet.emit_weights(state="given", version=saved.version, engine=member.id)
        fleet.serve_current()

    async def _stage(self, member: Member, saved: _Saved) -> None:
        limit, end = self._config.pause_timeout_s, time.monotonic() + self._config.transfer_timeout_s
        arg = {"epoch": self._next_epoch(), "version": saved.version, "folder": saved.folder}
        arg["manifest"] = saved.manifest.model_dump(mode="json")
        await member.client.rpc("areal_stage", arg, limit)
        while True:
            workers = await member.client.rpc("areal_status", {}, limit)
            if broken := [w for w in workers if w["phase"] in ("failed", "idle")]:
                raise EngineError(f"reading {broken[0]['phase']}: {broken[0]['error']}")
            if all(w["phase"] == "received" and w["epoch"] == arg["epoch"] for w in workers):
                if any(w["checksums"] != saved.checksums for w in workers):
                    raise EngineError(f"{saved.folder} does not hold what the engines committed")
                return
            if time.monotonic() > end:
                raise EngineError(f"not read in {self._config.transfer_timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def _load(self, member: Member, version: int) -> None:
        limit = self._config.pause_timeout_s
        await member.client.suspend(limit)
        await member.client.rpc("areal_load", {"version": version}, limit)
        await member.client.stamp(version, limit)
        await member.client.resume(limit)
        member.version, member.tainted = version, False
