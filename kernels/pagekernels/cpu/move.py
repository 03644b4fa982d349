"""Moving tokens and blocks: append, gather, copy. Each is one memory-bound pass on one thread.

They return -1, or the index of the first slot or entry that lies outside the slab; nothing is written then.
"""

from __future__ import annotations

import numpy as np
from numba import types

from pagekernels.cpu.blocks import (
    F32,
    Entries,
    Floats,
    Halves,
    block_rows,
    block_units,
    entry_format,
    entry_unit,
    padded,
    readable,
)
from pagekernels.cpu.floats import f32_to_half
from pagekernels.cpu.geometry import BLOCK, FORMAT, HEADS, UNIT_BYTES, UNITS, Geometry, head_place
from pagekernels.cpu.jit import exact, kernel, read_only
from pagekernels.cpu.rows import store_element

Slots = np.ndarray[tuple[int], np.dtype[np.int64]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

SLAB = (types.float32[::1], types.uint16[::1])
INPUT = (read_only(types.float32, 3), read_only(types.uint16, 3))
OUTPUT = (types.float32[:, :, :], types.uint16[:, :, :])


@exact
def write_row(words: Floats, halves: Halves, first: int, x32: Floats, x16: Halves, fmt: int, t: int, h: int) -> None:
    """Write x[t, h] to the elements of the native format from `first` on."""
    if fmt == F32:
        for d in range(x32.shape[2]):
            words[first + d] = x32[t, h, d]
    elif len(x16):
        for d in range(x16.shape[2]):
            halves[first + d] = x16[t, h, d]
    else:
        for d in range(x32.shape[2]):
            halves[first + d] = f32_to_half(fmt, x32[t, h, d])


@kernel(types.int64(*SLAB, *INPUT, *INPUT, read_only(types.int64, 1), types.int64[::1]))
def append(
    words: Floats,
    halves: Halves,
    k32: Floats,
    k16: Halves,
    v32: Floats,
    v16: Halves,
    slots: Slots,
    geometry: Geometry,
) -> int:
    """K [T, H, D] and v [T, H, Dv] as pairs (rows.py) into slots [T]. Twin: TwinOps.append."""
    fmt, size = geometry[FORMAT], geometry[BLOCK]
    itemsize = 4 if fmt == F32 else 2
    for t in range(len(slots)):
        if slots[t] >= 0 and slots[t] // size + itemsize > geometry[UNITS]:
            return t
    for t in range(len(slots)):
        if slots[t] >= 0:
            block = slots[t] // size * (geometry[UNIT_BYTES] // itemsize)
            for head in range(geometry[HEADS]):
                _, first, size, dim, dim_v, _ = head_place(geometry, head)
                row, values = slots[t] % size, block + first + size * dim
                write_row(words, halves, block + first + row * dim, k32, k16, fmt, t, head)
                write_row(words, halves, values + row * dim_v, v32, v16, fmt, t, head)
    return -1


@kernel(types.int64(*SLAB, read_only(types.uint32, 1), types.int64, *OUTPUT, *OUTPUT, types.int64[::1]))
def gather(
    words: Floats,
    halves: Halves,
    table: Entries,
    length: int,
    k32: Floats,
    k16: Halves,
    v32: Floats,
    v16: Halves,
    geometry: Geometry,
) -> int:
    """The first `length` tokens into k [H, length, D] and v [H, length, Dv], as pairs. Twin: TwinOps.gather."""
    size = geometry[BLOCK]
    count = (length + size - 1) // size
    for b in range(count):
        if not readable(table[b], geometry[UNITS]):
            return b
    for i in range(count * geometry[HEADS]):
        b, head = i // geometry[HEADS], i % geometry[HEADS]
        unit_bytes, first, size, dim, dim_v, scale = head_place(geometry, head)
        scratch = np.empty(size * padded(max(dim, dim_v)), np.float32)
        tokens, v = min(size, length - b * size), first + size * dim
        keys, at = block_rows(words, halves, table[b], unit_bytes, first, tokens, dim, scale, scratch)
        for j in range(tokens):
            for d in range(dim):
                store_element(k32, k16, geometry[FORMAT], head, b * size + j, d, keys[at + j * padded(dim) + d])
        values, at = block_rows(words, halves, table[b], unit_bytes, v, tokens, dim_v, scale + 1, scratch)
        for j in range(tokens):
            for d in range(dim_v):
                store_element(v32, v16, geometry[FORMAT], head, b * size + j, d, values[at + j * padded(dim_v) + d])
    return -1


@kernel(types.int64(types.uint8[::1], read_only(types.uint32, 1), read_only(types.uint32, 1), types.int64))
def copy_blocks(slab: Bytes, sources: Entries, targets: Entries, unit_bytes: int) -> int:
    """Whole blocks, sources[i] to targets[i]. Twin: TwinOps.copy_blocks."""
    num_units = len(slab) // unit_bytes
    for i in range(len(sources)):
        same = entry_format(sources[i]) == entry_format(targets[i])
        if not (same and readable(sources[i], num_units) and readable(targets[i], num_units)):
            return i
    for i in range(len(sources)):
        size = block_units(entry_format(sources[i])) * unit_bytes
        source, target = entry_unit(sources[i]) * unit_bytes, entry_unit(targets[i]) * unit_bytes
        slab[target : target + size] = slab[source : source + size]
    return -1
