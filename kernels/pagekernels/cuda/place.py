"""Slabs, layers and element formats as the kernels of common.cuh take them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pagekernels.cuda.arrays import DeviceTensor
from pagekernels.layout import MAX_SLABS, Format, PagedLayout


def pack_slabs(addresses: Sequence[int]) -> bytes:
    """common.cuh's Slabs: the addresses of slabs 0, 1, ...; the rest is null."""
    return struct.pack(f"{MAX_SLABS}P", *addresses, *(0,) * (MAX_SLABS - len(addresses)))


def pack_layer(layout: PagedLayout, layer: int) -> bytes:
    """common.cuh's LayerPlace."""
    scales = layout.block_elements + 4 * layout.scale_offsets[layer]
    heads, shift = layout.layers[layer].num_kv_heads, layout.block_size.bit_length() - 1
    return struct.pack("qqqii", layout.unit_bytes, layout.layer_offsets[layer], scales, heads, shift)


def element_format(layout: PagedLayout, tensor: DeviceTensor) -> Format:
    """What a tensor of keys, values, queries or outputs holds: float32 by its size, else the native 16-bit format."""
    return Format.F32 if tensor.element_size() == 4 else layout.format


def group_size(dim: int) -> int:
    """common.cuh's group_size: elements that a thread moves at once."""
    return next(size for size in (8, 4, 2, 1) if dim % size == 0)


def is_aligned(tensor: DeviceTensor) -> bool:
    """Whether every row [.., .., d] starts at a multiple of its groups' bytes (at most 16)."""
    group, item = group_size(tensor.shape[-1]), tensor.element_size()
    needed = min(16, group * item)
    return tensor.data_ptr() % needed == 0 and all(step * item % needed == 0 for step in tensor.stride()[:-1])
