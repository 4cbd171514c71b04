"""New weights into the engines: the trainer's half of the weight transaction.

Invariant: `push(v)` returns only after the gateway committed v; otherwise it raises, the update was
aborted and the group freed, so that no engine waits in a broadcast.

Rank 0 keeps one TCPStore for its life, bound to loopback. Every epoch of the weight group has its own
prefix in it, and rank 0 of the trainer is rank 0 of that group. Weights travel in packed buckets (see
buckets.py), one broadcast for each; the next is gathered and packed while the last is on the wire. With
`weights.transport: disk` they are files (see weight_folder.py), written before the update begins.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from transformers import PreTrainedModel

from areal_agent.config import FleetConfig, WeightsConfig
from areal_agent.errors import GatewayError, WeightUpdateError
from areal_agent.weights import DISK, IN_FLIGHT, checksum
from areal_trainers.buckets import Packer
from areal_trainers.checkpoint import unique_tensors
from areal_trainers.client import ANSWER_S, TrainerClient
from areal_trainers.clock import Clock
from areal_trainers.lora import adapter_tensors, describe
from areal_trainers.platform import Platform
from areal_trainers.ranks import Ranks
from areal_trainers.weight_folder import WeightFolder

MIB = 2**20
DISK_BUCKET_MIB = 64.0
"""A bucket is a file there."""

LOOPBACK = "127.0.0.1"
RETRY_PAUSE_S = 1.0
"""Between two epochs: an engine that broke is taken out meanwhile."""


@dataclass(frozen=True)
class Pushed:
    """A committed update: seconds that engines were paused, received and loaded; engines; epochs tried."""

    version: int
    pause_s: float
    receive_s: float
    load_s: float
    engines: int
    attempts: int


def wire_dtype(weights: WeightsConfig, fleet: FleetConfig) -> str:
    """The engines' dtype where the run pins one, else float32, which every engine can round from."""
    for chosen in (weights.dtype, fleet.dtype):
        if chosen != "auto":
            return chosen
    return "float32"


class WeightsSender:
    """Pushes `lm`'s weights. Every rank makes one and calls `push` with the others.

    Args:
        client: of rank 0; None on the other ranks.
        dtype: wire dtype, a name of areal_agent.weights.ITEM_BYTES.
        clock: books the gathering of shards as its own phase.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        client: TrainerClient | None,
        ranks: Ranks,
        platform: Platform,
        config: WeightsConfig,
        dtype: str,
        clock: Clock | None = None,
    ) -> None:
        self._client, self._ranks, self._platform, self._config = client, ranks, platform, config
        self._clock = clock or Clock()
        if config.backend not in ("auto", platform.backend):
            raise WeightUpdateError(
                f"weights.backend = {config.backend} but platform {platform.name} broadcasts with "
                f"{platform.backend}; leave it auto"
            )
        mib = config.bucket_mib
        if mib == "auto":
            mib = DISK_BUCKET_MIB if config.transport == "disk" else platform.bucket_mib
        apart = config.adapter == "adapter"  # RunConfig.served_adapter: then there is one
        self._packer = Packer(
            dict(adapter_tensors(lm) if apart else unique_tensors(lm)),
            dtype,
            int(mib * MIB),
            keep=ranks.first,
            adapter=describe(lm) if apart else None,
        )
        self.manifest = self._packer.manifest
        self._store: TCPStore | None = None
        self._files: WeightFolder | None = None
        if config.transport == "disk":
            root = Path(config.folder).absolute()
            self._files = WeightFolder(root, lm, self._packer, config.keep, write=ranks.first)
        elif ranks.first:
            self._store = _loopback_store(config.join_timeout_s)
        self._group: Any = None

    def push(self, version: int, *, force: bool = False) -> Pushed:
        """Make `version` live in the fleet. Raises WeightUpdateError when no attempt committed.

        `force` allows a version that does not follow the fleet's (a resumed trainer).
        """
        written = self._write(version) if self._files is not None else None
        for attempt in range(1, self._config.retries + 2):
            try:
                pushed = self._attempt(version, attempt, force, written)
                if self._files is not None and self._ranks.first:
                    self._files.prune(version)
                return pushed
            except WeightUpdateError as e:
                if not e.retry or attempt > self._config.retries:
                    raise WeightUpdateError(
                        f"version {version} did not reach the engines in {attempt} "
                        f"attempt{'s' if attempt > 1 else ''}: {e}; see logs/gateway.log and the engines' logs"
                    ) from e
                if self._ranks.first:
                    print(f"areal_trainers: offering version {version} again in a new epoch: {e}", flush=True)
                time.sleep(RETRY_PAUSE_S)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            _free(group)

    # One attempt. Rank 0 talks; after each stage all ranks learn whether it went well.

    def _write(self, version: int) -> list[str]:
        """Put `version` on disk, on which all attempts then rest; its checksums (on rank 0)."""
        assert self._files is not None
        checksums: list[str] = []
        buckets = self._files.write(version)
        for _ in range(len(self.manifest.buckets) + 1):  # once more: the folder gets its name
            self._agree(lambda: checksums.extend(s for s in [next(buckets, None)] if s is not None), all=True)
        return checksums

    def _attempt(self, version: int, attempt: int, force: bool, written: list[str] | None) -> Pushed:
        update: dict[str, Any] = {}
        try:
            self._agree(lambda: update.update(self._begin(version, force)))
            checksums = self._transfer() if written is None else written
            result: dict[str, Any] = {}
            self._agree(lambda: result.update(self._commit(version, update["update_id"], checksums)))
        except BaseException as e:
            # Also for a signal: an update left open would hold engines until its deadline.
            self._drop(update.get("update_id"), f"{type(e).__name__}: {e}")
            raise
        return Pushed(
            version=version,
            pause_s=float(result.get("pause_s", 0.0)),
            receive_s=float(result.get("receive_s", 0.0)),
            load_s=float(result.get("load_s", 0.0)),
            engines=int(result.get("engines", 0)),
            attempts=attempt,
        )

    def _agree(self, stage: Callable[[], object], *, all: bool = False) -> None:
        """Run `stage` on rank 0 (or on all); every rank raises WeightUpdateError when it failed somewhere."""
        error: WeightUpdateError | None = None
        if self._ranks.first or all:
            try:
                stage()
            except WeightUpdateError as e:
                error = e
            except GatewayError as e:
                error = WeightUpdateError(str(e), retry=e.code != "weights_held" and e.status != 401)
                error.__cause__ = e
            except (RuntimeError, OSError) as e:  # what torch.distributed raises; TimeoutError is an OSError
                error = WeightUpdateError(f"{type(e).__name__}: {e}", retry=True)
                error.__cause__ = e
        code = self._ranks.max([0.0 if error is None else 1.0 if error.retry else 2.0])[0]
        if error is not None:
            raise error
        if code:
            raise WeightUpdateError(
                "rank 0 could not update the engines; its log says why", retry=code == 1.0
            )

    def _begin(self, version: int, force: bool) -> dict[str, Any]:
        assert self._client is not None
        c = self._config
        if self._files is not None:
            store, backend = {"folder": str(self._files.path(version))}, DISK
        else:
            store = {"host": LOOPBACK, "port": _present(self._store).port}
            backend = self._platform.backend
        update = self._client.begin(
            version=version,
            manifest=self.manifest,
            store=store,
            backend=backend,
            force=force,
            timeout_s=c.join_timeout_s + 3 * c.pause_timeout_s + ANSWER_S,
        )
        try:
            if update["join"]:
                self.close()
                self._group = self._platform.process_group(
                    PrefixStore(f"areal/{update['epoch']}", _present(self._store)),
                    0,
                    update["world_size"],
                    timedelta(seconds=c.join_timeout_s),
                    loopback=True,
                )
            elif self._group is None and self._files is None:
                raise WeightUpdateError("the gateway reuses a group that this trainer has left", retry=True)
        except BaseException as e:
            self._drop(update["update_id"], f"{type(e).__name__}: {e}")
            raise
        return update

    def _transfer(self) -> list[str]:
        """Broadcast every bucket, at most IN_FLIGHT of them at once; their checksums (on rank 0)."""
        end = time.monotonic() + self._config.transfer_timeout_s
        checksums: list[str] = []
        on_the_wire: list[tuple[Any, torch.Tensor]] = []

        def send(flat: torch.Tensor) -> None:
            on_the_wire.append((self._broadcast(flat, end), flat))
            checksums.append(checksum(flat.view(torch.int64)))
            if len(on_the_wire) == IN_FLIGHT:
                on_the_wire.pop(0)[0].wait()

        for i in range(len(self.manifest.buckets)):
            with self._clock("gather"):
                flat = self._packer.pack(i)
            self._agree(lambda flat=flat: send(flat))
        self._agree(lambda: [work.wait() for work, _ in on_the_wire])
        return checksums

    def _broadcast(self, flat: torch.Tensor, end: float) -> Any:
        """Start one; `wait` of what it returns raises RuntimeError at `end`."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(0.01, end - time.monotonic()))
        return self._group.broadcast([flat], options)

    def _commit(self, version: int, update_id: str, checksums: list[str]) -> dict[str, Any]:
        """Commit; where no answer came, ask again: a commit that is under way answers the repetition."""
        assert self._client is not None
        c = self._config
        timeout_s = c.transfer_timeout_s + 6 * c.pause_timeout_s + ANSWER_S
        try:
            result = self._client.commit(update_id, checksums, timeout_s)
        except GatewayError as e:
            if e.code != "no_answer":
                raise
            result = self._client.commit(update_id, checksums, timeout_s)
        if result.get("version") != version:
            raise WeightUpdateError(
                f"the gateway committed version {result.get('version')} where {version} was offered",
                retry=False,
            )
        return result

    def _drop(self, update_id: str | None, reason: str) -> None:
        self.close()
        if self._client is not None and update_id is not None:
            try:
                self._client.abort(update_id, reason)
            except GatewayError as e:
                print(f"areal_trainers: update {update_id} ends only at its deadline: {e}", flush=True)


def _present(store: TCPStore | None) -> TCPStore:
    if store is None:
        raise WeightUpdateError("the gateway asks for a group where weights go over disk", retry=False)
    return store


def _loopback_store(timeout_s: float) -> TCPStore:
    """A store that listens on loopback only; by itself TCPStore would listen on every address."""
    listener = socket.create_server((LOOPBACK, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _free(group: Any) -> None:
    """End whatever the group still waits for. Older torch has no abort on some backends."""
    end = getattr(group, "abort", None) or getattr(group, "shutdown", None)
    if end is not None:
        end()
