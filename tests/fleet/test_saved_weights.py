"""Weights on disk: committed like any others, and given to engines that come late, without a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.sender import checksums, pack
from fleet_kit import Harness, fake_fleet, run_config
from safetensors.torch import save_file

from areal_agent.errors import WeightUpdateError
from areal_agent.weights import DISK, LOCK_FILE, Manifest, shard_name


def tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(33, 7, generator=g), "b": torch.randn(5, generator=g).to(torch.bfloat16)}


def write(folder: Path, version: int) -> tuple[Path, Manifest, list[str]]:
    """As a trainer would, without its atomicity: (folder, layout, checksums)."""
    sent = tensors(version)
    manifest, buckets = pack(sent, 64)
    path = folder / f"version-{version}"
    path.mkdir(parents=True)
    (path / LOCK_FILE).touch()
    assert len(manifest.buckets) == 2
    for i, bucket in enumerate(manifest.buckets):
        save_file({t.name: sent[t.name] for t in bucket.tensors}, path / shard_name(i, 2))
    return path, manifest, checksums(buckets)


async def update(h: Harness, folder: Path, version: int) -> tuple[Path, dict[str, Any]]:
    path, manifest, sums = write(folder, version)
    begun = await h.fleet.weights.begin(
        version=version, manifest=manifest, store={"folder": str(path)}, backend=DISK
    )
    assert not begun["join"]
    return path, await h.fleet.weights.commit(begun["update_id"], sums)


def holds(h: Harness, i: int, version: int) -> bool:
    want, got = tensors(version), h.engines[i].loaded
    return got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


def restart(h: Harness, i: int) -> None:
    """The engine is there again with the model folder's weights, as after a crash."""
    h.engines[i].loaded = {}
    h.engines[i].set_version(0)
    h.engines[i].label = "default"


async def lose(h: Harness, i: int) -> None:
    h.engines[i].faults.http = {"/health": "error"}
    await h.until(lambda: h.states()[i] == "gone")
    restart(h, i)
    h.engines[i].faults.http = {}


async def test_engines_load_what_lies_in_the_folder(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2, receiver="gloo") as h:
        for version in (1, 2):
            _, result = await update(h, tmp_path / "weights", version)
            assert (result["version"], result["engines"]) == (version, 2)
            assert holds(h, 0, version)
            assert holds(h, 1, version)


async def test_a_lost_engine_gets_the_current_weights_without_a_trainer(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2, receiver="gloo") as h:
        await update(h, tmp_path / "weights", 1)
        await lose(h, 1)
        await h.until(lambda: h.states() == ["serving", "serving"], 10)
        assert holds(h, 1, 1)
        assert h.engines[1].label == "1"
        assert not h.engines[1].paused
        assert "given" in [e["state"] for e in h.events if e["type"] == "weights"]


async def test_an_update_goes_before_the_giving_and_takes_the_newcomer_in(
    tmp_path: Path, monkeypatch
) -> None:
    async with fake_fleet(tmp_path, 2, receiver="gloo") as h:
        await update(h, tmp_path / "weights", 1)
        h.engines[1].faults.receive = "hang"  # it reads for ever
        await lose(h, 1)
        await h.until(lambda: any(n == "areal_stage" for n, _ in h.engines[1].calls[-3:]), 10)
        assert not h.fleet.status()["needs_weights"], "it has them from the folder; the trainer need not push"
        h.engines[1].faults.receive = None
        _, result = await update(h, tmp_path / "weights", 2)
        assert result["engines"] == 2
        assert holds(h, 1, 2)
        assert h.states() == ["serving", "serving"]


@pytest.mark.parametrize("spoil", ["removed", "other bytes"])
async def test_an_engine_never_serves_from_a_folder_that_changed(tmp_path: Path, spoil: str) -> None:
    config = run_config(fleet={"max_restarts": 1})
    async with fake_fleet(tmp_path, 2, receiver="gloo", config=config) as h:
        path, _ = await update(h, tmp_path / "weights", 1)
        if spoil == "removed":
            (path / shard_name(0, 2)).unlink()
        else:
            save_file({"a": tensors(9)["a"]}, path / shard_name(0, 2))
        await lose(h, 1)
        await h.until(lambda: "restarts used up" in h.fleet.status()["engines"][1]["reason"], 15)
        assert h.engines[1].loaded == {}
        assert h.states()[0] == "serving"


async def test_a_file_that_is_not_what_the_trainer_wrote_is_not_loaded(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1, receiver="gloo") as h:
        path, manifest, sums = write(tmp_path / "weights", 1)
        save_file({"a": tensors(9)["a"]}, path / shard_name(0, 2))
        begun = await h.fleet.weights.begin(
            version=1, manifest=manifest, store={"folder": str(path)}, backend=DISK
        )
        with pytest.raises(WeightUpdateError, match="sent were") as caught:
            await h.fleet.weights.commit(begun["update_id"], sums)
        assert caught.value.retry
        assert h.fleet.version == 0
        assert h.engines[0].loaded == {}
