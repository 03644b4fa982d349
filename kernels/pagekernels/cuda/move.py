"""Moving tokens and blocks, from the host: append.cu, gather.cu, move.cu."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagekernels import checks
from pagekernels.cuda.arrays import DeviceTensor, check_tensor
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.device import CudaDevice, Kernel
from pagekernels.cuda.place import element_format, is_aligned, pack_layer, pack_slabs
from pagekernels.layout import PagedLayout, unpack_entry

Entries = npt.NDArray[np.uint32]

COPY_PAIRS = 256
"""Blocks of one launch; move.cu, kPairs."""

_COPY_PIECE = 256 * 4 * 16
_GATHER_TOKENS, _GATHER_WARPS = 16, 8
_THREADS = 256
"""As in the sources."""


class BlockMoves:
    """Append, gather and block copy on the slabs at these addresses. Only launches; see ops.CudaOps."""

    def __init__(self, device: CudaDevice, slabs: Sequence[int], layout: PagedLayout) -> None:
        self._device, self._slabs, self._layout = device, tuple(slabs), layout
        self._packed = pack_slabs(slabs)
        self._places = [pack_layer(layout, layer) for layer in range(len(layout.layers))]
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._copy = device.kernel("move.cu", "copy_blocks", {})
        for layer in range(len(layout.layers)):  # what models ask for is ready before anyone waits
            for source in ("append", "gather"):
                self._kernel(source, layer, int(layout.format), aligned=True)

    def append(self, layer: int, k: DeviceTensor, v: DeviceTensor, batch: DeviceBatch) -> None:
        """See CudaOps.append."""
        shape, tokens = checks.check_layer(self._layout, layer), k.shape[0]
        sizes = (4, self._layout.format.itemsize)
        check_tensor("k", k, "[T, H, D]", (tokens, shape.num_kv_heads, shape.head_dim_k), sizes)
        check_tensor("v", v, "[T, H, Dv]", (tokens, shape.num_kv_heads, shape.head_dim_v), (k.element_size(),))
        if tokens > batch.tokens:
            raise ValueError(f"k has {tokens} tokens, but the batch has slots for {batch.tokens}")
        if tokens == 0:
            return
        aligned = is_aligned(k) and is_aligned(v)
        kernel = self._kernel("append", layer, int(element_format(self._layout, k)), aligned=aligned)
        pointers = (k.data_ptr(), v.data_ptr(), batch.slots.data_ptr(), self._slabs[0])
        args = struct.pack("PPPPqqqq", *pointers, *k.stride()[:2], *v.stride()[:2]) + self._places[layer]
        kernel.launch((tokens, 1), (_THREADS, 1, 1), args)

    def gather(self, layer: int, table: int, tokens: tuple[int, int], k: DeviceTensor, v: DeviceTensor) -> None:
        """Tokens [first, last) of the table (its address) into k [H, last - first, D] and v [H, last - first, Dv]."""
        shape, (first, last) = checks.check_layer(self._layout, layer), tokens
        length, sizes = last - first, (4, self._layout.format.itemsize)
        check_tensor("k", k, "[H, length, D]", (shape.num_kv_heads, length, shape.head_dim_k), sizes)
        check_tensor("v", v, "[H, length, Dv]", (shape.num_kv_heads, length, shape.head_dim_v), (k.element_size(),))
        if length == 0:
            return
        aligned = is_aligned(k) and is_aligned(v)
        kernel = self._kernel("gather", layer, int(element_format(self._layout, k)), aligned=aligned)
        head = struct.pack("PPPqqqq", k.data_ptr(), v.data_ptr(), table, *k.stride()[:2], *v.stride()[:2])
        args = head + self._packed + self._places[layer] + struct.pack("ii", first, length)
        run = min(_GATHER_TOKENS, self._layout.block_size)
        items = 2 * shape.num_kv_heads * (-(-last // run) - first // run)
        kernel.launch((-(-items // _GATHER_WARPS), 1), (_THREADS, 1, 1), args)

    def copy_blocks(self, sources: Entries, targets: Entries) -> None:
        """See CudaOps.copy_blocks."""
        checks.check_copy(sources, targets)
        self._check_formats(sources, targets)
        if not len(sources):
            return
        largest = max(unpack_entry(entry)[0].itemsize for entry in sources.tolist())
        pieces = -(-largest * self._layout.unit_bytes // _COPY_PIECE)
        for first in range(0, len(sources), COPY_PAIRS):
            pairs = [np.zeros(COPY_PAIRS, np.uint32) for _ in range(2)]
            count = len(sources[first : first + COPY_PAIRS])
            pairs[0][:count], pairs[1][:count] = sources[first : first + count], targets[first : first + count]
            entries = pairs[0].tobytes() + pairs[1].tobytes()
            args = self._packed + struct.pack("q", self._layout.unit_bytes) + entries
            self._copy.launch((pieces, count), (_THREADS, 1, 1), args)

    def _check_formats(self, sources: Entries, targets: Entries) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            if source >> 29 != target >> 29 or not 1 <= source >> 29 <= 4:
                raise ValueError(
                    f"source {source:#010x} has target {target:#010x}, but both must be blocks of one format"
                )
            for entry in (source, target):
                if unpack_entry(entry)[1] >= len(self._slabs):
                    raise ValueError(f"entry {entry:#010x} is in a slab that is not mapped: {len(self._slabs)} are")

    def _kernel(self, name: str, layer: int, element: int, *, aligned: bool) -> Kernel:
        key = (name, layer, element, aligned)
        if key not in self._kernels:
            macros = move_defines(name, self._layout, self._layout.layers[layer], element, aligned=aligned)
            self._kernels[key] = self._device.kernel(f"{name}.cu", name, macros)
        return self._kernels[key]


def move_defines(name: str, layout: PagedLayout, shape: Any, element: int, *, aligned: bool) -> dict[str, int | str]:
    """The macros of append.cu and gather.cu for one layer's shape; `element` is the format of the tensors."""
    given = {"append": "INPUT", "gather": "OUTPUT"}[name]
    dims = {"K_DIM": shape.head_dim_k, "V_DIM": shape.head_dim_v}
    return {"FORMAT": int(layout.format), given: element, **dims, "ALIGNED": int(aligned)}
