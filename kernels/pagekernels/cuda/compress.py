"""Blocks of the native format to FP8 blocks and back, from the host: compress.cu."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from pagekernels import checks
from pagekernels.cuda.arrays import DeviceTensor, check_tensor
from pagekernels.cuda.device import CudaDevice, Kernel
from pagekernels.cuda.move import Entries
from pagekernels.cuda.place import pack_layer, pack_slabs
from pagekernels.layout import E4M3_MAX, MAX_UNITS, MIN_SCALE, LayerShape, PagedLayout

PAIRS = 256
"""Blocks of one launch; compress.cu, kPairs."""

_WARPS, _THREADS = 8, 256
"""As in the source."""


class Compression:
    """Compresses and decompresses blocks on the slabs at these addresses. Only launches; see ops.CudaOps.

    The kernels of a layout are compiled when first asked for, or by `load`: pools that keep 16 bits never need them.
    """

    def __init__(self, device: CudaDevice, slabs: Sequence[int], layout: PagedLayout) -> None:
        self._device, self._layout = device, layout
        self._packed, self._room = pack_slabs(slabs), checks.Room(MAX_UNITS, len(slabs))

    def compress(self, sources: Entries, targets: Entries, errors: DeviceTensor) -> None:
        """See CudaOps.compress_blocks."""
        checks.check_compress(self._layout, self._room, sources, targets)
        check_tensor("errors", errors, "[N, 2]", (len(sources), 2), (4,))
        if len(sources):
            driver, address = self._device.api, errors.data_ptr()
            driver.memset_d32_async(address, 0, 2 * len(sources), self._device.stream)
            self._launch("compress_blocks", sources, targets, address)

    def decompress(self, sources: Entries, targets: Entries) -> None:
        """See CudaOps.decompress_blocks."""
        checks.check_decompress(self._layout, self._room, sources, targets)
        self._launch("decompress_blocks", sources, targets, 0)

    def load(self) -> None:
        """Compile and load all that any call will need."""
        for first, _ in runs(self._layout):
            for name in ("compress_blocks", "decompress_blocks"):
                self._kernel(name, first)

    def _launch(self, name: str, sources: Entries, targets: Entries, errors: int) -> None:
        for first_pair in range(0, len(sources), PAIRS):
            pairs = [np.zeros(PAIRS, np.uint32) for _ in range(2)]
            count = len(sources[first_pair : first_pair + PAIRS])
            for padded, entries in zip(pairs, (sources, targets), strict=True):
                padded[:count] = entries[first_pair : first_pair + count]
            address = errors and errors + 8 * first_pair
            for first, layers in runs(self._layout):
                args = self._packed + self._place(first) + struct.pack("Pii", address, layers, 0)
                tiles = 2 * self._layout.layers[first].num_kv_heads * layers
                grid = (-(-tiles // _WARPS), count)
                self._kernel(name, first).launch(grid, (_THREADS, 1, 1), args + pairs[0].tobytes() + pairs[1].tobytes())

    def _place(self, layer: int) -> bytes:
        """Where the layer lies in a block, and how far the next one of its shape is from it."""
        shape = self._layout.layers[layer]
        elements = shape.num_kv_heads * (shape.head_dim_k + shape.head_dim_v) * self._layout.block_size
        return pack_layer(self._layout, layer) + struct.pack("qq", elements, 8 * shape.num_kv_heads)

    def _kernel(self, name: str, layer: int) -> Kernel:
        return self._device.kernel("compress.cu", name, compress_defines(self._layout, self._layout.layers[layer]))


def runs(layout: PagedLayout) -> Iterator[tuple[int, int]]:
    """(first layer, layers) of each run of layers that differ in nothing but their windows."""
    first = 0
    for _, run in groupby(layout.layers, lambda layer: (layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v)):
        count = len(list(run))
        yield first, count
        first += count


def compress_defines(layout: PagedLayout, shape: LayerShape) -> dict[str, int | str]:
    """The macros of compress.cu for one layer's shape."""
    return {
        "FORMAT": int(layout.format),
        "BLOCK": layout.block_size,
        "K_DIM": shape.head_dim_k,
        "V_DIM": shape.head_dim_v,
        "E4M3_MAX": f"{E4M3_MAX}f",
        "MIN_SCALE": f"{MIN_SCALE!r}f",
    }
