"""A leased batch as one safetensors blob, flat columns and a JSON header; no pickle.

Layout for S sequences of lengths L_0..L_{S-1}, T = sum of them:
`token_ids` [T] int32, `logprobs` [T] float32, `versions` [T] int32, `loss_mask` [T] bool,
`cu_seqlens` [S+1] int32, `rewards` [S] float32 (NaN: missing), `temperatures` [S] float32;
header key `areal`: {"format": 1, "lease_id", "version", "sequences": [{"session_id", ...}]}; a sequence's
entry has its ids and, with one value a call, `call_ids`, `call_ends`, `call_rewards`, `call_returns` and
`call_labels` (those but the first are absent from blobs of older gateways, and then empty).

Imported by the gateway and the trainer only: it needs numpy and safetensors, the base install does not.
"""

from __future__ import annotations

import json
import math
import struct

import numpy as np
from safetensors.numpy import load, save

from areal_agent.trajectory import Batch, Sequence

FORMAT = 1
CALL_COLUMNS = ("call_ids", "call_ends", "call_rewards", "call_returns", "call_labels")
MEDIA_TYPE = "application/vnd.areal.batch+safetensors"


def pack(batch: Batch) -> bytes:
    """Batch -> blob. Raises ValueError where a column would not fit its type."""
    seqs = batch.sequences
    cu = np.zeros(len(seqs) + 1, np.int32)
    np.cumsum([len(s) for s in seqs], out=cu[1:])

    def column(name: str, dtype: type) -> np.ndarray:
        parts = [np.asarray(getattr(s, name), dtype) for s in seqs]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    header = {
        "format": FORMAT,
        "lease_id": batch.lease_id,
        "version": batch.version,
        "sequences": [
            {
                "session_id": s.session_id,
                "group_id": s.group_id,
                "task_id": s.task_id,
                **{name: list(getattr(s, name)) for name in CALL_COLUMNS},
            }
            for s in seqs
        ],
    }
    return save(
        {
            "token_ids": column("token_ids", np.int32),
            "logprobs": column("logprobs", np.float32),
            "versions": column("versions", np.int32),
            "loss_mask": column("loss_mask", np.bool_),
            "cu_seqlens": cu,
            "rewards": np.asarray([math.nan if s.reward is None else s.reward for s in seqs], np.float32),
            "temperatures": np.asarray([s.temperature for s in seqs], np.float32),
        },
        metadata={"areal": json.dumps(header)},
    )


def unpack(blob: bytes) -> Batch:
    """Blob -> Batch. Raises ValueError when the blob is not one of ours or its columns disagree."""
    header = _header(blob)
    cols = load(blob)
    cu, infos = cols["cu_seqlens"], header["sequences"]
    total = len(cols["token_ids"])
    if len(cu) != len(infos) + 1 or int(cu[-1]) != total or (np.diff(cu) < 0).any():
        raise ValueError(f"batch of {len(infos)} sequences and {total} tokens has cu_seqlens {cu.tolist()}")
    sequences = []
    for i, info in enumerate(infos):
        a, b = int(cu[i]), int(cu[i + 1])
        reward = float(cols["rewards"][i])
        sequences.append(
            Sequence(
                token_ids=cols["token_ids"][a:b].tolist(),
                logprobs=cols["logprobs"][a:b].tolist(),
                versions=cols["versions"][a:b].tolist(),
                loss_mask=cols["loss_mask"][a:b].tolist(),
                temperature=float(cols["temperatures"][i]),
                reward=None if math.isnan(reward) else reward,
                session_id=info["session_id"],
                group_id=info["group_id"],
                task_id=info["task_id"],
                **{name: tuple(info.get(name, ())) for name in CALL_COLUMNS},
            )
        )
    return Batch(lease_id=header["lease_id"], version=header["version"], sequences=tuple(sequences))


def _header(blob: bytes) -> dict:
    if len(blob) < 8:
        raise ValueError(f"not a batch: only {len(blob)} bytes")
    (size,) = struct.unpack("<Q", blob[:8])
    if size > len(blob) - 8:
        raise ValueError(f"not a batch: its header claims {size} bytes of {len(blob) - 8}")
    try:
        header = json.loads(json.loads(blob[8 : 8 + size])["__metadata__"]["areal"])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError("not a batch: no `areal` header in the safetensors metadata") from e
    if header.get("format") != FORMAT:
        raise ValueError(f"batch format {header.get('format')} is not the {FORMAT} this version reads")
    return header
