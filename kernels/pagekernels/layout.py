"""Where every byte of a block lies. Standard library only; the pure cores and all kernels share it.

Dimension letters, used in every docstring of this package:
    L  layers that store KV          H  KV heads of a layer       Hq  query heads of a layer
    B  block_size (token positions)  D  head_dim of K (d_k)       Dv  head_dim of V (d_v)
    T  packed tokens of a step       S  sequences of a step       M   blocks in the longest table

A block is one contiguous run of bytes, block-major:

    for each layer:  for each KV head:  K rows [B, D], then V rows [B, Dv]          (row-major, no padding)

A unit is the size of an FP8 block: one byte per element, then one float32 scale per (layer, KV head, K|V), rounded up
to UNIT_ALIGNMENT. A 16-bit block is two aligned units, an f32 block four; in a block of the native format the elements
start at the block's first byte and scales are unused. Layers may differ, hence the table of offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

LAYOUT_LINEAR, LAYOUT_SWIZZLED = 1, 2
"""Versions of the byte order: 1 as above, for host memory; 2, for CUDA, with the chunks of a row swizzled.

In version 2 a row is stored in chunks of 16 bytes, and chunk c of token row r of a block lies where chunk
`c ^ swizzle(r)` would: reads of one chunk of several rows, as tensor cores want them, then meet different banks of
shared memory although a block is copied there as one run. Only rows whose length is a multiple of 128 bytes (8 chunks)
are swizzled; others are linear in both versions, as are FP8 rows of fewer bytes.
"""

LAYOUT_VERSION = LAYOUT_LINEAR
"""The version that shared memory on the host has."""

UNIT_ALIGNMENT = 128
"""Bytes; keeps every unit on a boundary of a cache line and of a 16-byte vector load."""

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 128
MAX_HEAD_DIM = 512
MAX_SLABS = 8
MAX_UNITS = 1 << 26

E4M3_MAX = 448.0
"""The largest E4M3 value (OCP 8-bit floating point specification), which an FP8 block's largest magnitude becomes."""

MIN_SCALE = 2.0**-126
"""The least scale of an FP8 block: the smallest normal float32, below which a scale would lose bits itself."""


class Format(IntEnum):
    """How a block's bytes are stored; the numbers equal pagepool.memd.v1.Format."""

    F32 = 1
    F16 = 2
    BF16 = 3
    FP8_E4M3 = 4

    @property
    def itemsize(self) -> int:
        """Bytes of one element, which is also the number of units of a block."""
        return {Format.F32: 4, Format.F16: 2, Format.BF16: 2, Format.FP8_E4M3: 1}[self]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV shape of one layer: KV heads, d_k, d_v, and the sliding window in tokens (0: full attention)."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Byte layout of a pool's blocks. Raises ValueError, naming the field, on an impossible shape."""

    block_size: int
    layers: tuple[LayerShape, ...]
    format: Format
    version: int = LAYOUT_LINEAR

    def __post_init__(self) -> None:
        size = self.block_size
        if not MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise ValueError(
                f"block_size is {size}, but must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
            )
        if self.version not in (LAYOUT_LINEAR, LAYOUT_SWIZZLED):
            raise ValueError(f"version is {self.version}, but must be {LAYOUT_LINEAR} or {LAYOUT_SWIZZLED}")
        if not self.layers:
            raise ValueError("layers is empty, but a model that stores KV has at least one")
        for index, layer in enumerate(self.layers):
            if layer.num_kv_heads < 1:
                raise ValueError(f"layers[{index}].num_kv_heads is {layer.num_kv_heads}, but must be at least 1")
            for name, dim in (("head_dim_k", layer.head_dim_k), ("head_dim_v", layer.head_dim_v)):
                if not 1 <= dim <= MAX_HEAD_DIM:
                    raise ValueError(f"layers[{index}].{name} is {dim}, but must be from 1 to {MAX_HEAD_DIM}")

    @property
    def layer_offsets(self) -> tuple[int, ...]:
        """Elements before each layer's first K row within a block; length L."""
        offsets, total = [], 0
        for layer in self.layers:
            offsets.append(total)
            total += layer.num_kv_heads * self.block_size * (layer.head_dim_k + layer.head_dim_v)
        return tuple(offsets)

    @property
    def block_elements(self) -> int:
        """K and V elements of one block over all layers."""
        per_token = sum(shape.num_kv_heads * (shape.head_dim_k + shape.head_dim_v) for shape in self.layers)
        return per_token * self.block_size

    @property
    def num_scales(self) -> int:
        """FP8 scales of one block: one per layer, KV head, K and V."""
        return sum(2 * shape.num_kv_heads for shape in self.layers)

    @property
    def scale_offsets(self) -> tuple[int, ...]:
        """Scales before each layer's first in the trailer, which begins `block_elements` bytes into an FP8 block.

        Length L. Within a layer: KV head after KV head, K's scale before V's.
        """
        offsets, total = [], 0
        for layer in self.layers:
            offsets.append(total)
            total += 2 * layer.num_kv_heads
        return tuple(offsets)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit."""
        raw = self.block_elements + 4 * self.num_scales
        return -(-raw // UNIT_ALIGNMENT) * UNIT_ALIGNMENT

    @property
    def units_per_block(self) -> int:
        """Units of one block of the native format."""
        return self.format.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the native format."""
        return self.unit_bytes * self.units_per_block


def swizzle(row: int, row_bytes: int) -> int:
    """What the chunk numbers of token row `row` of a block are XORed with in LAYOUT_SWIZZLED."""
    return (row & 1) << 2 | (row >> 1) & 3 if row_bytes % 128 == 0 else 0


def pack_entry(fmt: Format, slab: int, unit: int) -> int:
    """The 32-bit block-table word: format in bits 31..29, slab in 28..26, first unit in 25..0."""
    if not 0 <= slab < MAX_SLABS or not 0 <= unit < MAX_UNITS:
        raise ValueError(f"entry (slab {slab}, unit {unit}) is outside {MAX_SLABS} slabs of {MAX_UNITS} units")
    return int(fmt) << 29 | slab << 26 | unit


def unpack_entry(entry: int) -> tuple[Format, int, int]:
    """(format, slab, unit) of a block-table word."""
    return Format(entry >> 29), (entry >> 26) & (MAX_SLABS - 1), entry & (MAX_UNITS - 1)


def slot_mapping(entries: Sequence[int], first: int, last: int, block_size: int) -> list[int]:
    """Slots of token positions first..last-1 of a table: unit * block_size + position within the block.

    A slot is what the append kernel writes to; the block's format is the pool's native one, since only unsealed
    blocks are written.
    """
    slots: list[int] = []
    while first < last:
        count = min(block_size - first % block_size, last - first)
        slot = slot_of(entries, first, block_size)
        slots += range(slot, slot + count)
        first += count
    return slots


def slot_of(entries: Sequence[int], position: int, block_size: int) -> int:
    """The slot of one token position; see slot_mapping."""
    return (entries[position // block_size] & (MAX_UNITS - 1)) * block_size + position % block_size
