"""Compression and decompression of blocks on CUDA: the same bytes as the twin, and its errors."""

import numpy as np
import pytest

from pagekernels.cuda.compress import compress_defines
from pagekernels.layout import LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout, pack_entry
from pagekernels.twin import TwinOps, decode, encode
from tests.cpu.kernel_cases import FORMATS
from tests.gpu.gpu_ops import GpuOps, precompile

DIMS = [(128, 128), (64, 64), (80, 96), (20, 12), (7, 3), (192, 128), (512, 512)]
SIZES = [8, 16, 128]


def layout_of(fmt, dims, size):
    """Two runs of layers of one shape each, one of them with a window in between, and a shape of its own at the end."""
    layers = (LayerShape(3, *dims), LayerShape(3, *dims, 5), LayerShape(2, *dims), LayerShape(1, 8, 4))
    return PagedLayout(size, layers, fmt, LAYOUT_SWIZZLED)


@pytest.fixture(scope="module", autouse=True)
def _compiled(device):
    layouts = [layout_of(fmt, dims, size) for fmt in FORMATS for dims in DIMS for size in SIZES]
    shapes = [(layout, layout.layers[index]) for layout in layouts for index in (0, 3)]
    precompile(device, [("compress.cu", compress_defines(layout, shape)) for layout, shape in shapes])


def pool(layout, blocks, seed=0):
    """Blocks of normal numbers, with the channels, heads and numbers that are hard to store."""
    rng, size = np.random.default_rng(seed), layout.block_elements
    slab = np.full(2 * blocks * layout.block_bytes, 0xFF, np.uint8)
    for block in range(blocks):
        x = rng.normal(size=size).astype(np.float32) * np.float32(2.0 ** rng.integers(-20, 12))
        x[:: rng.integers(3, 40)] += 50 * np.abs(x).max()
        x[size // 3 : size // 2] = 0
        if block % 5 == 3:
            x[rng.integers(size)] = rng.choice([np.inf, -np.inf, np.nan])
        if block % 5 == 4:
            x *= np.float32(2.0**-110)
        stored = encode(layout.format, x).view(np.uint8)
        slab[block * layout.block_bytes :][: stored.nbytes] = stored
    return slab


def entries(layout, fmt, units):
    return np.array([pack_entry(fmt, 0, int(unit)) for unit in units], np.uint32)


def some(layout, blocks, seed=1):
    """All blocks, shuffled, and as many units in the slab's other half."""
    rng, per = np.random.default_rng(seed), layout.units_per_block
    targets = blocks * per + rng.permutation(blocks * per)[:blocks]
    sources = entries(layout, layout.format, rng.permutation(blocks) * per)
    return sources, entries(layout, Format.FP8_E4M3, targets)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_compressed_blocks_have_the_bytes_and_the_errors_of_the_twin(device, fmt, dims, size):
    layout = layout_of(fmt, dims, size)
    slab = pool(layout, 7)
    expected, (sources, targets) = slab.copy(), some(layout, 7)
    errors = TwinOps(expected, layout).compress_blocks(sources, targets)
    ops = GpuOps(device, slab, layout)
    found = ops.compress_blocks(sources, targets)
    assert same_bytes(slab, expected)
    assert np.array_equal(np.isinf(found), np.isinf(errors))
    finite = np.isfinite(errors)
    assert finite.any()
    assert np.allclose(found[finite], errors[finite], rtol=1e-3)
    assert np.array_equal(ops.compress_blocks(sources, targets), found), "another run, other errors"
    assert same_bytes(slab, expected)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_decompressed_blocks_are_what_the_twin_reads(device, fmt, dims):
    layout = layout_of(fmt, dims, 16)
    slab = pool(layout, 7)
    sources, targets = some(layout, 7)
    TwinOps(slab, layout).compress_blocks(sources, targets)
    expected = slab.copy()
    back = sources[::-1].copy()
    TwinOps(expected, layout).decompress_blocks(targets, back)
    GpuOps(device, slab, layout).decompress_blocks(targets, back)
    # Any NaN is one.
    stored = np.float32 if fmt is Format.F32 else np.uint16
    ours, theirs = (decode(fmt, x.view(stored)) for x in (slab, expected))
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_more_blocks_than_one_launch_takes(device):
    layout = PagedLayout(8, (LayerShape(1, 8, 4),), Format.BF16, LAYOUT_SWIZZLED)
    slab = pool(layout, 600)
    expected, (sources, targets) = slab.copy(), some(layout, 600)
    errors = TwinOps(expected, layout).compress_blocks(sources, targets)
    found = GpuOps(device, slab, layout).compress_blocks(sources, targets)
    assert same_bytes(slab, expected)
    assert np.allclose(found[np.isfinite(errors)], errors[np.isfinite(errors)], rtol=1e-3)


def test_nothing_is_compressed_into_itself_or_out_of_another_format(device):
    layout = layout_of(Format.BF16, (7, 3), 8)
    ops, native = GpuOps(device, pool(layout, 2), layout), entries(layout, Format.BF16, [2])
    with pytest.raises(ValueError, match="must not overlap any source"):
        ops.compress_blocks(native, entries(layout, Format.FP8_E4M3, [3]))
    with pytest.raises(ValueError, match="sources"):
        ops.compress_blocks(entries(layout, Format.F16, [2]), entries(layout, Format.FP8_E4M3, [0]))
    with pytest.raises(ValueError, match="targets"):
        ops.decompress_blocks(entries(layout, Format.FP8_E4M3, [0]), entries(layout, Format.F16, [2]))


def same_bytes(ours, theirs):
    """Whether both slabs are equal, any NaN of a scale being one: in a block of NaN nothing else can differ."""
    differ = np.flatnonzero(ours != theirs) // 4
    scales = [slab.view(np.float32)[differ] for slab in (ours, theirs)]
    return all(np.isnan(scale).all() for scale in scales)
