"""Attention for every shape that the tuned kernel does not take, from the host. The kernels are in attend.cu."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagekernels.cuda.arrays import DeviceTensor
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.device import CudaDevice
from pagekernels.cuda.place import element_format, pack_layer, pack_slabs
from pagekernels.layout import Format, LayerShape, PagedLayout
from pagekernels.ops import AttentionParams

MANY_ROWS, FEW_ROWS = 64, 16
"""Packed query rows of a thread block: many for prefill, few where a sequence has no more or memory is short."""

MAX_SPLITS = 64
"""attend.cu, kMaxSplits."""

MIN_SPLIT = 256
"""Tokens that are worth a split; attend.cu, kMinTiles."""

_THREADS, _MERGE_THREADS = 256, 128


@dataclass(frozen=True, slots=True)
class AttendShape:
    """What one compiled attend.cu is for: the pool's native format, that of q and out, (d_k, d_v), rows of a CTA."""

    native: Format
    element: Format
    dims: tuple[int, int]
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens of a tile in shared memory."""
        return 32 if max(self.dims) <= 256 else 16

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory; attend.cu, struct Shared."""
        k_pad = -(-self.dims[0] // 4) * 4
        k_stride = k_pad + (4 if k_pad // 4 % 2 == 0 else 0)
        v_pad = -(-self.dims[1] // 64) * 64
        floats = (self.rows + self.tokens) * k_stride + self.tokens * v_pad + self.rows * (self.tokens + 4)
        return -(-(4 * floats + 8 * (self.tokens // 8)) // 16) * 16

    @property
    def partial_bytes(self) -> int:
        """What one split of one tile leaves for merge."""
        return 4 * self.rows * (self.dims[1] + 2)

    def defines(self) -> dict[str, int | str]:
        """The macros of attend.cu."""
        dims = {"K_DIM": self.dims[0], "V_DIM": self.dims[1], "ROWS": self.rows, "TOKENS": self.tokens}
        formats = {"FORMAT": int(self.native), "IO": int(self.element)}
        return {**formats, **dims, "SHARED_BYTES": self.shared_bytes}


def attend_shape(shape: LayerShape, formats: tuple[Format, Format], packed_rows: int, shared_limit: int) -> AttendShape:
    """The kernel for up to `packed_rows` query rows of a KV head and a sequence, with so much shared memory.

    `formats`: the pool's native one, and that of q and out.
    """
    dims = (shape.head_dim_k, shape.head_dim_v)
    many = AttendShape(*formats, dims, MANY_ROWS)
    if packed_rows > FEW_ROWS and max(dims) <= 256 and many.shared_bytes <= shared_limit:
        return many
    return AttendShape(*formats, dims, FEW_ROWS)


class GenericAttention:
    """Attention on the slabs at these addresses, for any head dimensions, group and number of query tokens.

    Made, used and closed on the device's thread; one launch at a time, since launches share the work space.
    """

    def __init__(self, device: CudaDevice, slabs: Sequence[int], layout: PagedLayout) -> None:
        self._device, self._layout, self._packed = device, layout, pack_slabs(slabs)
        self._target = 4 * device.num_sms  # thread blocks that keep the device busy
        formats = (layout.format, layout.format)
        shapes = [attend_shape(shape, formats, MANY_ROWS, device.max_shared_bytes) for shape in layout.layers]
        self._partials: Any = device.api.mem_alloc(self._target * max(shape.partial_bytes for shape in shapes))
        self._sinks: dict[int, tuple[object, Any]] = {}

    def attend(
        self, layer: int, q: DeviceTensor, out: DeviceTensor, batch: DeviceBatch, params: AttentionParams
    ) -> None:
        """See CudaOps.attend; arguments are checked there."""
        shape = self._layout.layers[layer]
        group = q.shape[1] // shape.num_kv_heads
        kind = self._kind(layer, q, batch.max_queries * group)
        tiles = most_tiles(batch, group, kind.rows)
        splits = most_splits(batch.blocks * self._layout.block_size, self._target // (tiles * shape.num_kv_heads))
        pointers = (q.data_ptr(), out.data_ptr(), int(self._partials), self._sink_address(params.sinks))
        args = b"".join(
            (
                struct.pack(
                    "PPPPPPP", *pointers, *(x.data_ptr() for x in (batch.cu_q_lens, batch.kv_lens, batch.block_tables))
                ),
                struct.pack("qqqq", *q.stride()[:2], *out.stride()[:2]),
                self._packed,
                pack_layer(self._layout, layer),
                struct.pack("iiii", batch.blocks, batch.sequences, group, splits),
                struct.pack("iiff", params.window, params.chunk, params.scale, params.softcap),
            )
        )
        macros, threads = kind.defines(), (_THREADS, 1, 1)
        kernel = self._device.kernel("attend.cu", "attend", macros, kind.shared_bytes)
        kernel.launch((tiles, shape.num_kv_heads, splits), threads, args)
        if splits > 1:
            merge = self._device.kernel("attend.cu", "merge", macros)
            merge.launch((tiles, shape.num_kv_heads, kind.rows), (_MERGE_THREADS, 1, 1), args)

    def close(self) -> None:
        """Give the work space back; nothing launched may still be running."""
        self._partials.free()
        for _, memory in self._sinks.values():
            memory.free()
        self._sinks.clear()

    def _kind(self, layer: int, q: DeviceTensor, packed_rows: int) -> AttendShape:
        formats = (self._layout.format, element_format(self._layout, q))
        return attend_shape(self._layout.layers[layer], formats, packed_rows, self._device.max_shared_bytes)

    def _sink_address(self, sinks: Any) -> int:
        """Where the sinks are on the device; copied there the first time, and never while a graph is captured."""
        if sinks is None:
            return 0
        if id(sinks) not in self._sinks:
            values = np.ascontiguousarray(sinks, np.float32)
            memory = self._device.api.mem_alloc(values.nbytes)
            self._device.api.memcpy_htod_async(memory, values, self._device.stream)
            self._sinks[id(sinks)] = (sinks, memory)  # kept, so that the id stays its own
        return int(self._sinks[id(sinks)][1])


def most_tiles(batch: DeviceBatch, group: int, rows: int) -> int:
    """Tiles of `rows` packed query rows that any step of this capacity can have."""
    by_sequence = batch.sequences * -(-batch.max_queries * group // rows)
    by_rows = (batch.tokens * group + batch.sequences * (rows - 1)) // rows
    return max(1, min(by_sequence, by_rows, batch.tokens * -(-group // rows)))


def most_splits(kv_tokens: int, wanted: int) -> int:
    """Splits of a context of up to `kv_tokens`: as many as keep the device busy, unless they would be too short."""
    return max(1, min(wanted, MAX_SPLITS, -(-kv_tokens // MIN_SPLIT)))
