"""Append, gather and block copy on CUDA: the same bytes as the twin."""

from dataclasses import replace

import numpy as np
import pytest

from pagekernels.layout import LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout, pack_entry
from pagekernels.twin import TwinOps, decode, encode
from tests.cpu.kernel_cases import FORMATS, LAYER, Case
from tests.gpu.gpu_ops import GpuOps, jobs_of, precompile

DIMS = [(128, 128), (64, 64), (32, 16), (20, 12), (8, 1), (7, 3), (192, 128), (512, 512)]
EDGES = np.array([0.0, -0.0, 1e-8, -6e-8, 3e-5, 65504.0, 65519.9, 65520.0, 1e5, -1e38, np.inf, np.nan, 1.0039, 1.0117])


def case_of(fmt, dims, size=16):
    return Case((), fmt, size, heads=3, dims=dims, version=LAYOUT_SWIZZLED)


@pytest.fixture(scope="module", autouse=True)
def _compiled(device):
    every = [case_of(fmt, dims) for fmt in FORMATS for dims in DIMS]
    jobs = [job for case in every for job in (*jobs_of(case), *jobs_of(case, Format.F32)) if job[0] != "attend.cu"]
    precompile(device, jobs)


def pool(layout, blocks=6):
    return np.full(blocks * layout.block_bytes, 0xFF, np.uint8)


def tokens(count, dims, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(count, 3, d)).astype(np.float32) for d in dims]


@pytest.mark.parametrize("size", [8, 16, 128])
@pytest.mark.parametrize("given", ["float32", "native", "strided"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_append_writes_the_same_bytes_as_the_twin_and_skips_negative_slots(device, fmt, dims, given, size):
    layout = case_of(fmt, dims, size).layout
    slab = pool(layout)
    other, before = slab.copy(), slab.copy()
    k, v = tokens(5, dims)
    k[0, 0, : len(EDGES)] = EDGES[: dims[0]]
    if given != "float32":
        k, v = encode(fmt, k), encode(fmt, v)
    if given == "strided":
        k, v = (np.ascontiguousarray(np.pad(x, ((0, 0), (0, 1), (1, 2))).transpose(1, 0, 2)) for x in (k, v))
        k, v = (x.transpose(1, 0, 2)[:, :3, 1:-2] for x in (k, v))
    slots = np.array([0, size * 2 * layout.units_per_block + 1, -1, 5 * size * layout.units_per_block + 7, -(2**40)])
    GpuOps(device, slab, layout).append(LAYER, k, v, slots)
    TwinOps(other, layout).append(LAYER, k, v, slots)
    if given == "float32" and fmt is not Format.F32:  # any NaN is one
        ours, theirs = (decode(fmt, x.view(np.uint16)) for x in (slab, other))
        assert np.array_equal(ours, theirs, equal_nan=True)
    else:
        assert np.array_equal(slab, other)
    assert 0 < np.count_nonzero(slab != before) <= 3 * 3 * sum(dims) * fmt.itemsize


@pytest.mark.parametrize("first", [0, 5, 37])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_gather_reads_what_the_twin_reads(device, fmt, dims, first):
    """Native and FP8 blocks, into the native format and float32, head-major and token-major."""
    case = replace(case_of(fmt, dims), sequences=((0, 117),), group=1, fp8_every=3)
    slab, _, batch, _ = case.build()
    ops, table = GpuOps(device, slab, case.layout), batch.block_tables[0]
    for dtype in {np.dtype(np.float32), np.dtype(case.dtype())}:
        expected = [np.zeros((3, 117, d), dtype) for d in dims]
        TwinOps(slab, case.layout).gather(LAYER, table, 117, *expected)
        for axes in ((0, 1, 2), (1, 0, 2)):
            shape = (3, 117 - first)
            got = [np.zeros((shape[axes[0]], shape[axes[1]], d), dtype).transpose(axes) for d in dims]
            ops.gather(LAYER, table, 117 - first, *got, first=first)
            for ours, theirs in zip(got, expected, strict=True):
                assert np.array_equal(ours, theirs[:, first:])


@pytest.mark.parametrize("fmt", list(Format), ids=lambda f: f.name)
@pytest.mark.parametrize("count", [0, 1, 300])
def test_copy_blocks_copies_whole_blocks_and_nothing_else(device, fmt, count):
    layout = PagedLayout(8, (LayerShape(2, 8, 8), LayerShape(3, 20, 12)), Format.F32, LAYOUT_SWIZZLED)
    slab = np.random.default_rng(0).integers(0, 256, 602 * layout.block_bytes, np.uint8)
    expected, order = slab.copy(), np.random.default_rng(1).permutation(602)
    entries = [[pack_entry(fmt, 0, int(b) * 4) for b in part] for part in (order[:count], order[300 : 300 + count])]
    sources, targets = (np.array(part, np.uint32) for part in entries)
    TwinOps(expected, layout).copy_blocks(sources, targets)
    GpuOps(device, slab, layout).copy_blocks(sources, targets)
    assert np.array_equal(slab, expected)


def test_copies_of_two_formats_and_unknown_slabs_are_refused(device):
    layout = case_of(Format.BF16, (8, 1)).layout
    ops = GpuOps(device, pool(layout), layout)
    one, two, far = (
        np.array([pack_entry(*x)], np.uint32) for x in ((Format.BF16, 0, 0), (Format.F16, 0, 0), (Format.BF16, 1, 0))
    )
    with pytest.raises(ValueError, match="both must be blocks of one format"):
        ops.copy_blocks(one, two)
    with pytest.raises(ValueError, match="in a slab that is not mapped: 1 are"):
        ops.copy_blocks(one, far)


def test_gather_refuses_more_tokens_than_the_table_has(device):
    layout = case_of(Format.F32, (8, 1)).layout
    ops = GpuOps(device, pool(layout), layout)
    table = np.array([pack_entry(Format.F32, 0, 0)], np.uint32)
    with pytest.raises(ValueError, match="the batch has 2 sequences of up to 16 tokens"):
        ops.gather(LAYER, table, 17, np.zeros((3, 17, 8), np.float32), np.zeros((3, 17, 1), np.float32))
