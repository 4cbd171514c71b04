"""Runs inside the engine: receives new weights in the background, loads them when told to.

Invariant: the model is touched only by `load`, only with buckets that were received completely, and after
it every kernel computes with the new weights (also those that keep a packed copy). Everything before
`load` (joining the group, the broadcasts, the checksums) happens beside generation and can fail or be
aborted without the model noticing.

`WeightReceiver` knows torch and no vLLM; `AREALWorkerExtension` is the mixin that vLLM adds to its worker
(`--worker-extension-cls`) and whose methods are called through `POST /collective_rpc`. Those calls run in
the engine's main loop: each returns at once, `areal_load` apart.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from areal_agent.weights import IN_FLIGHT, LOCK_FILE, Manifest, checksum, shard_name
from areal_gateway.worker_lora import refuse_whole_weights, replace_adapter

Tensors = Iterable[tuple[str, torch.Tensor]]

HALF_NEW = "half new"

UNDER_WAY = ("joining", "joined", "receiving")
"""Phases of a transfer that was asked for and has not ended yet, well or badly."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# --- process groups --------------------------------------------------------------------------------------


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, loopback: bool) -> Any:
    if not loopback:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    # By default gloo listens on the address that the host's name resolves to.
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta, loopback: bool) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _hccl(store: Store, rank: int, size: int, timeout: timedelta, loopback: bool) -> Any:
    import torch_npu  # pyright: ignore[reportMissingImports]

    group = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    options = group.Options()
    options._timeout = timeout
    return group(store, rank, size, options)


BACKENDS: dict[str, Callable[[Store, int, int, timedelta, bool], Any]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "hccl": _hccl,
}


def join_group(
    *, backend: str, epoch: int, host: str, port: int, rank: int, size: int, timeout_s: float
) -> Any:
    """The private group of one epoch, through the trainer's store. Blocks until every member is there."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    prefixed = PrefixStore(f"areal/{epoch}", store)
    return BACKENDS[backend](prefixed, rank, size, timeout, _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- receiving -------------------------------------------------------------------------------------------


class _Membership:
    """One epoch's place in the group, and the thread that joins it and receives into staging.

    A thread that is stuck in a collective is left behind by `close`: it owns its buffers, so whatever it
    still writes reaches nobody.
    """

    def __init__(self, epoch: int, device: str, staging: list[torch.Tensor]) -> None:
        self.epoch = epoch
        self.device = device
        self.staging = staging
        self._phase = "joining"
        self._phased = threading.Condition()
        self.version: int | None = None
        self.manifest: Manifest | None = None
        self.checksums: list[str] = []
        self.error: str | None = None
        self.group: Any = None
        self.closed = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"areal-epoch-{epoch}", daemon=True)

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        with self._phased:
            self._phase = phase
            self._phased.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until the transfer that was asked for has ended, at most `timeout_s`."""
        with self._phased:
            self._phased.wait_for(lambda: self._phase not in UNDER_WAY, timeout_s)

    def start(self, join: Callable[[], Any]) -> None:
        self._jobs.put(lambda: self._join(join))
        self.thread.start()

    def submit(self, version: int, manifest: Manifest, timeout_s: float) -> None:
        self.version, self.manifest, self.checksums = version, manifest, []
        if self.phase in ("joined", "loaded", "received"):
            self.phase = "receiving"
        self._jobs.put(lambda: self._receive(manifest, timeout_s))

    def read(self, version: int, manifest: Manifest, folder: Path) -> None:
        """Stage `version` from disk instead; there is no group to join."""
        self.version, self.manifest, self.phase = version, manifest, "receiving"
        self._jobs.put(lambda: self._read(manifest, folder))
        self.thread.start()

    def close(self) -> None:
        """Leave the group, without waiting for what is under way; that fails at its deadline at the latest.

        The thread keeps the group until then: destroying a gloo group waits for its work with the interpreter
        locked, and the engine would decode nothing for so long.
        """
        self.closed = True
        self._jobs.put(None)
        if self.group is not None:
            self.group.abort()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self.closed:
            try:
                job()
            except Exception as e:  # reported by `status`; the gateway decides what it means
                self.error = f"{type(e).__name__}: {e}"
                self.phase = "failed"
                return

    def _join(self, join: Callable[[], Any]) -> None:
        group = join()
        if self.closed:
            group.abort()
            return
        self.group = group
        self.phase = "joined"

    def _receive(self, manifest: Manifest, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        self.phase = "receiving"
        _fit(self.staging, [b.nbytes for b in manifest.buckets], pin=self.device != "cpu")
        landings = self._landings(manifest)

        def start(i: int) -> Any:
            if self.closed:
                raise RuntimeError("the group was closed")
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.timeout = timedelta(seconds=max(0.01, end - time.monotonic()))
            return self.group.broadcast([landings[i]], options)

        checksums = []
        # Several are asked for at a time: the next come in while one is checked.
        works = [start(i) for i in range(min(IN_FLIGHT, len(landings)))]
        try:
            for i, (staged, landing) in enumerate(zip(self.staging, landings, strict=True)):
                works[i].wait()
                checksums.append(checksum(landing.view(torch.int64)))
                if landing is not staged:
                    staged.copy_(landing)
                if i + IN_FLIGHT < len(landings):
                    works.append(start(i + IN_FLIGHT))
        except BaseException:
            for work in works:  # see close
                with suppress(RuntimeError):
                    work.wait()
            raise
        self.checksums = checksums
        self.phase = "received"

    def _read(self, manifest: Manifest, folder: Path) -> None:
        from safetensors import safe_open

        _fit(self.staging, [b.nbytes for b in manifest.buckets], pin=self.device != "cpu")
        checksums = []
        count = len(manifest.buckets)
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)  # the trainer prunes nothing that is locked
            for i, (bucket, staged) in enumerate(zip(manifest.buckets, self.staging, strict=True)):
                if self.closed:
                    return
                staged.zero_()  # between tensors, as in the bucket the trainer summed up
                with safe_open(folder / shard_name(i, count), framework="pt") as file:
                    for spec in bucket.tensors:
                        place = staged[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype])
                        place.view(spec.shape).copy_(file.get_tensor(spec.name))
                checksums.append(checksum(staged.view(torch.int64)))
        self.checksums = checksums
        self.phase = "received"

    def _landings(self, manifest: Manifest) -> list[torch.Tensor]:
        """Where each bucket is received: staging itself, or one of IN_FLIGHT buffers on the device by turns."""
        if self.device == "cpu":
            return self.staging
        most = max(b.nbytes for b in manifest.buckets)
        few = [torch.empty(most, dtype=torch.uint8, device=self.device) for _ in range(IN_FLIGHT)]
        return [few[i % IN_FLIGHT][: b.nbytes] for i, b in enumerate(manifest.buckets)]


def _fit(staging: list[torch.Tensor], sizes: list[int], *, pin: bool) -> None:
    """Make `staging` one uint8 buffer per size, keeping those that fit already."""
    del staging[len(sizes) :]
    for i, size in enumerate(sizes):
        if i == len(staging):
            staging.append(torch.empty(size, dtype=torch.uint8, pin_memory=pin))
        elif staging[i].numel() != size:
            staging[i] = torch.empty(size, dtype=torch.uint8, pin_memory=pin)


class WeightReceiver:
    """One engine worker's end of the weight transaction, up to the model.

    Methods return JSON-able dicts and do not raise for what the other side did: a failure is a `phase`
    ("failed") with an `error`. Calls come from one thread.
    """

    def __init__(self, *, worker_rank: int, device: str = "cpu") -> None:
        self.worker_rank, self.device = worker_rank, device
        self._member: _Membership | None = None
        self._staging: list[torch.Tensor] = []
        self._holds: int | str | None = None

    def join(
        self,
        *,
        epoch: int,
        store: dict[str, Any],
        world_size: int,
        rank_offset: int,
        backend: str,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Leave the former epoch's group and join this one's in the background."""
        self.abort()
        member = self._member = _Membership(epoch, self.device, self._staging)
        rank = rank_offset + self.worker_rank
        host, port = store["host"], store["port"]
        member.start(
            lambda: join_group(
                backend=backend,
                epoch=epoch,
                host=host,
                port=port,
                rank=rank,
                size=world_size,
                timeout_s=timeout_s,
            )
        )
        return {}

    def receive(
        self, *, epoch: int, version: int, manifest: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Stage every bucket of `manifest` in the background, after joining."""
        member = self._member
        if member is None or member.epoch != epoch:
            return {"error": f"not a member of epoch {epoch}"}
        if member.phase in ("failed", "receiving"):
            return {"error": f"cannot receive while {member.phase}: {member.error}"}
        member.submit(version, Manifest.model_validate(manifest), timeout_s)
        return {}

    def stage(self, *, epoch: int, version: int, manifest: dict[str, Any], folder: str) -> dict[str, Any]:
        """Read `version` from `folder` in the background; `load` is then as after a broadcast."""
        self.abort()
        member = self._member = _Membership(epoch, self.device, self._staging)
        member.read(version, Manifest.model_validate(manifest), Path(folder))
        return {}

    def status(self) -> dict[str, Any]:
        """`holds`: version that the model holds by us; None as long as we loaded none; "half new" within."""
        m = self._member
        if m is None:
            idle = {"phase": "idle", "epoch": 0, "version": None, "checksums": [], "error": None}
            return idle | {"holds": self._holds}
        phase = m.phase
        return {
            "phase": phase,
            "epoch": m.epoch,
            "version": m.version,
            "checksums": list(m.checksums) if phase in ("received", "loaded") else [],
            "error": m.error,
            "holds": self._holds,
        }

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """`status` once everything is received or that failed, after `timeout_s` at the latest. Blocks: an
        engine's loop asks for `status` instead."""
        if self._member is not None:
            self._member.wait(timeout_s)
        return self.status()

    @property
    def staged(self) -> Manifest | None:
        """The layout of what is being received, or was."""
        return self._member.manifest if self._member is not None else None

    def load(self, version: int, load: Callable[[Tensors], None]) -> dict[str, Any]:
        """Give `load` the staged tensors. Its tensors are views of staging: copy what is to be kept."""
        m = self._member
        if m is None or m.phase != "received" or m.version != version or m.manifest is None:
            return {"error": f"version {version} is not staged here: {self.status()}"}
        begin = time.perf_counter()
        self._holds = HALF_NEW
        try:
            load(_unpack(m.manifest, m.staging, self.device))
        except Exception as e:  # the gateway takes this engine out; it must learn why
            m.phase, m.error = "failed", f"{type(e).__name__}: {e}"
            return {"error": m.error}
        m.phase, self._holds = "loaded", version
        return {"version": version, "load_s": time.perf_counter() - begin}

    def abort(self, epoch: int | None = None) -> dict[str, Any]:
        """Leave the group (of `epoch`, or whatever it is) and forget what was received."""
        m = self._member
        if m is None or (epoch is not None and m.epoch != epoch):
            return {}
        m.close()
        m.thread.join(0.2)
        if m.thread.is_alive():
            self._staging = []  # the old thread may still write into its own
        self._member = None
        return {}


def _unpack(
    manifest: Manifest, staging: list[torch.Tensor], device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket, staged in zip(manifest.buckets, staging, strict=True):
        data = staged.to(device)
        for spec in bucket.tensors:
            flat = data[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype])
            yield spec.name, flat.view(spec.shape)


# --- loading into vLLM -----------------------------------------------------------------------------------


def reload_model(model: torch.nn.Module, vllm_config: Any, device: Any, tensors: Tensors) -> None:
    """Replace every weight of a live vLLM model in place.

    vLLM's layerwise reload turns each layer back into checkpoint form, loads, and repeats what happened
    after the first load (fusing, packing, quantising) into the storage that kernels already point to.
    Raises ValueError when `tensors` lacks a weight; the model is then not usable.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    wanted = {name for name, _ in model.named_parameters()}
    device = torch.device(device)
    # As a context it is asked at every call of torch, which for a small model is a third of the time.
    there = nullcontext() if torch.get_default_device() == device else device
    with torch.no_grad(), set_current_vllm_config(vllm_config), there:
        initialize_layerwise_reload(model)
        loaded = model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
        short = _half_loaded(model)
        finalize_layerwise_reload(model, vllm_config.model_config)
        refresh_packed_kernels(model)
    missing = sorted(wanted - loaded) if loaded is not None else []
    if missing or short:
        raise ValueError(
            f"the update lacks weights: missing {missing or 'none'}, incomplete {short or 'none'}"
        )


def _half_loaded(model: torch.nn.Module) -> list[str]:
    """Fused linear layers (q/k/v, gate/up) of which only some shards came."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    short = []
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            info = get_layerwise_info(layer)
            total = info.load_numel_total
            if total is not None and info.load_numel < total:
                short.append(f"{name} ({info.load_numel} of {total} elements)")
    return short


def refresh_packed_kernels(model: torch.nn.Module) -> None:
    """Pack again what holds a whole weight and a packed copy of it (CPU only, else nothing to do).

    With tied embeddings the LM head shares the embedding's parameter, so the reload sees nothing to load
    there and leaves its packed copy as it was: the model would go on computing old logits, 1.8 nats off.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        # vLLM leaves these unpacked; they compute with the weight itself.
        plain = getattr(module, "_cpu_skip_gemm_dispatch", False)
        if (
            hasattr(module, "cpu_linear")
            and not plain
            and isinstance(weight, torch.Tensor)
            and weight.numel()
        ):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class AREALWorkerExtension:
    """Mixed into vLLM's worker. Each method takes one JSON string and returns a dict."""

    rank: int
    device: Any
    model_runner: Any
    vllm_config: Any

    def _areal_receiver(self) -> WeightReceiver:
        receiver = self.__dict__.get("_areal")
        if receiver is None:
            receiver = self.__dict__["_areal"] = WeightReceiver(
                worker_rank=self.rank, device=str(self.device)
            )
        return receiver

    def areal_join(self, arg: str) -> dict[str, Any]:
        """{epoch, store: {host, port}, world_size, rank_offset, backend, timeout_s} -> {}"""
        return self._areal_receiver().join(**json.loads(arg))

    def areal_receive(self, arg: str) -> dict[str, Any]:
        """{epoch, version, manifest, timeout_s} -> {} or {error}"""
        return self._areal_receiver().receive(**json.loads(arg))

    def areal_stage(self, arg: str) -> dict[str, Any]:
        """{epoch, version, manifest, folder} -> {}"""
        return self._areal_receiver().stage(**json.loads(arg))

    def areal_status(self, arg: str = "{}") -> dict[str, Any]:
        """-> {phase, epoch, version, checksums, error, holds}"""
        return self._areal_receiver().status()

    def areal_load(self, arg: str) -> dict[str, Any]:
        """{version} -> {version, load_s} or {error}; the engine must be paused"""
        receiver = self._areal_receiver()
        adapter = receiver.staged.adapter if receiver.staged is not None else None

        def load(tensors: Tensors) -> None:
            if adapter is not None:
                replace_adapter(self.model_runner, adapter, tensors)
            else:
                refuse_whole_weights(self.model_runner)
                reload_model(self.model_runner.get_model(), self.vllm_config, self.device, tensors)

        return receiver.load(json.loads(arg)["version"], load)

    def areal_progress(self, arg: str = "{}") -> dict[str, Any]:
        """-> {sampled: {request id: tokens sampled of it}}; the engine must be paused. None where this model
        runner keeps no such count."""
        requests = getattr(self.model_runner, "requests", None)
        if not isinstance(requests, dict):
            return {"sampled": None}
        return {"sampled": {id: len(state.output_token_ids) for id, state in requests.items()}}

    def areal_abort(self, arg: str) -> dict[str, Any]:
        """{epoch} -> {}"""
        return self._areal_receiver().abort(json.loads(arg).get("epoch"))
