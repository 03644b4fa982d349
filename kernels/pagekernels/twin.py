"""The NumPy twin: what every kernel must compute, written to be read. Slow, float64, no cleverness."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pagekernels import checks
from pagekernels.layout import E4M3_MAX, LAYOUT_SWIZZLED, MIN_SCALE, Format, PagedLayout, swizzle, unpack_entry
from pagekernels.ops import Array, AttentionBatch, AttentionParams

F32 = npt.NDArray[np.float32]
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


def encode_e4m3(values: Array) -> npt.NDArray[np.uint8]:
    """float32 values as E4M3 bytes: rounded to nearest, ties to even; what is too large, infinity too, becomes 448.

    A magnitude is 8 to 16 steps of its binade, so that (binade, steps) added up are the byte, the carry included; below
    2**-6 it is 0 to 8 steps of the lowest binade's.
    """
    magnitude = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    finite = np.where(np.isnan(magnitude), 0.0, magnitude)
    binade = np.frexp(np.maximum(finite, 2.0**-6))[1] - 1
    bits = (binade + 6) * 8 + np.rint(np.ldexp(finite, 3 - binade)).astype(np.int64)
    bits = np.where(np.isnan(magnitude), 0x7F, bits)
    result: npt.NDArray[np.uint8] = (bits | np.signbit(values) * 0x80).astype(np.uint8)
    return result


def fp8_scale(x: Array) -> np.float32:
    """The scale of one (layer, KV head)'s K or V; the rule is PagedOps.compress_blocks'."""
    if not np.isfinite(x).all():
        return np.float32(np.nan)
    most = np.abs(x).max().astype(np.float32)
    return np.float32(max(most / np.float32(E4M3_MAX), np.float32(MIN_SCALE))) if most else np.float32(1.0)


def guard_error(x: F32, read: F32, *, centred: bool) -> float:
    """PagedOps.compress_blocks' error of rows x [B, D] that read as `read`: K's if `centred`, else V's."""
    exact = x.astype(np.float64)
    noise = float(np.linalg.norm(exact - read))
    if noise == 0 or not np.isfinite(noise):
        return 0.0 if noise == 0 else float("inf")
    norm = float(np.linalg.norm(exact - exact.mean(axis=0) if centred else exact))
    return noise / norm if norm else float("inf")


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

    def compress_blocks(
        self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.float32]:
        """See PagedOps."""
        checks.check_compress(self.layout, checks.Room(self._num_units), sources, targets)
        errors = np.zeros((len(sources), 2))
        for i, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
            for layer, head in self._heads():
                heads_error = self._compress_head(unpack_entry(source)[2], unpack_entry(target)[2], layer, head)
                errors[i] = np.maximum(errors[i], heads_error)
        return errors.astype(np.float32)

    def decompress_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        """See PagedOps."""
        checks.check_decompress(self.layout, checks.Room(self._num_units), sources, targets)
        native = self.layout.format
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for layer, head in self._heads():
                values = self._read(Format.FP8_E4M3, unpack_entry(source)[2], layer, head)
                for x, rows in zip(values, self._rows(native, unpack_entry(target)[2], layer, head), strict=True):
                    where = places(self.layout, rows.shape[1], native.itemsize)
                    np.put_along_axis(rows, where, encode(native, x), axis=1)

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
                for into, x in zip((k, v), self._read(fmt, unit, layer, head), strict=True):
                    into[head, first : first + count] = x[:count]
        return k, v

    def _read(self, fmt: Format, unit: int, layer: int, head: int) -> list[npt.NDArray[np.float32]]:
        """What one block's K rows [B, D] and V rows [B, Dv] mean."""
        read = []
        for rows, scale in zip(self._rows(fmt, unit, layer, head), self._scales(fmt, unit, layer, head), strict=True):
            where = places(self.layout, rows.shape[1], fmt.itemsize)
            read.append(decode(fmt, np.take_along_axis(rows, where, axis=1)) * scale)
        return read

    def _compress_head(self, source: int, target: int, layer: int, head: int) -> tuple[float, float]:
        """One (layer, KV head) of a block from unit to unit; returns the errors of K and of V."""
        scales, errors = self._scales(Format.FP8_E4M3, target, layer, head), []
        values = self._read(self.layout.format, source, layer, head)
        for i, rows in enumerate(self._rows(Format.FP8_E4M3, target, layer, head)):
            x, scales[i] = values[i], fp8_scale(values[i])
            inverse = np.float32(1) / scales[i]
            stored = np.zeros(x.shape, np.uint8) if np.isnan(inverse) else encode_e4m3(x * inverse)
            np.put_along_axis(rows, places(self.layout, x.shape[1], 1), stored, axis=1)
            errors.append(guard_error(x, decode_e4m3(stored) * scales[i], centred=i == 0))
        return errors[0], errors[1]

    def _heads(self) -> Iterator[tuple[int, int]]:
        """All (layer, KV head)."""
        for layer, shape in enumerate(self.layout.layers):
            for head in range(shape.num_kv_heads):
                yield layer, head

    @property
    def _num_units(self) -> int:
        return len(self.slab) // self.layout.unit_bytes

    def _scales(self, fmt: Format, unit: int, layer: int, head: int) -> npt.NDArray[np.float32]:
        """What the stored K and V of one block are multiplied with: a view of an FP8 block's own two scales, else 1."""
        if fmt is not Format.FP8_E4M3:
            return np.ones(2, np.float32)
        trailer = unit * self.layout.unit_bytes + self.layout.block_elements
        scales = self.slab[trailer:][: 4 * self.layout.num_scales].view(np.float32)
        return scales[self.layout.scale_offsets[layer] + 2 * head :][:2]
