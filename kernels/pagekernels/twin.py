"""The NumPy twin: what every kernel must compute, written to be read. Slow, float64, no cleverness."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagekernels import checks
from pagekernels.layout import LAYOUT_SWIZZLED, Format, PagedLayout, swizzle, unpack_entry
from pagekernels.ops import Array, AttentionBatch, AttentionParams

F64 = npt.NDArray[np.float64]


def decode(fmt: Format, stored: Array) -> npt.NDArray[np.float32]:
    """The float32 values of stored elements (float32, or 16- or 8-bit patterns, without their scale); exact."""
    if stored.dtype == np.float32:
        return stored.astype(np.float32)
    if fmt is Format.FP8_E4M3:
        return decode_e4m3(stored)
    if fmt is Format.F16:
        return stored.view(np.float16).astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def decode_e4m3(stored: Array) -> npt.NDArray[np.float32]:
    """The float32 values of E4M3 bytes (OCP 8-bit floating point): no infinities, NaN where all of 6..0 are set."""
    bits = stored.astype(np.int32)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa / 512, np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude = np.where(bits & 0x7F == 0x7F, np.nan, magnitude)
    return np.where(bits & 0x80, -magnitude, magnitude).astype(np.float32)


def places(layout: PagedLayout, dim: int, itemsize: int) -> npt.NDArray[np.intp]:
    """[B, dim]: where in its row element d of row r is stored; see layout.LAYOUT_SWIZZLED."""
    element = np.arange(dim)
    if layout.version != LAYOUT_SWIZZLED:
        return np.tile(element, (layout.block_size, 1))
    per_chunk = 16 // itemsize
    xor = np.array([[swizzle(row, dim * itemsize)] for row in range(layout.block_size)], np.intp)
    result: npt.NDArray[np.intp] = (element // per_chunk ^ xor) * per_chunk + element % per_chunk
    return result


def encode(fmt: Format, values: Array) -> Array:
    """float32 values as a format stores them: rounded to nearest, ties to even; too large becomes infinity."""
    values = values.astype(np.float32)
    if fmt is Format.F32:
        return values
    if fmt is Format.F16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def visible(position: int, params: AttentionParams) -> range:
    """The token positions that the query token at `position` attends to."""
    first = max(0, position - params.window + 1) if params.window else 0
    if params.chunk:
        first = max(first, position // params.chunk * params.chunk)
    return range(first, position + 1)


def attention(q: F64, k: F64, v: F64, params: AttentionParams, sink: float | None) -> F64:
    """softmax(cap(scale * q.k)) . v for one query head: q [D], k [n, D], v [n, Dv] -> [Dv]."""
    scores = params.scale * (k @ q)
    if params.softcap:
        scores = params.softcap * np.tanh(scores / params.softcap)
    logits = scores if sink is None else np.append(scores, sink)
    weights = np.exp(logits - logits.max())
    result: F64 = (weights / weights.sum())[: len(scores)] @ v
    return result


class TwinOps:
    """PagedOps by plain indexing. `slab` is a writable buffer of bytes, mapped by whoever calls."""

    def __init__(self, slab: memoryview | npt.NDArray[np.uint8], layout: PagedLayout) -> None:
        self.layout = layout
        self.slab = np.frombuffer(slab, np.uint8)

    def append(self, layer: int, k: Array, v: Array, slots: npt.NDArray[np.int64]) -> None:
        """See PagedOps."""
        checks.check_append(self.layout, layer, k, v, slots)
        native, size = self.layout.format, self.layout.block_size
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            for head in range(k.shape[1]):
                for rows, x in zip(self._rows(native, slot // size, layer, head), (k, v), strict=True):
                    where = places(self.layout, rows.shape[1], native.itemsize)[slot % size]
                    rows[slot % size, where] = (
                        x[token, head] if x.dtype == rows.dtype else encode(native, x[token, head])
                    )

    def attend(self, layer: int, q: Array, out: Array, batch: AttentionBatch, params: AttentionParams) -> None:
        """See PagedOps."""
        checks.check_attend(self.layout, layer, q, out, batch, params)
        native = self.layout.format
        for s, kv_len in enumerate(batch.kv_lens.tolist()):
            first, last = int(batch.cu_q_lens[s]), int(batch.cu_q_lens[s + 1])
            if kv_len == 0 or first == last:
                continue
            k, v = self._tokens(layer, batch.block_tables[s], kv_len)
            for t in range(first, last):
                seen = list(visible(kv_len - last + t, params))
                for head in range(q.shape[1]):
                    kv_head = head // (q.shape[1] // k.shape[0])
                    query = decode(native, q[t, head]).astype(np.float64)
                    sink = None if params.sinks is None else float(params.sinks[head])
                    row = attention(query, k[kv_head, seen], v[kv_head, seen], params, sink)
                    out[t, head] = row if out.dtype == np.float32 else encode(native, row)

    def copy_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        """See PagedOps."""
        checks.check_copy(sources, targets)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            (fmt, _, unit), (target_fmt, _, target_unit) = unpack_entry(source), unpack_entry(target)
            if fmt is not target_fmt:
                raise ValueError(f"targets holds a block of {target_fmt.name}, but its source is {fmt.name}")
            size, unit_bytes = fmt.itemsize * self.layout.unit_bytes, self.layout.unit_bytes
            self.slab[target_unit * unit_bytes :][:size] = self.slab[unit * unit_bytes :][:size]

    def gather(self, layer: int, table: npt.NDArray[np.uint32], length: int, k: Array, v: Array) -> None:
        """See PagedOps."""
        checks.check_gather(self.layout, layer, table, length, k, v)
        keys, values = self._tokens(layer, table, length)
        native = self.layout.format
        k[...] = keys if k.dtype == np.float32 else encode(native, keys)
        v[...] = values if v.dtype == np.float32 else encode(native, values)

    def _rows(self, fmt: Format, unit: int, layer: int, head: int) -> tuple[Array, Array]:
        """Views of one block's K rows [B, D] and V rows [B, Dv], as stored."""
        shape, size = self.layout.layers[layer], self.layout.block_size
        dtype = {4: np.float32, 2: np.uint16, 1: np.uint8}[fmt.itemsize]
        elements = self.slab[unit * self.layout.unit_bytes :][: fmt.itemsize * self.layout.unit_bytes].view(dtype)
        middle = size * shape.head_dim_k
        stride = middle + size * shape.head_dim_v
        rows = elements[self.layout.layer_offsets[layer] + head * stride :][:stride]
        return rows[:middle].reshape(size, -1), rows[middle:].reshape(size, -1)

    def _tokens(self, layer: int, table: npt.NDArray[np.uint32], length: int) -> tuple[F64, F64]:
        """The first `length` tokens as K [H, length, D] and V [H, length, Dv]."""
        shape, size = self.layout.layers[layer], self.layout.block_size
        k = np.empty((shape.num_kv_heads, length, shape.head_dim_k))
        v = np.empty((shape.num_kv_heads, length, shape.head_dim_v))
        for first in range(0, length, size):
            fmt, _, unit = unpack_entry(int(table[first // size]))
            count = min(size, length - first)
            for head in range(shape.num_kv_heads):
                scales = self._scales(fmt, unit, layer, head)
                for into, rows, scale in zip((k, v), self._rows(fmt, unit, layer, head), scales, strict=True):
                    where = places(self.layout, rows.shape[1], fmt.itemsize)
                    stored = np.take_along_axis(rows, where, axis=1)[:count]
                    into[head, first : first + count] = decode(fmt, stored) * scale
        return k, v

    def _scales(self, fmt: Format, unit: int, layer: int, head: int) -> npt.NDArray[np.float32]:
        """What the stored K and V of one block are multiplied with: a view of an FP8 block's own two scales, else 1."""
        if fmt is not Format.FP8_E4M3:
            return np.ones(2, np.float32)
        trailer = unit * self.layout.unit_bytes + self.layout.block_elements
        scales = self.slab[trailer:][: 4 * self.layout.num_scales].view(np.float32)
        return scales[self.layout.scale_offsets[layer] + 2 * head :][:2]
