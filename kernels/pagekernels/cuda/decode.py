"""The tuned decode attention and its planner, from the host.

What the kernels do stands in plan.cu and decode.cu. Nothing here reads anything back from the device or waits for it,
and after construction nothing is allocated or compiled, so plan() and attend() may be captured into a CUDA graph.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pagekernels.cuda.decode_shape import DecodeShape, Tuning, can_take, defines, fitted
from pagekernels.cuda.device import CudaDevice, Kernel
from pagekernels.layout import MAX_SLABS, PagedLayout
from pagekernels.ops import AttentionParams

__all__ = ["DecodeLayer", "DecodeStep", "TunedDecode", "Tuning", "can_take"]

MAX_SEQUENCES = 1024
MAX_KINDS = 8
MAX_RANGES = 1023
"""Limits of plan.cuh."""

_RANGE_BYTES, _SEQUENCE_BYTES, _KIND_BYTES = 256, 32, 32
_PLAN_SHARED_BYTES = MAX_SEQUENCES * (32 + 8) + 8 + (MAX_RANGES + 1) * 24 + 33 * 24 + 64
_PLAN_THREADS = 1024


class DeviceArray(Protocol):
    """A tensor on the device, of torch or of whatever looks like it; strides are in elements."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def stride(self) -> Sequence[int]:
        """Elements from one index of each dimension to the next."""


class DecodeStep(Protocol):
    """The fixed buffers of a step (batch.py): int32 [S + 1], int32 [S], uint32 [S, M], as in ops.AttentionBatch."""

    cu_q_lens: Any
    kv_lens: Any
    block_tables: Any


@dataclass(frozen=True, slots=True)
class DecodeLayer:
    """A layer's part of the model: query heads and what may differ from layer to layer."""

    num_q_heads: int
    params: AttentionParams


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A layer ready to launch: its kernel and the arguments that no step changes."""

    kernel: Kernel
    threads: int
    kind: int
    tail: bytes


class TunedDecode:
    """Decode attention of a model's layers for steps of at most `max_query_tokens` a sequence. Owns its work space.

    `slabs`: addresses of the slabs that entries name, at most 8. `layers`: by index into layout.layers; each must pass
    can_take. `mixed`: FP8 blocks may be met. Made, used and closed on the device's thread; one launch at a time.
    """

    def __init__(
        self,
        device: CudaDevice,
        layout: PagedLayout,
        slabs: Sequence[int],
        layers: Mapping[int, DecodeLayer],
        max_query_tokens: int = 1,
        tuning: Tuning | None = None,
    ) -> None:
        self._device, self._layout, self._layers = device, layout, dict(layers)
        self._max_query_tokens, self._tuning = max_query_tokens, tuning or Tuning()
        self._slabs = (*slabs, *(0,) * (MAX_SLABS - len(slabs)))
        self.ctas = min(self._tuning.ctas or device.num_sms, MAX_RANGES)
        self._memory: list[Any] = []
        kinds: dict[bytes, int] = {}
        for index, layer in self._layers.items():
            kinds.setdefault(self._kind(index, layer), len(kinds))
        if len(kinds) > MAX_KINDS:
            raise ValueError(f"layers have {len(kinds)} kinds of window, chunk and heads, but at most {MAX_KINDS} fit")
        self._kinds = tuple(kinds)
        self._kind_bytes = -(-(self.ctas * _RANGE_BYTES + (MAX_SEQUENCES + 2) * _SEQUENCE_BYTES) // 256) * 256
        self._plans = self._allocate(self._kind_bytes * len(kinds))
        self._partials = self._allocate(max(self._partial_bytes(index) for index in self._layers))
        self._counters = self._allocate(4 * self.ctas)
        self._planner = device.kernel("plan.cu", "plan", {}, _PLAN_SHARED_BYTES)
        self._prepared = {index: self._prepare(index, kinds) for index in self._layers}

    def plan(self, step: DecodeStep) -> None:
        """Launch the planner, once a step, before the first layer's attend()."""
        sequences, table_stride = step.kv_lens.shape[0], step.block_tables.stride()[0]
        if sequences > MAX_SEQUENCES:
            raise ValueError(f"kv_lens has {sequences} sequences, but the planner takes at most {MAX_SEQUENCES} a step")
        pointers = (step.cu_q_lens.data_ptr(), step.kv_lens.data_ptr(), step.block_tables.data_ptr(), self._plans)
        head = struct.pack("PPPPqiii", *pointers, self._kind_bytes, sequences, table_stride, self._layout.block_size)
        args = head + b"".join(self._kinds).ljust(_KIND_BYTES * MAX_KINDS, b"\0")
        self._planner.launch((len(self._kinds), 1), (_PLAN_THREADS, 1, 1), args + bytes(-len(args) % 8))

    def attend(
        self, layer: int, q: DeviceArray, out: DeviceArray, step: DecodeStep, lse: int = 0, trace: int = 0
    ) -> None:
        """Launch one layer: q and out [T, Hq, D] in the native format, heads and tokens at any stride of 8 elements.

        `lse`: address of float32 [T, Hq] for the natural logarithm of each row's softmax denominator, or 0. Rows of no
        sequence are not written.
        """
        ready = self._prepared[layer]
        plan = self._plans + ready.kind * self._kind_bytes
        tables = step.block_tables
        sinks, rest = ready.tail[:8], ready.tail[8:]
        head = struct.pack(
            "PPPPPPP", q.data_ptr(), out.data_ptr(), lse, tables.data_ptr(), plan, self._partials, self._counters
        )
        strides = struct.pack("qqqq", *q.stride()[:2], *out.stride()[:2])
        middle = struct.pack("P8Pqqq", trace, *self._slabs, self._layout.unit_bytes, *self._offsets(layer))
        args = head + sinks + middle + strides + struct.pack("ii", tables.stride()[0], self.ctas) + rest
        ready.kernel.launch((self.ctas, 1), (ready.threads, 1, 1), args)

    def close(self) -> None:
        """Give the work space back; nothing launched may still be running."""
        for memory in self._memory:
            memory.free()
        self._memory.clear()

    def _shape(self, layer: int) -> DecodeShape:
        shape, params = self._layout.layers[layer], self._layers[layer].params
        exact = DecodeShape(
            shape.head_dim_k,
            self._layout.block_size,
            self._layers[layer].num_q_heads // shape.num_kv_heads,
            self._layout.format,
            self._max_query_tokens,
            self._tuning.mixed,
            bool(params.window or params.chunk or params.softcap or params.sinks is not None),
        )
        return fitted(exact, self._device.max_shared_bytes)

    def _kind(self, index: int, layer: DecodeLayer) -> bytes:
        shape, heads = self._shape(index), self._layout.layers[index].num_kv_heads
        params, limits = layer.params, (self.ctas, self._tuning.min_items, 0)
        return struct.pack("8i", params.window, params.chunk, heads, shape.group, shape.super_rows, *limits)

    def _partial_bytes(self, index: int) -> int:
        shape = self._shape(index)
        return self.ctas * 2 * shape.super_rows * (shape.head_dim + 2) * 4

    def _offsets(self, layer: int) -> tuple[int, int]:
        """Elements before the layer's first K row, and bytes of an FP8 block before its scales."""
        heads = sum(shape.num_kv_heads for shape in self._layout.layers[:layer])
        return self._layout.layer_offsets[layer], self._layout.block_elements + 8 * heads

    def _prepare(self, index: int, kinds: Mapping[bytes, int]) -> _Prepared:
        layer, shape = self._layers[index], self._shape(index)
        params, heads = layer.params, self._layout.layers[index].num_kv_heads
        macros = defines(shape, self._tuning, self._device.arch, self._device.max_shared_bytes)
        kernel = self._device.kernel("decode.cu", "decode", macros, int(macros["SHARED_BYTES"]))
        sinks = 0
        if params.sinks is not None:
            sinks = self._allocate(4 * len(params.sinks), np.ascontiguousarray(params.sinks, np.float32).tobytes())
        threads = (int(macros["STREAMS"]) * shape.query_tiles + 1) * 32
        numbers = struct.pack("iiiff", heads, params.window, params.chunk, params.scale, params.softcap)
        return _Prepared(kernel, threads, kinds[self._kind(index, layer)], struct.pack("P", sinks) + numbers)

    def _allocate(self, size: int, content: bytes | None = None) -> int:
        """Address of device memory that holds `content`, else zeros."""
        from pycuda import driver

        memory = driver.mem_alloc(size)
        self._memory.append(memory)
        # On our stream, which waits for no other: a plain copy may return before the bytes are on the device.
        driver.memcpy_htod_async(memory, content or bytes(size), self._device.stream)
        return int(memory)
