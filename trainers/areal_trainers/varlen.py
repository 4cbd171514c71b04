"""Attention kernels that take `cu_seqlens`, for platforms that have one: no mask and no padding at all.

Each is exact and causal within every sequence of the packed row, like the classes of attention.py, which
stay the reference and the fallback. They compute in half precision only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_trainers.attention import Layout

NPU_MASK = 2048
"""Side of the causal mask that `npu_fusion_attention` reads compressed in its sparse modes 2 to 4."""


def flash_available() -> bool:
    """Whether this torch has `varlen_attn` with a window (torch 2.13 has; its first version had none)."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return {"window_size", "enable_gqa"} <= inspect.signature(function).parameters.keys()


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """FlashAttention over query [T, H, D], key and value [T, Hk, D] -> [T, H, D], by torch's own binding."""
    varlen = importlib.import_module("torch.nn.attention.varlen")
    return varlen.varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.longest,
        layout.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # tokens seen before and after oneself
        enable_gqa=query.shape[1] != key.shape[1],
    )


def npu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """As `flash_attention`, by torch_npu's fused kernel in layout TND.

    Sparse mode 3 is causal, counted from each sequence's last token; 4 is a band of `pre_tockens` (sic).
    """
    ends = layout.cu_seqlens[1:].tolist()
    side = torch.ones(NPU_MASK, NPU_MASK, dtype=torch.bool, device=query.device)
    band = {} if window is None else {"pre_tockens": window - 1, "next_tockens": 0}
    return importlib.import_module("torch_npu").npu_fusion_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        query.shape[1],
        "TND",
        atten_mask=torch.triu(side, diagonal=1),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=3 if window is None else 4,
        **band,
    )[0]
