"""The engine's end of the weight transaction, over real gloo, without vLLM."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from fakes.sender import Sender, checksums, pack

from areal_gateway.worker_extension import WeightReceiver


def tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(33, 7, generator=g),
        "b": torch.randn(5, generator=g).to(torch.bfloat16),
        "c": torch.randn(1000, generator=g),
    }


def wait_phase(receiver: WeightReceiver, *phases: str, timeout_s: float = 10.0) -> dict:
    end = time.monotonic() + timeout_s
    while (status := receiver.status())["phase"] not in phases:
        assert time.monotonic() < end, f"still {status} after {timeout_s} s"
        time.sleep(0.005)
    return status


def join_all(sender: Sender, receivers: list[WeightReceiver], epoch: int, timeout_s: float = 10.0) -> None:
    for i, r in enumerate(receivers):
        r.join(
            epoch=epoch,
            store=sender.store,
            world_size=1 + len(receivers),
            rank_offset=1 + i,
            backend="gloo",
            timeout_s=timeout_s,
        )
    sender.join(epoch, 1 + len(receivers))


def load(receiver: WeightReceiver, version: int) -> dict[str, torch.Tensor]:
    got: dict[str, torch.Tensor] = {}
    result = receiver.load(version, lambda ts: got.update({n: t.clone() for n, t in ts}))
    assert "error" not in result, result
    return got


@pytest.fixture
def sender():
    s = Sender(timeout_s=10)
    yield s
    s.leave()


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_sent_is_what_is_loaded(sender: Sender, n: int) -> None:
    receivers = [WeightReceiver(worker_rank=0) for _ in range(n)]
    join_all(sender, receivers, epoch=5)
    for version in (1, 2, 3):  # one group for all of them
        sent = tensors(version)
        manifest, buckets = pack(sent, 256)
        assert len(manifest.buckets) > 1
        for r in receivers:
            assert r.receive(epoch=5, version=version, manifest=manifest.model_dump(), timeout_s=10) == {}
        sender.broadcast(buckets)
        for r in receivers:
            status = wait_phase(r, "received", "failed")
            assert status == status | {"phase": "received", "version": version, "error": None}
            assert status["checksums"] == checksums(buckets)
            got = load(r, version)
            assert got.keys() == sent.keys()
            assert all(torch.equal(got[k], sent[k]) for k in sent)
    for r in receivers:
        r.abort()


def test_every_worker_of_every_engine_gets_everything(sender: Sender) -> None:
    """Two engines of two and three workers (tensor parallel): rank = the engine's offset + worker rank."""
    engines = [[WeightReceiver(worker_rank=i) for i in range(n)] for n in (2, 3)]
    offset = 1
    for workers in engines:
        for r in workers:  # one call reaches all workers of an engine, with the same arguments
            r.join(
                epoch=1,
                store=sender.store,
                world_size=6,
                rank_offset=offset,
                backend="gloo",
                timeout_s=10,
            )
        offset += len(workers)
    sender.join(1, 6)
    everyone = [r for workers in engines for r in workers]
    for version in (1, 2):
        manifest, buckets = pack(tensors(version), 256)
        for r in everyone:
            r.receive(epoch=1, version=version, manifest=manifest.model_dump(), timeout_s=10)
        sender.broadcast(buckets)
        for r in everyone:
            assert wait_phase(r, "received", "failed")["checksums"] == checksums(buckets)
            got = load(r, version)
            assert all(torch.equal(got[k], v) for k, v in tensors(version).items())
    for r in everyone:
        r.abort()


def test_it_says_which_version_the_model_holds(sender: Sender) -> None:
    r = WeightReceiver(worker_rank=0)
    assert r.status()["holds"] is None
    join_all(sender, [r], epoch=1)
    seen = []
    for version in (1, 2):
        manifest, buckets = pack(tensors(version))
        r.receive(epoch=1, version=version, manifest=manifest.model_dump(), timeout_s=10)
        sender.broadcast(buckets)
        wait_phase(r, "received")
        seen.append(r.status()["holds"])

        def look(_: object, fail: bool = version == 2) -> None:
            seen.append(r.status()["holds"])
            if fail:
                raise RuntimeError("half way")

        r.load(version, look)
        seen.append(r.status()["holds"])
    assert seen == [None, "half new", 1, 1, "half new", "half new"]
    r.abort()
    assert r.status()["holds"] == "half new", "whatever becomes of the group"


def test_staging_buffers_are_reused_between_updates(sender: Sender) -> None:
    r = WeightReceiver(worker_rank=0)
    join_all(sender, [r], epoch=1)
    places = []
    for version in (1, 2, 3):
        manifest, buckets = pack(tensors(version), 256)
        r.receive(epoch=1, version=version, manifest=manifest.model_dump(), timeout_s=10)
        sender.broadcast(buckets)
        wait_phase(r, "received")
        places.append([b.data_ptr() for b in r._staging])
        load(r, version)
    assert places[0] == places[1] == places[2]
    r.abort()


def test_nothing_is_loaded_unless_that_version_was_received_whole(sender: Sender) -> None:
    r = WeightReceiver(worker_rank=0)

    def must_not_load(_: object) -> None:
        raise AssertionError("touched the model")

    assert "error" in r.load(1, must_not_load)
    join_all(sender, [r], epoch=1)
    wait_phase(r, "joined")
    assert "error" in r.load(1, must_not_load)
    manifest, buckets = pack(tensors(1), 256)
    r.receive(epoch=1, version=1, manifest=manifest.model_dump(), timeout_s=10)
    sender.broadcast(buckets[:1])
    assert "error" in r.load(1, must_not_load)
    sender.broadcast(buckets[1:])
    wait_phase(r, "received")
    assert "error" in r.load(2, must_not_load)
    load(r, 1)
    assert "error" in r.load(1, must_not_load), "a second load of the same version"
    r.abort()


def test_a_load_that_raises_is_reported_and_not_repeated(sender: Sender) -> None:
    r = WeightReceiver(worker_rank=0)
    join_all(sender, [r], epoch=1)
    manifest, buckets = pack(tensors(1))
    r.receive(epoch=1, version=1, manifest=manifest.model_dump(), timeout_s=10)
    sender.broadcast(buckets)
    wait_phase(r, "received")

    def fail(_: object) -> None:
        raise KeyError("no such layer")

    assert "no such layer" in r.load(1, fail)["error"]
    assert r.status()["phase"] == "failed"
    assert "error" in r.load(1, fail)
    r.abort()


@pytest.mark.parametrize("stage", ["join", "receive"])
def test_abort_frees_a_receiver_whose_sender_never_comes(sender: Sender, stage: str) -> None:
    r = WeightReceiver(worker_rank=0)
    if stage == "join":
        r.join(
            epoch=1, store=sender.store, world_size=2, rank_offset=1, backend="gloo", timeout_s=3
        )  # nobody else joins
    else:
        join_all(sender, [r], epoch=1, timeout_s=3)
        wait_phase(r, "joined")
        r.receive(epoch=1, version=1, manifest=pack(tensors(1))[0].model_dump(), timeout_s=3)
    thread = next(t for t in threading.enumerate() if t.name == "areal-epoch-1")
    began = time.monotonic()
    r.abort(1)
    assert time.monotonic() - began < 1, "abort waits for nobody"
    assert r.status()["phase"] == "idle"
    thread.join(5)
    assert not thread.is_alive()
    # and a new epoch works at once
    join_all(sender, [r], epoch=2)
    manifest, buckets = pack(tensors(7))
    r.receive(epoch=2, version=1, manifest=manifest.model_dump(), timeout_s=10)
    sender.broadcast(buckets)
    wait_phase(r, "received")
    assert torch.equal(load(r, 1)["a"], tensors(7)["a"])
    r.abort()


def test_a_sender_that_dies_makes_the_receive_fail_before_its_deadline(sender: Sender) -> None:
    r = WeightReceiver(worker_rank=0)
    join_all(sender, [r], epoch=1)
    wait_phase(r, "joined")
    r.receive(epoch=1, version=1, manifest=pack(tensors(1))[0].model_dump(), timeout_s=30)
    time.sleep(0.05)
    sender.leave()
    status = wait_phase(r, "failed", timeout_s=5)
    assert status["error"]
    assert r.receive(epoch=1, version=1, manifest=pack(tensors(1))[0].model_dump(), timeout_s=1)["error"]


def test_waiting_ends_with_the_transfer_or_after_its_time(sender: Sender) -> None:
    r = WeightReceiver(worker_rank=0)
    assert r.wait(10)["phase"] == "idle", "there is nothing to wait for"
    join_all(sender, [r], epoch=1)
    manifest, buckets = pack(tensors(1))
    r.receive(epoch=1, version=1, manifest=manifest.model_dump(), timeout_s=30)
    assert r.wait(0.05)["phase"] in ("joined", "receiving"), "nothing was sent"
    sender.broadcast(buckets)
    assert r.wait(10)["checksums"] == checksums(buckets)
    r.receive(epoch=1, version=2, manifest=manifest.model_dump(), timeout_s=30)
    sender.leave()
    assert r.wait(10)["phase"] == "failed"
    r.abort()


def test_the_deadline_of_a_transfer_is_kept(sender: Sender) -> None:
    r = WeightReceiver(worker_rank=0)
    join_all(sender, [r], epoch=1, timeout_s=30)
    wait_phase(r, "joined")
    r.receive(epoch=1, version=1, manifest=pack(tensors(1))[0].model_dump(), timeout_s=0.3)
    began = time.monotonic()
    wait_phase(r, "failed", timeout_s=5)
    assert time.monotonic() - began < 3


def test_receiving_for_another_epoch_is_refused(sender: Sender) -> None:
    r = WeightReceiver(worker_rank=0)
    manifest = pack(tensors(1))[0].model_dump()
    assert "not a member" in r.receive(epoch=1, version=1, manifest=manifest, timeout_s=1)["error"]
    join_all(sender, [r], epoch=3)
    assert "not a member" in r.receive(epoch=2, version=1, manifest=manifest, timeout_s=1)["error"]
    r.abort(2)
    assert r.status()["epoch"] == 3, "an abort of another epoch leaves this one alone"
    r.abort(3)


def test_leaving_within_a_broadcast_holds_up_nobody(sender: Sender) -> None:
    """`abort` runs in the engine's main loop; the sender is alive and sends no second bucket."""
    receiver = WeightReceiver(worker_rank=0)
    join_all(sender, [receiver], epoch=1)
    manifest, buckets = pack(tensors(1), 256)
    assert len(buckets) > 2
    receiver.receive(epoch=1, version=1, manifest=manifest.model_dump(), timeout_s=10)
    sender.broadcast(buckets[:1])
    began = time.monotonic()
    receiver.abort(1)
    assert time.monotonic() - began < 3  # a third of the broadcast's deadline
    assert receiver.status()["phase"] == "idle"
