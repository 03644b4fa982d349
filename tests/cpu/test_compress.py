"""Compressing blocks to FP8 and back: bytes, errors and refusals, by the CPU kernels and the twin."""

import numpy as np
import pytest

from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import LAYOUT_LINEAR, LAYOUT_SWIZZLED, MIN_SCALE, Format, LayerShape, PagedLayout, pack_entry
from pagekernels.twin import TwinOps, decode, decode_e4m3, encode, encode_e4m3, guard_error

FORMATS = (Format.F32, Format.F16, Format.BF16)
BOTH = (CpuOps, TwinOps)
FP8 = Format.FP8_E4M3
SHAPES = (LayerShape(2, 20, 12), LayerShape(1, 64, 80), LayerShape(3, 128, 8))
BLOCKS = 5


def entries(fmt, *units):
    return np.array([pack_entry(fmt, 0, unit) for unit in units], np.uint32)


class Pool:
    """BLOCKS native blocks of `draw(rng, block, shape)`, then BLOCKS units for FP8, then BLOCKS native ones: NaN."""

    def __init__(self, draw, fmt=Format.F32, block_size=8, version=LAYOUT_LINEAR, shapes=SHAPES):
        self.layout = layout = PagedLayout(block_size, shapes, fmt, version)
        self.size, rng = block_size, np.random.default_rng(0)
        units = layout.units_per_block
        self.slab = np.full((2 * units + 1) * BLOCKS * layout.unit_bytes, 0xFF, np.uint8)
        order = np.arange(BLOCKS)
        self.sources = entries(fmt, *(order * units))
        self.targets = entries(FP8, *(BLOCKS * units + order[::-1]))
        self.restored = entries(fmt, *(BLOCKS * (units + 1) + order * units))
        self.tokens = []
        for layer, shape in enumerate(shapes):
            pair = []
            for kind, dim in enumerate((shape.head_dim_k, shape.head_dim_v)):
                drawn = [draw(rng, b, (block_size, shape.num_kv_heads, dim), kind) for b in range(BLOCKS)]
                pair.append(encode(fmt, np.concatenate(drawn)))
            slots = (order[:, None] * units * block_size + np.arange(block_size)).ravel()
            TwinOps(self.slab, layout).append(layer, *pair, slots)
            self.tokens.append([decode(fmt, x).reshape(BLOCKS, block_size, *x.shape[1:]) for x in pair])

    def read(self, table, layer, dtype=np.float32):
        """(k, v) [blocks, B, H, D] of a table, by the twin."""
        shape, length = self.layout.layers[layer], len(table) * self.size
        into = [np.zeros((shape.num_kv_heads, length, d), dtype) for d in (shape.head_dim_k, shape.head_dim_v)]
        TwinOps(self.slab, self.layout).gather(layer, table, length, *into)
        return [x.transpose(1, 0, 2).reshape(len(table), self.size, x.shape[0], -1) for x in into]

    def scales(self, target):
        """The scales [num_scales] of one FP8 block, as they are stored."""
        at = (int(target) & (2**26 - 1)) * self.layout.unit_bytes + self.layout.block_elements
        return self.slab[at:][: 4 * self.layout.num_scales].view(np.float32)


def normal(rng, block, shape, kind):
    return rng.normal(size=shape).astype(np.float32)


def strange(rng, block, shape, kind):
    """Block 0 is normal, 1 large, 2 tiny, 3 the same in all tokens or zero, 4 not finite in one head."""
    x = rng.normal(size=shape).astype(np.float32)
    if block == 1:
        x *= np.float32(10000.0)
    elif block == 2:
        x *= np.float32(1e-42) if kind else np.float32(1e-7)
    elif block == 3:
        x[:] = 0.0 if kind else np.linspace(-1, 2, shape[-1])
        x[:, -1] *= -0.0
    elif block == 4:
        x[3, -1, 1] = (np.nan, np.inf)[kind]
    return x


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("draw", [normal, strange])
def test_the_kernels_write_the_same_bytes_as_the_twin_and_only_those(fmt, block_size, draw):
    ours, theirs = (Pool(draw, fmt, block_size) for _ in BOTH)
    layout, before = ours.layout, ours.slab.copy()
    errors = CpuOps(ours.slab, layout).compress_blocks(ours.sources, ours.targets)
    expected = TwinOps(theirs.slab, layout).compress_blocks(theirs.sources, theirs.targets)
    assert np.array_equal(ours.slab, theirs.slab)
    np.testing.assert_allclose(errors, expected, rtol=1e-6)
    assert errors.dtype == expected.dtype == np.float32
    rest = np.ones((len(before) // layout.unit_bytes, layout.unit_bytes), np.bool_)
    first = BLOCKS * layout.units_per_block
    rest[first : first + BLOCKS, : layout.block_elements + 4 * layout.num_scales] = False
    assert np.array_equal(ours.slab[rest.ravel()], before[rest.ravel()])
    CpuOps(ours.slab, layout).decompress_blocks(ours.targets, ours.restored)
    TwinOps(theirs.slab, layout).decompress_blocks(theirs.targets, theirs.restored)
    same = ours.slab == theirs.slab
    if not same.all():  # any NaN is one
        assert draw is strange
        for layer in range(len(SHAPES)):
            for x, y in zip(ours.read(ours.restored, layer), theirs.read(theirs.restored, layer), strict=True):
                assert np.array_equal(x, y, equal_nan=True)


@pytest.mark.parametrize("ops_of", BOTH)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_every_head_has_scales_of_its_own_and_reads_as_scale_times_element(ops_of, fmt):
    pool = Pool(normal, fmt)
    ops_of(pool.slab, pool.layout).compress_blocks(pool.sources, pool.targets)
    for layer in range(len(SHAPES)):
        first = pool.layout.scale_offsets[layer]
        for kind, read in enumerate(pool.read(pool.targets, layer)):
            x = pool.tokens[layer][kind]
            scale = np.abs(x).max(axis=(1, 3), keepdims=True) / np.float32(448.0)
            assert np.array_equal(read, decode_e4m3(encode_e4m3(x * (np.float32(1) / scale))) * scale)
            for b, target in enumerate(pool.targets):
                assert np.array_equal(pool.scales(target)[first + kind :: 2][: x.shape[2]], scale[b, 0, :, 0])


@pytest.mark.parametrize("ops_of", BOTH)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_decompressing_gives_the_product_rounded_and_compressing_twice_the_same_bits(ops_of, fmt):
    pool = Pool(normal, fmt)
    ops = ops_of(pool.slab, pool.layout)
    ops.compress_blocks(pool.sources, pool.targets)
    once = pool.slab.copy()
    ops.compress_blocks(pool.sources, pool.targets)
    assert np.array_equal(pool.slab, once)
    ops.decompress_blocks(pool.targets, pool.restored)
    dtype = np.float32 if fmt is Format.F32 else np.uint16
    for layer in range(len(SHAPES)):
        products, restored = pool.read(pool.targets, layer), pool.read(pool.restored, layer, dtype)
        for product, stored in zip(products, restored, strict=True):
            assert np.array_equal(encode(fmt, product), stored)


@pytest.mark.parametrize("ops_of", BOTH)
def test_every_value_up_to_the_largest_is_rounded_as_the_twin_encodes_it(ops_of):
    """448 in every head makes the scale 1, so that elements are stored as they are."""
    halves = np.arange(0x5F01, dtype=np.uint16).view(np.float16).astype(np.float32)
    near = np.concatenate([halves, -halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves[:-1], np.inf)])
    values = np.resize(near.astype(np.float32), (BLOCKS, 128, 1, 155))
    values[:, 0] = 448.0
    assert values.size > near.size + BLOCKS * 155
    pool = Pool(lambda rng, b, shape, kind: values[b], block_size=128, shapes=(LayerShape(1, 155, 155),))
    ops_of(pool.slab, pool.layout).compress_blocks(pool.sources, pool.targets)
    for read in pool.read(pool.targets, 0):
        assert np.array_equal(read, decode_e4m3(encode_e4m3(values)))


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_a_swizzled_pool_reads_as_a_linear_one_and_restores_the_same(fmt, block_size):
    pools = [Pool(normal, fmt, block_size, version) for version in (LAYOUT_LINEAR, LAYOUT_SWIZZLED)]
    errors = []
    for pool in pools:
        ops = TwinOps(pool.slab, pool.layout)
        errors.append(ops.compress_blocks(pool.sources, pool.targets))
        ops.decompress_blocks(pool.targets, pool.restored)
    assert np.array_equal(*errors)
    for layer in range(len(SHAPES)):
        for table in ("targets", "restored"):
            linear, swizzled = (pool.read(getattr(pool, table), layer) for pool in pools)
            assert all(np.array_equal(x, y) for x, y in zip(linear, swizzled, strict=True))
    units = [pool.slab.reshape(-1, pool.layout.unit_bytes)[BLOCKS * pool.layout.units_per_block] for pool in pools]
    assert not np.array_equal(*units)


@pytest.mark.parametrize("ops_of", BOTH)
def test_errors_are_the_worst_over_layers_and_heads(ops_of):
    pool = Pool(normal)
    errors = ops_of(pool.slab, pool.layout).compress_blocks(pool.sources, pool.targets)
    worst = np.zeros((BLOCKS, 2))
    for layer in range(len(SHAPES)):
        for kind, read in enumerate(pool.read(pool.targets, layer)):
            x = pool.tokens[layer][kind].astype(np.float64)
            about = x - x.mean(axis=1, keepdims=True) if kind == 0 else x
            ratio = np.linalg.norm(x - read, axis=(1, 3)) / np.linalg.norm(about, axis=(1, 3))
            worst[:, kind] = np.maximum(worst[:, kind], ratio.max(axis=1))
    np.testing.assert_allclose(errors, worst, rtol=1e-6)
    assert 0.02 < worst.min() < worst.max() < 0.05


@pytest.mark.parametrize("ops_of", BOTH)
def test_the_error_of_k_sees_key_outliers_which_a_plain_relative_error_does_not(ops_of):
    def outliers(rng, block, shape, kind):
        x = normal(rng, block, shape, kind)
        x[:, :, :4] += np.array([30, -60, 90, -120], np.float32)
        return x

    pool = Pool(outliers, Format.BF16, 16, shapes=(LayerShape(2, 64, 64),))
    errors = ops_of(pool.slab, pool.layout).compress_blocks(pool.sources, pool.targets)
    assert errors[:, 0].min() > 0.2
    assert errors[:, 1].max() < 0.05
    x, read = pool.tokens[0][0], pool.read(pool.targets, 0)[0]
    assert np.linalg.norm(x - read) / np.linalg.norm(x) < 0.05


@pytest.mark.parametrize("ops_of", BOTH)
def test_zeros_stay_zeros_and_what_cannot_be_kept_has_an_infinite_error(ops_of):
    pool = Pool(strange)
    errors = ops_of(pool.slab, pool.layout).compress_blocks(pool.sources, pool.targets)
    assert np.isfinite(errors[:3, 0]).all()
    assert errors[2, 1] == 1.0, "V lies below what the least scale can tell apart"
    assert errors[3].tolist() == [np.inf, 0.0], "K is the same in all tokens, but not kept exactly"
    assert errors[4].tolist() == [np.inf, np.inf]
    assert pool.scales(pool.targets[2])[1] == np.float32(MIN_SCALE)
    assert pool.scales(pool.targets[3])[1] == 1.0
    k, v = pool.read(pool.targets, 0)
    assert not v[3].any()
    assert np.isnan(k[4, :, -1]).all()
    assert np.isnan(v[4, :, -1]).all()
    assert np.isfinite(k[4, :, 0]).all()


def test_the_guard_is_zero_for_zero_and_infinite_over_zero():
    zeros, ones = np.zeros((8, 4), np.float32), np.ones((8, 4), np.float32)
    assert guard_error(zeros, zeros, centred=False) == guard_error(ones, ones, centred=True) == 0.0
    assert guard_error(ones, zeros, centred=True) == guard_error(zeros, ones, centred=False) == np.inf
    assert guard_error(ones, ones * np.nan, centred=False) == np.inf
    assert guard_error(ones, zeros, centred=False) == 1.0


@pytest.mark.parametrize("ops_of", BOTH)
def test_no_blocks_have_no_errors(ops_of):
    pool = Pool(normal)
    ops, none = ops_of(pool.slab, pool.layout), np.empty(0, np.uint32)
    assert ops.compress_blocks(none, none).shape == (0, 2)
    assert ops.decompress_blocks(none, none) is None


BF16 = Format.BF16
UNITS = 5 * BLOCKS


@pytest.mark.parametrize("ops_of", BOTH)
@pytest.mark.parametrize(
    ("sources", "targets", "complaint"),
    [
        (entries(BF16, 0, 2), entries(FP8, 9), r"targets has shape \(1,\), but must be \[N\]: N is 2, not 1"),
        (entries(BF16, 0).astype(np.int64), entries(FP8, 9), "sources is int64, but must be uint32"),
        (entries(BF16, 0)[None], entries(FP8, 9), r"sources has shape \(1, 1\), but must be \[N\]"),
        (
            np.concatenate([entries(BF16, 0), entries(Format.F16, 2)]),
            entries(FP8, 9, 10),
            r"sources\[1\] is 0x40000002, but must be a block of format 3 \(BF16\), not 2",
        ),
        (np.zeros(1, np.uint32), entries(FP8, 9), r"sources\[0\] is 0x00000000, but must be .* not 0"),
        (np.full(1, 0xFFFFFFFF, np.uint32), entries(FP8, 9), r"sources\[0\] is 0xffffffff, but must be .* not 7"),
        (entries(BF16, 0), entries(BF16, 8), r"targets\[0\] is 0x60000008, but must be .* 4 \(FP8_E4M3\), not 3"),
        (entries(BF16, UNITS - 1), entries(FP8, 9), r"sources\[0\] is 0x60000018, but the slab has 25 units and no"),
        (entries(BF16, 0), entries(FP8, UNITS), r"targets\[0\] is 0x80000019, but the slab has 25 units"),
        (entries(BF16, 0) | 1 << 26, entries(FP8, 9), r"sources\[0\] is 0x64000000, but the slab .* no other slab"),
        (entries(BF16, 0, 2), entries(FP8, 9, 0), r"targets\[1\] is 0x80000000, but must not overlap any source"),
        (entries(BF16, 0, 2), entries(FP8, 3, 9), r"targets\[0\] is 0x80000003, but must not overlap any source"),
        (entries(BF16, 0, 2), entries(FP8, 9, 9), r"targets\[1\] is 0x80000009, but must not overlap another target"),
    ],
)
def test_compress_refuses_what_does_not_fit_and_writes_nothing(ops_of, sources, targets, complaint):
    pool = Pool(normal, BF16)
    before = pool.slab.copy()
    with pytest.raises(ValueError, match=complaint):
        ops_of(pool.slab, pool.layout).compress_blocks(sources, targets)
    assert np.array_equal(pool.slab, before)


@pytest.mark.parametrize("ops_of", BOTH)
@pytest.mark.parametrize(
    ("sources", "targets", "complaint"),
    [
        (entries(BF16, 0), entries(BF16, 8), r"sources\[0\] is 0x60000000, but must be .* 4 \(FP8_E4M3\), not 3"),
        (entries(FP8, 0), entries(FP8, 8), r"targets\[0\] is 0x80000008, but must be .* 3 \(BF16\), not 4"),
        (entries(FP8, 0), entries(BF16, UNITS - 1), r"targets\[0\] is 0x60000018, but the slab has 25 units"),
        (entries(FP8, 0, 5), entries(BF16, 8, 4), r"targets\[1\] is 0x60000004, but must not overlap any source"),
        (entries(FP8, 0, 1), entries(BF16, 8, 9), r"targets\[1\] is 0x60000009, but must not overlap another target"),
    ],
)
def test_decompress_refuses_what_does_not_fit_and_writes_nothing(ops_of, sources, targets, complaint):
    pool = Pool(normal, BF16)
    before = pool.slab.copy()
    with pytest.raises(ValueError, match=complaint):
        ops_of(pool.slab, pool.layout).decompress_blocks(sources, targets)
    assert np.array_equal(pool.slab, before)
