"""Reading blocks where they lie. The one place that knows a table entry's bits and the formats.

`words` and `halves` are the slab as float32 and as uint16; `place` says where one layer's KV head lies in it:
    0 unit_bytes   1 elements before the head's first K row   2 B   3 D   4 Dv
    5 float32 words before the head's K scale in an FP8 block; V's scale is the next word
"""

from __future__ import annotations

import numpy as np

from pagekernels.cpu.floats import F16, LANES, bf16_to_f32, e4m3_to_f32, f16_to_f32
from pagekernels.cpu.jit import exact
from pagekernels.layout import MAX_SLABS, MAX_UNITS, Format

F32, BF16, FP8 = int(Format.F32), int(Format.BF16), int(Format.FP8_E4M3)
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Halves = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
Entries = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
Place = tuple[int, int, int, int, int, int]


@exact
def entry_format(entry: np.uint32) -> int:
    """layout.unpack_entry(entry)[0]."""
    return int(np.int64(entry) >> 29)


@exact
def entry_unit(entry: np.uint32) -> int:
    """layout.unpack_entry(entry)[2]."""
    return int(np.int64(entry) & (MAX_UNITS - 1))


@exact
def block_units(fmt: int) -> int:
    """Format.itemsize, or 0 where the format is unknown."""
    if fmt == F32:
        return 4
    if fmt == FP8:
        return 1
    return 2 if fmt in (F16, BF16) else 0


@exact
def readable(entry: np.uint32, num_units: int) -> bool:
    """Whether the entry names a block of a known format that lies wholly in the slab."""
    units = block_units(entry_format(entry))
    here = (np.int64(entry) >> 26) & (MAX_SLABS - 1) == 0
    return units > 0 and here and entry_unit(entry) + units <= num_units


@exact
def padded(dim: int) -> int:
    """A row's length in scratch: whole vectors."""
    return (dim + LANES - 1) // LANES * LANES


@exact
def block_scale(words: Floats, entry: np.uint32, unit_bytes: int, scale: int) -> np.float32:
    """What a block's stored elements are multiplied with: word `scale` of an FP8 block, else 1."""
    if entry_format(entry) == FP8:
        return np.float32(words[entry_unit(entry) * unit_bytes // 4 + scale])
    return np.float32(1.0)


@exact
def widen(
    words: Floats, halves: Halves, fmt: int, factor: np.float32, start: int, count: int, scratch: Floats, to: int
) -> None:
    """scratch[to + i] = the float32 value of stored element start + i; FP8 elements are multiplied with `factor`."""
    target = scratch[to : to + count]
    if fmt == F32:
        target[:] = words[start : start + count]
        return
    if fmt == FP8:
        stored = words.view(np.uint8)[start : start + count]
        for i in range(count):
            target[i] = e4m3_to_f32(stored[i]) * factor
        return
    source = halves[start : start + count]
    if fmt == F16:
        for i in range(count):
            target[i] = f16_to_f32(source[i])
    else:
        for i in range(count):
            target[i] = bf16_to_f32(source[i])


@exact
def block_rows(
    words: Floats,
    halves: Halves,
    entry: np.uint32,
    unit_bytes: int,
    element: int,
    count: int,
    dim: int,
    scale: int,
    scratch: Floats,
) -> tuple[Floats, int]:
    """`count` rows of `dim` elements of a block, from `element` on, as (array, index of the first): padded(dim) apart.

    `scale` is the word of an FP8 block that holds the rows' scale. Whole vectors of float32 are read in place; what is
    narrower or not whole is copied into `scratch` first, with zeros as padding.
    """
    fmt, stride = entry_format(entry), padded(dim)
    start = entry_unit(entry) * unit_bytes // block_units(fmt) + element
    factor = block_scale(words, entry, unit_bytes, scale)
    if stride == dim:
        if fmt == F32:
            return words, start
        widen(words, halves, fmt, factor, start, count * dim, scratch, 0)
    else:
        scratch[: count * stride] = np.float32(0.0)
        for row in range(count):
            widen(words, halves, fmt, factor, start + row * dim, dim, scratch, row * stride)
    return scratch, 0
