"""`cu_seqlens` kernels against dense attention. The kernels themselves need devices that are not here: fakes
compute what their documentation says from the arguments they got, so a wrong argument is a wrong result."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_trainers import varlen
from areal_trainers.attention import KERNELS, Layout, choose_kernel
from areal_trainers.platform.cpu import CpuPlatform
from areal_trainers.platform.cuda import CudaPlatform
from areal_trainers.platform.npu import NpuPlatform

REAL_FLASH = torch_varlen.varlen_attn


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float):
    """q [n, H, D], k and v [n, Hk, D], seen [n, n] bool -> [n, H, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).double() * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.double())


def fake_flash(
    q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn as documented in torch 2.13."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (cu_q[0], cu_q[-1]) == (0, len(q))
    assert max_q == max_k == int(cu_q.diff().max())
    assert enable_gqa or q.shape[1] == k.shape[1]
    left, right = (10**9 if side == -1 else side for side in window_size)
    outputs = []
    for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        back = torch.arange(b - a)[:, None] - torch.arange(b - a)[None]
        seen = (back <= left) & (-back <= right)
        outputs.append(softmax_attention(q[a:b], k[a:b], v[a:b], seen, scale or q.shape[-1] ** -0.5))
    return torch.cat(outputs)


def fake_fusion(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0,
    keep_prob=1.0, pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None,
    actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """torch_npu.npu_fusion_attention 2.13 in layout TND: sequence ends as a list, modes 3 and 4."""
    assert input_layout == "TND"
    assert head_num == query.shape[1]
    assert keep_prob == 1.0
    assert isinstance(actual_seq_qlen, list)
    assert actual_seq_qlen == actual_seq_kvlen
    assert actual_seq_qlen[-1] == len(query)
    # True masks a key out; modes 2 to 4 read a compressed upper triangle of this one size.
    assert atten_mask.dtype == torch.bool
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    assert sparse_mode in (3, 4)
    if sparse_mode == 3:
        pre_tockens, next_tockens = 10**9, 0
    outputs, start = [], 0
    for end in actual_seq_qlen:
        n = end - start
        back = torch.arange(n)[:, None] - torch.arange(n)[None]
        seen = (back <= pre_tockens) & (-back <= next_tockens)
        outputs.append(softmax_attention(query[start:end], key[start:end], value[start:end], seen, scale))
        start = end
    return (torch.cat(outputs), *(torch.empty(0) for _ in range(2)))


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    with pytest.MonkeyPatch.context() as patch:
        fake: Any = types.ModuleType("torch_npu")
        fake.npu_fusion_attention = fake_fusion
        patch.setattr(torch_varlen, "varlen_attn", fake_flash)
        patch.setitem(sys.modules, "torch_npu", fake)
        yield


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 4, 50]),
    scale=st.sampled_from([None, 0.7]),
)
def test_every_kernel_is_block_diagonal_causal_attention(kernel, lengths, heads, window, scale) -> None:
    total = sum(lengths)
    g = torch.Generator().manual_seed(total)
    q, k, v = (
        torch.randn(total, h, 4, generator=g, dtype=torch.float64) for h in (heads[0], *[heads[1]] * 2)
    )
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(total)[:, None] - torch.arange(total)[None]
    seen = (owner[:, None] == owner[None]) & (back >= 0) & (back < (window or total))
    got = KERNELS[kernel](q, k, v, Layout.of(lengths), scale, window)
    torch.testing.assert_close(got, softmax_attention(q, k, v, seen, scale or 0.5), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 3])
def test_every_kernel_attends_to_whole_sequences_that_share_tokens(kernel: str, window: int | None) -> None:
    """Paths 0-1-2-3-4, 0-1-5-6 and 0-1-5-7-8-9-10-11-12, and one by itself: result and gradient of every token."""
    paths = [[0, 1, 2, 3, 4], [0, 1, 5, 6], [0, 1, 5, 7, 8, 9, 10, 11, 12], [13, 14]]
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(15, h, 4, generator=g, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    wanted = torch.zeros(15, 4, 4, dtype=torch.float64)
    for path in paths:
        n = len(path)
        back = torch.arange(n)[:, None] - torch.arange(n)[None]
        out = softmax_attention(*(x[path] for x in qkv), (back >= 0) & (back < (window or n)), 0.5)
        wanted = wanted.index_copy(0, torch.tensor(path), out)
    layout = Layout.of([len(p) for p in paths], path=np.concatenate(paths))
    got = KERNELS[kernel](*qkv, layout, None, window)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
    weight = torch.randn(wanted.shape, generator=g, dtype=torch.float64)
    # Each token's result counts once, so its gradient is that of the last path that gave it above.
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), qkv) for x in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_platforms_choose_and_half_precision_decides() -> None:
    assert choose_kernel(CpuPlatform.attention, torch.bfloat16) == "sdpa"
    assert choose_kernel(CudaPlatform.attention, torch.bfloat16) == "flash"
    assert choose_kernel(CudaPlatform.attention, torch.float32) == "sdpa"
    assert choose_kernel(NpuPlatform.attention, torch.bfloat16) == "npu_fusion"
    assert choose_kernel(NpuPlatform.attention, torch.float32) == "sdpa"


def test_a_torch_without_the_flash_binding_takes_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch_varlen, "varlen_attn", lambda q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False: q
    )
    assert not varlen.flash_available()
    assert choose_kernel("flash", torch.bfloat16) == "sdpa"


def test_torchs_own_binding_takes_the_call() -> None:
    """The fake replaced it; here the real one's signature is bound to the arguments that we give."""
    positional = [object()] * 7
    inspect.signature(REAL_FLASH).bind(*positional, scale=1.0, window_size=(-1, 0), enable_gqa=True)
