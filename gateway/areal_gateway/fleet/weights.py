"""The weight transaction: how every engine comes to hold version v, or none does.

Invariant: after `begin` ... `commit`, every serving engine holds version v and stamps it; or none does and
generation goes on with v-1; or no engine serves and the fleet says why (`held(error)`). An engine whose
weights may be half new decodes nothing: it stays paused until it is ended. Each step has a deadline.

    serving ── begin ─→ receiving ── commit ─→ holding → paused → loading → verifying → serving
                 (in the background, calls go on)        └──── calls are frozen ────┘

Up to `loading` a failure costs nothing: the update is dropped, the next `begin` makes a new epoch (a new
private group) without the engine that broke. From `loading` on, an engine that fails is ended and started
again, and the others commit without it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from areal_agent.config import WeightsConfig
from areal_agent.errors import EngineError, WeightUpdateError
from areal_agent.weights import DISK, Manifest
from areal_gateway.fleet.member import Member, each
from areal_gateway.fleet.saved import SavedWeights
from areal_gateway.fleet.types import EngineState

if TYPE_CHECKING:
    from areal_gateway.fleet.fleet import Fleet

T = TypeVar("T")

SLACK_S = 5.0
"""Added to the transfer's deadline before a trainer that has not committed counts as dead."""

POLL_FIRST_S, POLL_MOST_S = 0.01, 0.2
"""Status polls run in the engine's main loop, between two decoding steps: few, and growing apart."""

FINISHED_REMEMBERED = 8
"""Results of past commits kept, so that a repeated commit gets the same answer."""


class WeightConflict(WeightUpdateError):
    """The update was refused before it began: another one runs, or its version does not follow."""


@dataclass(eq=False)
class _Update:
    version: int
    epoch: int
    members: list[Member]
    buckets: int
    group: tuple[Any, ...]
    catch_up: bool
    """The current version again, for engines that lack it: those that serve it go on meanwhile."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.monotonic)
    watchdog: asyncio.Task[None] | None = None
    commit: asyncio.Task[dict[str, Any]] | None = None
    dropped: str | None = None
    saved: tuple[str, Manifest] | None = None
    """Disk transport: the folder that holds it, and its layout."""


class WeightTransaction:
    """The one authority over which weights the engines hold. Methods raise WeightUpdateError.

    `phase`: serving, receiving, holding, paused, loading or verifying.
    """

    def __init__(self, fleet: Fleet, config: WeightsConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._lock = asyncio.Lock()
        self._update: _Update | None = None
        self._group: tuple[Any, ...] | None = None
        # Epochs name keys in the trainer's store, which may outlive this process: never start over.
        self._epoch = int(time.time())
        self._finished: dict[str, dict[str, Any]] = {}
        self.saved = SavedWeights(fleet, config, self._next_epoch)
        self.phase = "serving"

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    @property
    def running(self) -> bool:
        """Whether an update is between begin and its end."""
        return self._update is not None

    @property
    def busy(self) -> bool:
        """Whether an update runs or is about to begin."""
        return self._update is not None or self._lock.locked()

    async def begin(
        self,
        *,
        version: int,
        manifest: Manifest | dict[str, Any],
        store: dict[str, Any],
        backend: str,
        force: bool = False,
    ) -> dict[str, Any]:
        """Let every ready engine receive version `version` in the background.

        Args:
            store: {host, port} of the trainer's TCPStore; {folder} for disk.
            backend: gloo, nccl or hccl; or disk, where everything lies in `folder` already.
            force: allow any version, as a resumed trainer needs.

        Returns: {update_id, epoch, world_size, join}. With `join` the trainer makes the epoch's group.

        Raises:
            WeightConflict: another update runs, or the version does not follow the current one.
            WeightUpdateError: (retry) no engine took part.
        """
        manifest = manifest if isinstance(manifest, Manifest) else Manifest.model_validate(manifest)
        async with self._lock:
            if force and (old := self._update) is not None:  # its trainer is the one before this one
                await self.abort(old.id, "another trainer began an update by force")
            if self._update is not None:
                raise WeightConflict(
                    f"update to version {self._update.version} is running; commit or abort it first"
                )
            catch_up = self._check_version(version, force)
            await self.saved.stop()
            members = await self._participants(lacking=version if catch_up else None)
            size = 1 + sum(m.world_size for m in members)
            group = (*store.values(), backend, *((m.id, m.incarnation) for m in members))
            join = backend != DISK and group != self._group
            if join or backend == DISK:
                self._next_epoch()
            update = self._update = _Update(
                version, self._epoch, members, len(manifest.buckets), group, catch_up
            )
            self._group = None  # until it committed, the group is not known to be whole
            try:
                if join:
                    await self._start_join(update, store, size, backend)
                arg: dict[str, Any] = {"epoch": update.epoch, "version": version}
                arg["manifest"] = manifest.model_dump(mode="json")
                if backend == DISK:
                    method, arg["folder"] = "areal_stage", store["folder"]
                    update.saved = (store["folder"], manifest)
                else:
                    method, arg["timeout_s"] = "areal_receive", self._config.transfer_timeout_s
                limit = self._config.pause_timeout_s
                await self._must(update, lambda m: m.client.rpc(method, arg, limit), "receive")
            except BaseException as e:
                await self._drop(update, str(e) or repr(e))
                raise
            self._set_phase("receiving", update)
            deadline = self._config.join_timeout_s + self._config.transfer_timeout_s + SLACK_S
            update.watchdog = asyncio.create_task(self._expire(update, deadline))
            return {"update_id": update.id, "epoch": update.epoch, "world_size": size, "join": join}

    async def commit(self, update_id: str, checksums: list[str]) -> dict[str, Any]:
        """Load what was received, everywhere. Repeating a commit gives the same answer.

        Args:
            checksums: one per bucket, of what the trainer sent.

        Returns: {version, pause_s, receive_s, load_s, engines}: pause_s from the first pause to the last
        resume, receive_s from begin until all had everything, load_s the slowest engine's.

        Raises:
            WeightUpdateError: not committed; `retry` says whether v-1 goes on and it may be offered again.
        """
        if update_id in self._finished:
            return self._finished[update_id]
        update = self._update
        if update is None or update.id != update_id:
            raise WeightUpdateError(
                f"update {update_id} is not running: it was aborted or timed out", retry=True
            )
        if update.commit is None:
            if update.watchdog is not None:
                update.watchdog.cancel()
            update.commit = asyncio.create_task(self._commit(update, checksums))
            update.commit.add_done_callback(lambda t: t.cancelled() or t.exception())
        # The trainer may hang up; the transaction ends in its own time all the same.
        return await asyncio.shield(update.commit)

    async def abort(self, update_id: str, reason: str) -> dict[str, Any]:
        """Drop the update, if it is still being received. One that is being loaded ends by itself first."""
        update = self._update
        if update is not None and update.id == update_id:
            if update.commit is None:
                await self._drop(update, f"aborted: {reason}")
                return {"version": self._fleet.version}
            if self.phase == "receiving":
                update.dropped = f"aborted: {reason}"
                update.commit.cancel()
            await asyncio.wait([update.commit])
        return {"version": self._fleet.version}

    async def close(self) -> None:
        """Drop or finish what is running."""
        await self.saved.stop()
        update = self._update
        if update is not None:
            await self.abort(update.id, "the gateway stops")

    # begin

    def _check_version(self, version: int, force: bool) -> bool:
        """Whether it is the current version, for engines that lack it. Raises WeightConflict."""
        current = self._fleet.version
        catch_up = version == current and any(m.version != current for m in self._fleet.members)
        if not force and version != current + 1 and not catch_up:
            raise WeightConflict(f"version {version} does not follow the fleet's {current}")
        return catch_up and not force

    async def _participants(self, lacking: int | None) -> list[Member]:
        """Ready engines (that lack a version) that answer a call to the worker extension right now."""
        ready = await self._fleet.wait_ready(self._config.join_timeout_s)
        if lacking is not None:
            ready = [m for m in ready if m.version != lacking]
        answers = await each(ready, lambda m: m.client.rpc("areal_status", {}, self._config.pause_timeout_s))
        for member, answer in answers.items():
            if isinstance(answer, EngineError):
                self._fleet.quarantine(member, f"does not answer before an update: {answer}")
        members = [m for m, answer in answers.items() if not isinstance(answer, EngineError)]
        if not members:
            state = "; ".join(f"{m.id} is {m.state} ({m.reason})" for m in self._fleet.members)
            raise WeightUpdateError(f"no engine is ready for new weights: {state}", retry=True)
        return members

    async def _start_join(self, update: _Update, store: dict[str, Any], size: int, backend: str) -> None:
        offsets: dict[Member, int] = {}
        rank = 1
        for member in update.members:
            offsets[member], rank = rank, rank + member.world_size
        await self._must(
            update,
            lambda m: m.client.rpc(
                "areal_join",
                {
                    "epoch": update.epoch,
                    "store": store,
                    "world_size": size,
                    "rank_offset": offsets[m],
                    "backend": backend,
                    "timeout_s": self._config.join_timeout_s,
                },
                self._config.pause_timeout_s,
            ),
            "join",
        )

    async def _expire(self, update: _Update, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._drop(update, f"no commit came within {after_s:.0f} s: the trainer is gone or stuck")

    # commit

    async def _commit(self, update: _Update, checksums: list[str]) -> dict[str, Any]:
        fleet, limit = self._fleet, self._config.pause_timeout_s
        try:
            await self._await_received(update, checksums)
            receive_s = time.monotonic() - update.began
            if not update.catch_up:
                fleet.hold()
            self._set_phase("holding", update)
            paused_at = time.monotonic()
            try:
                await self._must(update, lambda m: m.client.suspend(limit), "pause")
            except WeightUpdateError:
                await self._resume_old(update)
                raise
        except BaseException as e:
            fleet.release()
            await self._drop(update, update.dropped or str(e) or repr(e))
            if update.dropped is not None:
                raise WeightUpdateError(f"version {update.version} {update.dropped}", retry=True) from None
            raise
        try:
            result = await self._switch(update, paused_at, receive_s)
            self.saved.remember(update.version, update.saved, checksums)
            return result
        except WeightUpdateError:
            raise
        except BaseException as e:  # nobody knows what the engines hold now
            for member in update.members:
                fleet.quarantine(member, f"the update to version {update.version} broke off: {e!r}")
            raise
        finally:
            self._update = None
            self._set_phase("serving", update)
            fleet.release()
            self.saved.offer()

    async def _await_received(self, update: _Update, checksums: list[str]) -> None:
        """Until every engine has every bucket as it was sent. Raises WeightUpdateError(retry)."""
        if len(checksums) != update.buckets:
            raise WeightUpdateError(f"{len(checksums)} checksums for {update.buckets} buckets", retry=True)
        config = self._config
        end = time.monotonic() + config.transfer_timeout_s
        pending, poll_s = list(update.members), POLL_FIRST_S
        failed: dict[Member, str] = {}
        while pending and not failed:
            answers = await each(pending, lambda m: m.client.rpc("areal_status", {}, config.pause_timeout_s))
            for member, answer in answers.items():
                if isinstance(answer, EngineError):
                    failed[member] = str(answer)
                    continue
                workers = [w for w in answer if w["epoch"] in (update.epoch, 0)]
                if broken := [w for w in workers if w["phase"] in ("failed", "idle")]:
                    failed[member] = f"receiving {broken[0]['phase']}: {broken[0]['error']}"
                elif all(w["phase"] == "received" and w["version"] == update.version for w in answer):
                    if any(w["checksums"] != checksums for w in answer):
                        failed[member] = f"received {answer[0]['checksums']}, sent were {checksums}"
                    pending.remove(member)
            if pending and not failed:
                if time.monotonic() > end:
                    failed = {
                        m: f"received nothing whole in {config.transfer_timeout_s:g} s" for m in pending
                    }
                    break
                await asyncio.sleep(poll_s)
                poll_s = min(POLL_MOST_S, poll_s * 1.5)
        if failed:
            self._blame(update, failed)
            raise WeightUpdateError(f"version {update.version} was not received: {_list(failed)}", retry=True)

    async def _switch(self, update: _Update, paused_at: float, receive_s: float) -> dict[str, Any]:
        """Engines are paused and hold the new weights in staging: load, label, read back, resume."""
        fleet, limit, version = self._fleet, self._config.pause_timeout_s, update.version
        alive = list(update.members)

        async def step(what: str, do: Callable[[Member], Awaitable[T]]) -> list[T]:
            """Do it on every engine still alive; those that fail are taken out for good."""
            answers = await each(alive, do)
            for member, answer in answers.items():
                if isinstance(answer, EngineError):
                    alive.remove(member)
                    fleet.quarantine(member, f"failed to {what} version {version}: {answer}")
            return [a for a in answers.values() if not isinstance(a, EngineError)]

        async def go_on(member: Member) -> None:
            """Stamp, resume: by itself, for every request to a busy engine takes its turn."""
            await member.client.stamp(version, limit)
            await member.client.resume(limit)
            member.version, member.tainted = version, False

        self._set_phase("paused", update)
        # An engine that came up since `begin` has old weights and was not asked.
        for other in fleet.members:
            current = other.version == version
            if (
                other not in alive
                and other.state in (EngineState.SERVING, EngineState.DRAINING)
                and not current
            ):
                fleet.quarantine(other, f"took no part in the update to version {version}")
        self._set_phase("loading", update)
        loads = await step("load", lambda m: m.client.rpc("areal_load", {"version": version}, limit))
        load_s = max((w["load_s"] for workers in loads for w in workers), default=0.0)
        self._set_phase("verifying", update)
        fleet.calls.count_kept(alive)
        await step("label and resume", go_on)
        pause_s = time.monotonic() - paused_at
        if not alive and update.catch_up and fleet.serves:
            why = _list({m: m.reason for m in update.members})
            raise WeightUpdateError(f"no engine that lacked version {version} took it: {why}", retry=True)
        if not alive:
            fleet.error = f"held(error): no engine survived the update to version {version}: " + _list(
                {m: m.reason for m in update.members}
            )
            fleet.emit_weights(state="held", version=version, error=fleet.error)
            raise WeightUpdateError(fleet.error, retry=False)
        fleet.version, fleet.error = version, None
        if len(alive) == len(update.members):
            self._group = update.group
        fleet.serve_current()
        result = {
            "version": version,
            "pause_s": pause_s,
            "receive_s": receive_s,
            "load_s": load_s,
            "engines": len(alive),
        }
        self._finished[update.id] = result
        while len(self._finished) > FINISHED_REMEMBERED:
            del self._finished[next(iter(self._finished))]
        fleet.emit_weights(state="committed", **result)
        return result

    async def _resume_old(self, update: _Update) -> None:
        """Undo a pause on every engine that can still be reached; nothing was loaded."""
        members = [m for m in update.members if m.state is not EngineState.QUARANTINED]
        answers = await each(members, lambda m: m.client.resume(self._config.pause_timeout_s))
        for member, answer in answers.items():
            if isinstance(answer, EngineError):
                self._fleet.quarantine(member, f"cannot be resumed: {answer}")

    # failure

    async def _must(self, update: _Update, do: Callable[[Member], Awaitable[Any]], what: str) -> None:
        """Do it on every engine; any failure ends the update before it touched a model."""
        answers = await each(update.members, do)
        failed = {m: str(a) for m, a in answers.items() if isinstance(a, EngineError)}
        if failed:
            self._blame(update, failed)
            raise WeightUpdateError(f"{what} failed: {_list(failed)}", retry=True)

    def _blame(self, update: _Update, failed: dict[Member, str]) -> None:
        """Take out the engines that broke. When all failed, the sender or the network did, not they."""
        for member, why in failed.items():
            if len(failed) < len(update.members):
                self._fleet.quarantine(member, why)
            else:
                member.suspect.set()

    async def _drop(self, update: _Update, reason: str) -> None:
        """End the update before loading: engines leave the group, v-1 goes on."""
        if self._update is not update:
            return
        self._update = None
        if update.watchdog is not None and update.watchdog is not asyncio.current_task():
            update.watchdog.cancel()
        self._set_phase("serving", update)
        self._fleet.serve_current()
        self._fleet.emit_weights(state="aborted", version=update.version, reason=reason)
        members = [m for m in update.members if m.state is not EngineState.QUARANTINED]
        abort = {"epoch": update.epoch}
        limit = self._config.pause_timeout_s
        answers = await each(members, lambda m: m.client.rpc("areal_abort", abort, limit))
        for member, answer in answers.items():
            if isinstance(answer, EngineError):
                member.suspect.set()
        self.saved.offer()

    def _set_phase(self, phase: str, update: _Update) -> None:
        self.phase = phase
        self._fleet.emit_weights(state=phase, version=update.version, epoch=update.epoch)


def _list(failed: dict[Member, str]) -> str:
    return "; ".join(f"{m.id}: {why}" for m, why in failed.items())
