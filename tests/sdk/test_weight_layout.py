"""The layout of weights on the wire: what a plan keeps apart, and what a checksum sees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.weights import ALIGN, ITEM_BYTES, checksum, plan

SHAPES = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(1, 40), max_size=3).map(tuple)),
    min_size=1,
    max_size=12,
)


@given(SHAPES, st.integers(16, 4096), st.none() | st.integers(1, 4096))
def test_tensors_lie_in_order_without_overlap_and_only_a_large_one_exceeds_a_bucket(
    shapes, limit: int, alone: int | None
) -> None:
    tensors = [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(shapes)]
    manifest = plan(tensors, limit, alone_bytes=alone)
    flat = [spec for bucket in manifest.buckets for spec in bucket.tensors]
    assert [(s.name, s.dtype, s.shape) for s in flat] == tensors
    for bucket in manifest.buckets:
        end = 0
        for spec in bucket.tensors:
            assert spec.offset % ALIGN == 0
            assert spec.offset >= end
            assert spec.nbytes == math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
            end = spec.offset + spec.nbytes
        assert end <= bucket.nbytes
        assert bucket.nbytes % ALIGN == 0
        assert len(bucket.tensors) == 1 or end <= limit
        assert len(bucket.tensors) == 1 or alone is None or all(s.nbytes < alone for s in bucket.tensors)


def test_a_tensor_larger_than_a_bucket_is_a_bucket_of_its_own() -> None:
    sizes = [4, 100, 4, 4]
    manifest = plan([(f"t{i}", "float32", (n,)) for i, n in enumerate(sizes)], 64)
    assert [[t.name for t in b.tensors] for b in manifest.buckets] == [["t0"], ["t1"], ["t2", "t3"]]


def test_a_tensor_that_goes_alone_leaves_the_small_ones_around_it_packed() -> None:
    sizes = [4, 4, 8, 4, 4]
    manifest = plan([(f"t{i}", "float32", (n,)) for i, n in enumerate(sizes)], 64, alone_bytes=32)
    names = [[t.name for t in b.tensors] for b in manifest.buckets]
    assert names == [["t0", "t1"], ["t2"], ["t3", "t4"]]


WORDS = st.integers(0, 2**32).map(lambda seed: np.random.default_rng(seed).integers(-(2**63), 2**63, 70_000))


@pytest.mark.parametrize("n", [2, 63, 64, 1000, 70_000])
def test_every_flipped_bit_shows(n: int) -> None:
    words = np.random.default_rng(n).integers(-(2**63), 2**63, n)
    right = checksum(words)
    assert checksum(words.copy()) == right
    for at in {0, n // 2, n - 1}:
        for bit in (0, 31, 63):
            wrong = words.copy()
            wrong.view(np.uint64)[at] ^= np.uint64(1 << bit)
            assert checksum(wrong) != right, (at, bit)


@given(WORDS, st.integers(0, 1092), st.integers(0, 1092), st.integers(1, 69_999))
def test_blocks_that_changed_places_and_shifts_show(words: np.ndarray, i: int, j: int, by: int) -> None:
    right = checksum(words)
    assert checksum(np.roll(words, by)) != right
    assert checksum(words[:-1]) != right
    swapped = words.copy()
    a, b = slice(64 * i, 64 * i + 64), slice(64 * j, 64 * j + 64)
    swapped[a], swapped[b] = words[b], words[a]
    assert (checksum(swapped) == right) == (i == j)


def test_a_torch_tensor_has_the_checksum_of_the_same_bytes_in_numpy() -> None:
    torch = pytest.importorskip("torch")
    words = np.random.default_rng(0).integers(-(2**63), 2**63, 70_001)
    assert checksum(torch.from_numpy(words)) == checksum(words)
