"""Where a block's bytes lie, and which shapes are refused."""

import pytest

from pagekernels.layout import (
    MAX_UNITS,
    UNIT_ALIGNMENT,
    Format,
    LayerShape,
    PagedLayout,
    pack_entry,
    slot_mapping,
    swizzle,
    unpack_entry,
)

UNEQUAL = (LayerShape(2, 64, 32), LayerShape(1, 16, 16, window=8), LayerShape(3, 8, 4))


def test_layers_follow_each_other_without_gaps():
    layout = PagedLayout(16, UNEQUAL, Format.BF16)
    assert layout.layer_offsets == (0, 2 * 16 * 96, 2 * 16 * 96 + 16 * 32)
    assert layout.block_elements == layout.layer_offsets[2] + 3 * 16 * 12


@pytest.mark.parametrize(("fmt", "units"), [(Format.F32, 4), (Format.F16, 2), (Format.BF16, 2), (Format.FP8_E4M3, 1)])
def test_a_block_has_as_many_units_as_bytes_an_element(fmt, units):
    layout = PagedLayout(16, UNEQUAL, fmt)
    assert layout.units_per_block == units
    assert layout.block_bytes == units * layout.unit_bytes


@pytest.mark.parametrize("size", [8, 16, 128])
def test_a_unit_holds_an_fp8_block_with_its_scales_and_is_aligned(size):
    layout = PagedLayout(size, UNEQUAL, Format.FP8_E4M3)
    needed = layout.block_elements + 4 * 2 * (2 + 1 + 3)
    assert needed <= layout.unit_bytes < needed + UNIT_ALIGNMENT
    assert layout.unit_bytes % UNIT_ALIGNMENT == 0


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize(("slab", "unit"), [(0, 0), (7, MAX_UNITS - 1), (3, 12345)])
def test_an_entry_unpacks_to_what_was_packed_and_fits_32_bits(fmt, slab, unit):
    entry = pack_entry(fmt, slab, unit)
    assert 0 < entry < 2**32
    assert unpack_entry(entry) == (fmt, slab, unit)


@pytest.mark.parametrize(("slab", "unit"), [(8, 0), (-1, 0), (0, MAX_UNITS), (0, -1)])
def test_an_entry_outside_the_word_is_refused(slab, unit):
    with pytest.raises(ValueError, match="is outside 8 slabs"):
        pack_entry(Format.BF16, slab, unit)


def test_slots_follow_the_table_across_blocks():
    entries = [pack_entry(Format.BF16, 0, 10), pack_entry(Format.BF16, 0, 4)]
    assert slot_mapping(entries, 7, 10, 8) == [87, 32, 33]
    assert slot_mapping(entries, 3, 3, 8) == []


@pytest.mark.parametrize("size", [0, 4, 12, 256])
def test_an_impossible_block_size_is_refused(size):
    with pytest.raises(ValueError, match=f"block_size is {size}, but must be a power of two from 8 to 128"):
        PagedLayout(size, UNEQUAL, Format.F32)


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ((), "layers is empty"),
        ((LayerShape(0, 8, 8),), r"layers\[0\].num_kv_heads is 0"),
        ((LayerShape(1, 8, 8), LayerShape(1, 0, 8)), r"layers\[1\].head_dim_k is 0, but must be from 1 to 512"),
        ((LayerShape(1, 8, 513),), r"layers\[0\].head_dim_v is 513, but must be from 1 to 512"),
    ],
)
def test_impossible_layers_are_refused(layers, complaint):
    with pytest.raises(ValueError, match=complaint):
        PagedLayout(16, layers, Format.F32)


def test_scales_follow_each_other_like_the_heads():
    layout = PagedLayout(16, UNEQUAL, Format.BF16)
    assert layout.scale_offsets == (0, 4, 6)
    assert layout.scale_offsets[-1] + 2 * UNEQUAL[-1].num_kv_heads == layout.num_scales


@pytest.mark.parametrize("row_bytes", [128, 256, 1024])
def test_swizzled_chunks_stay_in_their_row_and_eight_rows_of_one_chunk_meet_eight_banks(row_bytes):
    for row in range(16):
        assert sorted(c ^ swizzle(row, row_bytes) for c in range(row_bytes // 16)) == list(range(row_bytes // 16))
    for chunk in range(8):
        assert len({(chunk ^ swizzle(row, row_bytes)) % 8 for row in range(8)}) == 8


@pytest.mark.parametrize("row_bytes", [16, 32, 64, 160, 192, 80])
def test_rows_that_are_no_multiple_of_eight_chunks_are_linear(row_bytes):
    assert {swizzle(row, row_bytes) for row in range(16)} == {0}
