"""Versions on disk: each a Hugging Face folder that appears whole or not at all; the last few are kept.

Invariant: a folder `version-N` holds all of version N, on the disk itself (fsync) before it has that name.
One that an engine is reading is never removed. One bucket is one safetensors file, so rank 0 holds no more
than the packer's few buckets.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from areal_agent.weights import LOCK_FILE, Manifest, checksum, shard_name
from areal_trainers.buckets import DTYPES, Packer
from areal_trainers.lora import write_adapter_config


class WeightFolder:
    """Writes and prunes `root`/version-N.

    Args:
        root: a folder that trainer and engines see under the same path.
        keep: versions kept.
        write: whether this rank writes (rank 0); the others only give their shards.
    """

    def __init__(self, root: Path, lm: PreTrainedModel, packer: Packer, keep: int, *, write: bool) -> None:
        self.root, self._lm, self._packer, self._keep, self._write = root, lm, packer, keep, write

    def path(self, version: int) -> Path:
        return self.root / f"version-{version:08d}"

    def write(self, version: int) -> Iterator[str]:
        """Yield a checksum per bucket as each is written; after the last, `path(version)` exists.

        A collective. Raises OSError. Nothing appears when it is left before its end.
        """
        manifest = self._packer.manifest
        count, final = len(manifest.buckets), self.path(version)
        temporary = final.with_name(f".{final.name}.{os.getpid()}")
        try:
            if self._write:
                for left_behind in self.root.glob(".version-*"):  # by a trainer that was killed
                    shutil.rmtree(left_behind)
                temporary.mkdir(parents=True)
            for i, bucket in enumerate(manifest.buckets):
                flat = self._packer.pack(i)
                if not self._write:
                    yield ""
                    continue
                save_file(
                    {
                        t.name: flat[t.offset : t.offset + t.nbytes].view(DTYPES[t.dtype]).view(t.shape).cpu()
                        for t in bucket.tensors
                    },
                    temporary / shard_name(i, count),
                    metadata={"format": "pt"},
                )
                yield checksum(flat.view(torch.int64))
            if self._write:
                self._finish(temporary, final, manifest)
        finally:
            if self._write:
                shutil.rmtree(temporary, ignore_errors=True)

    def _finish(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        if manifest.adapter is not None:
            write_adapter_config(temporary, manifest.adapter, self._lm.name_or_path or "")
        else:
            self._lm.config.save_pretrained(temporary)
        (temporary / LOCK_FILE).touch()
        count = len(manifest.buckets)
        if count > 1:
            where = {t.name: shard_name(i, count) for i, b in enumerate(manifest.buckets) for t in b.tensors}
            index = {"metadata": {"total_size": manifest.nbytes}, "weight_map": where}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for file in [*temporary.iterdir(), temporary]:
            _sync(file)
        old = final.with_name(f".old-{final.name}.{os.getpid()}")
        if final.exists():  # of a run before this one, or of an attempt that no engine took
            final.rename(old)
        temporary.rename(final)
        if old.exists():  # an engine that reads it goes on: what it has open stays until it is closed
            shutil.rmtree(old)
        _sync(self.root)

    def prune(self, current: int) -> None:
        """Remove all but the last `keep` versions up to `current`, and none that an engine is reading.

        Later versions are of a run that went further, was killed, and goes on from `current`.
        """
        there = sorted(self.root.glob("version-*"))
        kept = [f for f in there if f.name <= self.path(current).name][-self._keep :]
        for old in (f for f in there if f not in kept):
            _remove(old)


def _remove(folder: Path) -> None:
    """Unless somebody reads it."""
    with (folder / LOCK_FILE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
