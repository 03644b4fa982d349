"""Whole blocks from the native format to FP8 and back: one pass each, on one thread. Twin: TwinOps.

Entries are checked by who calls; see checks.check_compress and check_decompress.
"""

from __future__ import annotations

import numpy as np
from numba import types

from pagekernels.cpu.blocks import F32, Entries, Floats, Halves, Place, block_rows, block_units, entry_unit, padded
from pagekernels.cpu.floats import bits_of, e4m3_to_f32, f32_to_e4m3, f32_to_half, float_of
from pagekernels.cpu.geometry import BLOCK, DIM, DIM_V, FORMAT, HEADS, Geometry, head_place
from pagekernels.cpu.jit import exact, kernel, read_only
from pagekernels.layout import E4M3_MAX, MIN_SCALE

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Layers = np.ndarray[tuple[int, int], np.dtype[np.int64]]

BLOCKS = (types.float32[::1], types.uint16[::1], read_only(types.uint32, 1), read_only(types.uint32, 1))


@exact
def scale_of(x: Floats, at: int, stride: int, size: int, dim: int) -> np.float32:
    """The scale of `size` rows of `dim` elements, `stride` apart: PagedOps.compress_blocks' rule."""
    # As integers, magnitudes are ordered like floats, and infinity and NaN come last.
    most = np.uint32(0)
    for row in range(size):
        line = x[at + row * stride : at + row * stride + dim]
        for d in range(dim):
            most = max(most, np.uint32(bits_of(line[d]) & np.uint32(0x7FFFFFFF)))
    if most == np.uint32(0):
        return np.float32(1.0)
    if most >= np.uint32(0x7F800000):
        return np.float32(np.nan)
    return max(float_of(most) / np.float32(E4M3_MAX), np.float32(MIN_SCALE))


@exact
def relative_error(
    x: Floats, at: int, stride: int, stored: Bytes, scale: np.float32, size: int, dim: int, centred: int
) -> np.float32:
    """twin.guard_error of x and what is stored [size * dim]; `centred` is 1 for K, 0 for V."""
    mean, noise, norm = np.zeros(dim, np.float64), np.zeros(dim, np.float64), np.zeros(dim, np.float64)
    for row in range(size * centred):
        line = x[at + row * stride : at + row * stride + dim]
        for d in range(dim):
            mean[d] += np.float64(line[d])
    for d in range(dim):
        mean[d] /= np.float64(size)
    for row in range(size):
        line, stored_line = x[at + row * stride : at + row * stride + dim], stored[row * dim : row * dim + dim]
        for d in range(dim):
            off = np.float64(line[d]) - np.float64(e4m3_to_f32(stored_line[d]) * scale)
            away = np.float64(line[d]) - mean[d]
            noise[d] += off * off
            norm[d] += away * away
    if noise.sum() == np.float64(0.0):
        return np.float32(0.0)
    return np.float32(np.sqrt(noise.sum() / norm.sum()))


@exact
def compress_rows(
    words: Floats,
    halves: Halves,
    source: np.uint32,
    target: np.uint32,
    where: tuple[int, int, int, int, int],
    centred: int,
    scratch: Floats,
) -> np.float32:
    """K or V of one (layer, KV head) from block to block; `where` is (unit_bytes, element, B, row length, scale word).

    Returns its error.
    """
    unit_bytes, element, size, dim, scale_at = where
    x, at = block_rows(words, halves, source, unit_bytes, element, size, dim, scale_at, scratch)
    unit, stride = entry_unit(target) * unit_bytes, padded(dim)
    scale = scale_of(x, at, stride, size, dim)
    words[unit // 4 + scale_at] = scale
    stored = words.view(np.uint8)[unit + element : unit + element + size * dim]
    if np.isnan(scale):
        stored[:] = np.uint8(0)
        return np.float32(np.inf)
    inverse = np.float32(1.0) / scale
    for row in range(size):
        line, stored_line = x[at + row * stride : at + row * stride + dim], stored[row * dim : row * dim + dim]
        for d in range(dim):
            stored_line[d] = f32_to_e4m3(line[d] * inverse)
    return relative_error(x, at, stride, stored, scale, size, dim, centred)


@exact
def row_scratch(geometry: Geometry) -> Floats:
    """Room for the K or V rows of one KV head of a block."""
    return np.empty(geometry[BLOCK] * padded(max(geometry[DIM], geometry[DIM_V])), np.float32)


@kernel(types.void(*BLOCKS, types.int64[:, ::1], types.float32[:, ::1]))
def compress_blocks(
    words: Floats, halves: Halves, sources: Entries, targets: Entries, layers: Layers, errors: Floats
) -> None:
    """sources[i] as FP8 to targets[i], their errors to errors [N, 2]; layers is every layer's geometry."""
    errors[:] = np.float32(0.0)
    for i in range(len(sources)):
        for layer in range(len(layers)):
            geometry = layers[layer]
            scratch = row_scratch(geometry)
            for head in range(geometry[HEADS]):
                unit_bytes, k, size, dim, dim_v, scale = head_place(geometry, head)
                where = unit_bytes, k, size, dim, scale
                error = compress_rows(words, halves, sources[i], targets[i], where, 1, scratch)
                errors[i, 0] = max(errors[i, 0], error)
                where = unit_bytes, k + size * dim, size, dim_v, scale + 1
                error = compress_rows(words, halves, sources[i], targets[i], where, 0, scratch)
                errors[i, 1] = max(errors[i, 1], error)


@exact
def store_rows(words: Floats, halves: Halves, fmt: int, first: int, x: Floats, size: int, dim: int) -> None:
    """Write rows of x, padded(dim) apart, to the elements of the native format from `first` on."""
    for row in range(size):
        to, at = first + row * dim, row * padded(dim)
        if fmt == F32:
            for d in range(dim):
                words[to + d] = x[at + d]
        else:
            for d in range(dim):
                halves[to + d] = f32_to_half(fmt, x[at + d])


@exact
def decompress_head(
    words: Floats, halves: Halves, source: np.uint32, target: np.uint32, place: Place, fmt: int, scratch: Floats
) -> None:
    """K and V of one (layer, KV head) from block to block."""
    unit_bytes, k, size, dim, dim_v, scale = place
    block, v = entry_unit(target) * unit_bytes // block_units(fmt), k + size * dim
    keys, _ = block_rows(words, halves, source, unit_bytes, k, size, dim, scale, scratch)
    store_rows(words, halves, fmt, block + k, keys, size, dim)
    values, _ = block_rows(words, halves, source, unit_bytes, v, size, dim_v, scale + 1, scratch)
    store_rows(words, halves, fmt, block + v, values, size, dim_v)


@kernel(types.void(*BLOCKS, types.int64[:, ::1]))
def decompress_blocks(words: Floats, halves: Halves, sources: Entries, targets: Entries, layers: Layers) -> None:
    """The FP8 blocks sources[i] in the native format to targets[i]; layers is every layer's geometry."""
    for i in range(len(sources)):
        for layer in range(len(layers)):
            geometry = layers[layer]
            scratch = row_scratch(geometry)
            for head in range(geometry[HEADS]):
                place = head_place(geometry, head)
                decompress_head(words, halves, sources[i], targets[i], place, geometry[FORMAT], scratch)
