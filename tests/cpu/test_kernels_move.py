"""Append, copy and gather, and what bad arguments are told."""

import numpy as np
import pytest
import torch

import pagekernels
from pagekernels.cpu import compress, configure, move, warm_up
from pagekernels.cpu.attend import attend as attend_kernel
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import LAYOUT_LINEAR, LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout, pack_entry, swizzle
from pagekernels.ops import AttentionBatch, AttentionParams
from pagekernels.twin import TwinOps, decode, encode

FORMATS = (Format.F32, Format.F16, Format.BF16)
BOTH = (CpuOps, TwinOps)
SHAPES = (LayerShape(2, 8, 8), LayerShape(3, 20, 12))
EDGES = np.array(
    [0.0, -0.0, 1.0, 1e-8, -6e-8, 3e-5, 65504.0, 65519.9, 65520.0, 1e5, -1e38, np.inf, np.nan, 1.00390625, 1.0117188]
)


def pool(fmt, blocks=6, block_size=8):
    layout = PagedLayout(block_size, SHAPES, fmt)
    return layout, np.full(blocks * layout.block_bytes, 0xFF, np.uint8)


def tokens(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 3, 20)).astype(np.float32), rng.normal(size=(count, 3, 12)).astype(np.float32)


@pytest.mark.parametrize("given", ["float32", "native"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_append_writes_the_same_bytes_as_the_twin_and_skips_negative_slots(fmt, given):
    layout, slab = pool(fmt)
    other, before = slab.copy(), slab.copy()
    k, v = tokens(5)
    k[0, 0, : len(EDGES)] = EDGES
    if given == "native":
        k, v = encode(fmt, k), encode(fmt, v)
    slots = np.array([0, 17, -1, 5 * 8 * layout.units_per_block + 7, -(2**40)])
    CpuOps(slab, layout).append(1, k, v, slots)
    TwinOps(other, layout).append(1, k, v, slots)
    assert np.array_equal(slab, other)
    assert 0 < np.count_nonzero(slab != before) <= 3 * 3 * (20 + 12) * fmt.itemsize


@pytest.mark.parametrize("ops_of", BOTH)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_gather_gives_back_what_append_wrote(ops_of, fmt):
    layout, slab = pool(fmt)
    ops = ops_of(slab, layout)
    k, v = tokens(19)
    k, v = encode(fmt, k), encode(fmt, v)
    units = [4, 0, 2] if fmt is not Format.F32 else [16, 0, 8]
    table = np.array([*(pack_entry(fmt, 0, u) for u in units), 0xFFFFFFFF], np.uint32)
    ops.append(1, k, v, np.array([units[p // 8] * 8 + p % 8 for p in range(19)]))
    for dtype, convert in ((k.dtype, lambda x: x), (np.float32, lambda x: decode(fmt, x))):
        got_k, got_v = np.zeros((3, 19, 20), dtype), np.zeros((3, 19, 12), dtype)
        ops.gather(1, table, 19, got_k, got_v)
        assert np.array_equal(got_k, convert(k).transpose(1, 0, 2))
        assert np.array_equal(got_v, convert(v).transpose(1, 0, 2))


@pytest.mark.parametrize("fmt", [Format.F16, Format.BF16], ids=lambda f: f.name)
def test_every_16_bit_pattern_is_read_exactly(fmt):
    layout, slab = pool(fmt, blocks=350, block_size=8)
    patterns = np.arange(65536, dtype=np.uint16)
    k = np.resize(patterns, (1093, 3, 20))
    v = np.zeros((1093, 3, 12), np.uint16)
    ops = CpuOps(slab, layout)
    ops.append(1, k, v, np.arange(1093) // 8 * 16 + np.arange(1093) % 8)
    table = np.array([pack_entry(fmt, 0, 2 * b) for b in range(137)], np.uint32)
    got_k, got_v = np.zeros((3, 1093, 20), np.float32), np.zeros((3, 1093, 12), np.float32)
    ops.gather(1, table, 1093, got_k, got_v)
    assert np.array_equal(got_k.transpose(1, 0, 2), decode(fmt, k), equal_nan=True)


@pytest.mark.parametrize("ops_of", BOTH)
@pytest.mark.parametrize("fmt", list(Format), ids=lambda f: f.name)
def test_copy_blocks_copies_whole_blocks_and_nothing_else(ops_of, fmt):
    layout, slab = pool(fmt)
    slab[:] = np.random.default_rng(0).integers(0, 256, slab.size, np.uint8)
    before, size = slab.reshape(6, -1).copy(), layout.units_per_block
    entry = [pack_entry(fmt, 0, b * size) for b in range(6)]
    ops_of(slab, layout).copy_blocks(np.array(entry[:2], np.uint32), np.array([entry[5], entry[3]], np.uint32))
    assert np.array_equal(slab.reshape(6, -1), before[[0, 1, 2, 1, 4, 0]])


def test_a_swizzled_pool_gives_back_what_a_linear_one_does_from_other_bytes():
    """Rows of 128 bytes or a multiple are swizzled, others are not; see layout.LAYOUT_SWIZZLED."""
    shape, slabs = LayerShape(2, 64, 20), []
    rng = np.random.default_rng(0)
    k, v = (encode(Format.BF16, rng.normal(size=(19, 2, d)).astype(np.float32)) for d in (64, 20))
    table = np.array([pack_entry(Format.BF16, 0, u) for u in (4, 0, 2)], np.uint32)
    for version in (LAYOUT_LINEAR, LAYOUT_SWIZZLED):
        layout = PagedLayout(8, (shape,), Format.BF16, version)
        slabs.append(np.zeros(3 * layout.block_bytes, np.uint8))
        ops = TwinOps(slabs[-1], layout)
        ops.append(0, k, v, np.array([(4, 0, 2)[p // 8] * 8 + p % 8 for p in range(19)]))
        got_k, got_v = np.zeros((2, 19, 64), np.uint16), np.zeros((2, 19, 20), np.uint16)
        ops.gather(0, table, 19, got_k, got_v)
        assert np.array_equal(got_k.transpose(1, 0, 2), k)
        assert np.array_equal(got_v.transpose(1, 0, 2), v)
    rows = [slab.view(np.uint16)[4 * layout.unit_bytes // 2 :][: 8 * 64].reshape(8, 8, 8) for slab in slabs]
    assert np.array_equal(rows[0][:, 0], k[:8, 0, :8])
    for row in range(8):
        assert np.array_equal(rows[1][row], rows[0][row, [c ^ swizzle(row, 128) for c in range(8)]])
    assert not np.array_equal(rows[0], rows[1])


def test_every_e4m3_byte_is_decoded_as_torch_decodes_it():
    stored = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(stored).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(decode(Format.FP8_E4M3, stored), expected, equal_nan=True)


def test_the_twin_multiplies_an_fp8_block_with_its_own_scales():
    layout = PagedLayout(8, SHAPES, Format.BF16)
    slab = np.full(3 * layout.unit_bytes, 0x38, np.uint8)  # 1.0 in every element
    ops = TwinOps(slab, layout)
    scales = slab[layout.unit_bytes + layout.block_elements :][: 4 * layout.num_scales].view(np.float32)
    scales[:] = np.arange(len(scales))
    k, v = np.zeros((3, 5, 20), np.float32), np.zeros((3, 5, 12), np.float32)
    ops.gather(1, np.array([pack_entry(Format.FP8_E4M3, 0, 1)], np.uint32), 5, k, v)
    first = layout.scale_offsets[1]
    assert [k[h, 4, 3] for h in range(3)] == [first, first + 2, first + 4]
    assert [v[h, 0, 11] for h in range(3)] == [first + 1, first + 3, first + 5]


def test_the_cpu_kernels_refuse_a_swizzled_pool():
    layout = PagedLayout(8, SHAPES, Format.BF16, LAYOUT_SWIZZLED)
    with pytest.raises(ValueError, match=r"layout.version is 2, but the CPU kernels read version 1 only"):
        CpuOps(np.zeros(layout.block_bytes, np.uint8), layout)


FIRST_BLOCK = pack_entry(Format.F32, 0, 0)


def batch(cu=(0, 2), kv=(9,), columns=2, entry=FIRST_BLOCK):
    tables = np.full((len(kv), columns), entry, np.uint32)
    return AttentionBatch(np.array(cu, np.int32), np.array(kv, np.int32), tables)


def attend(ops, q=(2, 6, 20), out=(2, 6, 12), the_batch=None, layer=1, **params):
    ops.attend(
        layer, np.zeros(q, np.float32), np.zeros(out, np.float32), the_batch or batch(), AttentionParams(1.0, **params)
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"q": (2, 6, 16)}, r"q has shape \(2, 6, 16\), but must be \[T, Hq, D\]: D is 20, not 16"),
        ({"q": (2, 6)}, r"q has shape \(2, 6\), but must be \[T, Hq, D\]"),
        ({"q": (2, 5, 20), "out": (2, 5, 12)}, "Hq = 5 heads, but must have a multiple of H = 3"),
        ({"out": (2, 6, 20)}, "out .* Dv is 12, not 20"),
        ({"out": (3, 6, 12)}, "out .* T is 2, not 3"),
        ({"the_batch": batch(cu=(0, 1, 2))}, r"kv_lens has shape \(1,\), but must be \[S\]: S is 2, not 1"),
        ({"the_batch": batch(kv=(17,))}, r"kv_lens\[0\] is 17, but must be from its 2 query tokens to its table's 16"),
        ({"the_batch": batch(kv=(1,))}, r"kv_lens\[0\] is 1, but must be from its 2 query tokens"),
        ({"the_batch": batch(cu=(0, 3))}, r"cu_q_lens\[1\] is 3"),
        (
            {"the_batch": batch(entry=pack_entry(Format.F32, 0, 21))},
            r"block_tables\[0, 0\] is 0x20000015, but the slab",
        ),
        ({"the_batch": batch(entry=pack_entry(Format.F32, 1, 0))}, r"block_tables\[0, 0\] is 0x24000000, but the slab"),
        ({"the_batch": batch(entry=0)}, r"block_tables\[0, 0\] is 0x00000000"),
        ({"layer": 2}, "layer is 2, but the layout has 2 layers"),
        ({"window": -1}, "window is -1"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"sinks": np.zeros(5, np.float32)}, r"sinks has shape \(5,\), but must be \[Hq\]: Hq is 6, not 5"),
        ({"sinks": np.zeros(6)}, "sinks is float64, but must be float32"),
    ],
)
def test_attend_refuses_what_does_not_fit_and_says_why(arguments, complaint):
    layout, slab = pool(Format.F32)
    with pytest.raises(ValueError, match=complaint):
        attend(CpuOps(slab, layout), **arguments)


def test_append_refuses_a_slot_outside_the_slab_and_writes_nothing():
    layout, slab = pool(Format.BF16)
    before = slab.copy()
    with pytest.raises(ValueError, match=r"slots\[1\] is 88, but the slab has 12 units"):
        CpuOps(slab, layout).append(1, *tokens(2), np.array([0, 88]))
    assert np.array_equal(slab, before)


@pytest.mark.parametrize("ops_of", BOTH)
def test_append_refuses_other_element_types_than_the_pools(ops_of):
    layout, slab = pool(Format.F32)
    k, v = tokens(1)
    with pytest.raises(ValueError, match="k is uint16, but must be float32"):
        ops_of(slab, layout).append(1, encode(Format.BF16, k), encode(Format.BF16, v), np.array([0]))


@pytest.mark.parametrize("ops_of", BOTH)
def test_copy_refuses_two_formats(ops_of):
    layout, slab = pool(Format.BF16)
    one, two = (np.array([pack_entry(f, 0, 0)], np.uint32) for f in (Format.BF16, Format.F16))
    with pytest.raises(ValueError, match=r"one format|holds a block of F16"):
        ops_of(slab, layout).copy_blocks(one, two)


def test_gather_refuses_more_tokens_than_the_table_has():
    layout, slab = pool(Format.F32)
    table = np.array([pack_entry(Format.F32, 0, 0)], np.uint32)
    with pytest.raises(ValueError, match="length is 9, but the table's 1 blocks hold 8 each"):
        CpuOps(slab, layout).gather(1, table, 9, np.zeros((3, 9, 20), np.float32), np.zeros((3, 9, 12), np.float32))


def test_a_read_only_slab_is_refused():
    layout, slab = pool(Format.F32)
    with pytest.raises(ValueError, match="slab is read-only"):
        CpuOps(memoryview(slab.tobytes()), layout)


def test_an_unknown_device_is_refused():
    layout, slab = pool(Format.F32)
    with pytest.raises(ValueError, match='device is "tpu", but must be "cpu" or "twin"'):
        pagekernels.open_ops(slab, layout, "tpu")


@pytest.mark.parametrize("threads", [0, 100_000])
def test_an_impossible_number_of_threads_is_refused(threads):
    with pytest.raises(ValueError, match=f"threads is {threads}, but must be from 1 to"):
        configure(threads)


def test_everything_is_compiled_after_warm_up():
    warm_up()
    moves = (move.append, move.gather, move.copy_blocks)
    for kernel in (attend_kernel, *moves, compress.compress_blocks, compress.decompress_blocks):
        assert len(kernel.signatures) == 1
        assert not kernel._can_compile
