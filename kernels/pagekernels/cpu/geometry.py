"""A layer's geometry in the form that kernels take."""

from __future__ import annotations

import numpy as np

from pagekernels.cpu.blocks import Place
from pagekernels.cpu.jit import exact
from pagekernels.layout import PagedLayout

FORMAT, UNIT_BYTES, LAYER, BLOCK, DIM, DIM_V, HEADS, UNITS, SCALES, GEOMETRY = range(10)
"""What a layer's kernels need to know, as int64 [GEOMETRY]: native format, unit_bytes, elements before the layer, B, D,
Dv, H, units of the slab, float32 words before the layer's first scale in an FP8 block."""

Geometry = np.ndarray[tuple[int], np.dtype[np.int64]]


def layer_geometry(layout: PagedLayout, layer: int, num_units: int) -> Geometry:
    """One layer's GEOMETRY numbers."""
    shape, first = layout.layers[layer], layout.layer_offsets[layer]
    numbers = np.zeros(GEOMETRY, np.int64)
    numbers[[FORMAT, UNIT_BYTES, LAYER]] = int(layout.format), layout.unit_bytes, first
    numbers[[BLOCK, DIM, DIM_V]] = layout.block_size, shape.head_dim_k, shape.head_dim_v
    # Whole words: block_size is a multiple of 8, so the trailer begins at a multiple of 8 bytes.
    scales = layout.block_elements // 4 + layout.scale_offsets[layer]
    numbers[[HEADS, UNITS, SCALES]] = shape.num_kv_heads, num_units, scales
    return numbers


@exact
def head_place(geometry: Geometry, head: int) -> Place:
    """blocks.py's `place` of one KV head."""
    stride = geometry[BLOCK] * (geometry[DIM] + geometry[DIM_V])
    first, scale = geometry[LAYER] + head * stride, geometry[SCALES] + 2 * head
    return geometry[UNIT_BYTES], first, geometry[BLOCK], geometry[DIM], geometry[DIM_V], scale
