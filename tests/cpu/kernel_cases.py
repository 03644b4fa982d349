"""Random pools and batches for the kernel tests, poisoned wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from pagekernels.layout import LAYOUT_LINEAR, Format, LayerShape, PagedLayout, pack_entry, slot_mapping
from pagekernels.ops import AttentionBatch, AttentionParams
from pagekernels.twin import TwinOps, decode, encode, places

FORMATS = (Format.F32, Format.F16, Format.BF16)
TOLERANCE = {Format.F32: 4e-6, Format.F16: 2e-3, Format.BF16: 2e-2}
"""Of the output, whose values are of order 1: float32 sums, then one rounding to the format."""

ABSURD = np.uint32(0xFFFFFFFF)
LAYER = 1
QUARTER = AttentionParams(0.25)
BETWEEN_LAYERS = (LayerShape(2, 8, 4), LayerShape(1, 16, 8))


@dataclass
class Case:
    """One layer's attention over a shuffled, poisoned pool. Sequences are (query tokens, KV tokens)."""

    sequences: tuple[tuple[int, int], ...]
    fmt: Format = Format.F32
    block_size: int = 16
    heads: int = 2
    group: int = 2
    dims: tuple[int, int] = (16, 16)
    params: AttentionParams = QUARTER
    seed: int = 0
    constant_v: float | None = None
    version: int = LAYOUT_LINEAR
    fp8_every: int = 0
    """Every so-many-th block of a table is FP8, of random elements and scales; 0: none."""
    compressed: bool = False
    """The FP8 blocks are made by compress_blocks instead, from full blocks only, as in service."""
    layout: PagedLayout = field(init=False)
    originals: list = field(init=False)
    """(k, v) of each sequence before anything was compressed."""

    def __post_init__(self):
        middle = LayerShape(self.heads, *self.dims)
        self.layout = PagedLayout(
            self.block_size, (BETWEEN_LAYERS[0], middle, BETWEEN_LAYERS[1]), self.fmt, self.version
        )

    def dtype(self):
        return np.float32 if self.fmt is Format.F32 else np.uint16

    def values(self, *shape, constant=None):
        """Normal numbers that the format holds exactly, as that format stores them."""
        drawn = self.rng.normal(size=shape) if constant is None else np.full(shape, constant)
        return encode(self.fmt, drawn.astype(np.float32))

    def build(self):
        """(slab, q, batch, [(k, v) of each sequence])."""
        self.rng = np.random.default_rng(self.seed)
        needed = [-(-kv // self.block_size) for _, kv in self.sequences]
        blocks = sum(needed) + 3
        slab = np.full(blocks * self.layout.block_bytes, 0xFF, np.uint8)  # NaN in every format
        units = self.rng.permutation(blocks) * self.layout.units_per_block
        tables = np.full((len(needed), max(needed, default=0) + 2), ABSURD)
        writer, tokens, used = TwinOps(slab, self.layout), [], 0
        self.originals = []
        for s, (_, kv) in enumerate(self.sequences):
            tables[s, : needed[s]] = [pack_entry(self.fmt, 0, int(u)) for u in units[used : used + needed[s]]]
            used += needed[s]
            k = self.values(kv, self.heads, self.dims[0])
            v = self.values(kv, self.heads, self.dims[1], constant=self.constant_v)
            writer.append(LAYER, k, v, self.slots(tables[s], 0, kv))
            self.originals.append((k.copy(), v.copy()))
            if self.compressed:
                k, v = decode(self.fmt, k), decode(self.fmt, v)
                for b in range(0, kv // self.block_size, self.fp8_every):
                    self.compress(writer, tables[s], b, (k, v), int(units[-1]))
            else:
                for b in range(0, needed[s], self.fp8_every) if self.fp8_every else ():
                    self.draw(writer, tables[s], b, (k, v))
            tokens.append((k, v))
        lengths = [n for n, _ in self.sequences]
        q = self.values(sum(lengths), self.heads * self.group, self.dims[0])
        batch = AttentionBatch(
            np.cumsum([0, *lengths]).astype(np.int32), np.array([kv for _, kv in self.sequences], np.int32), tables
        )
        return slab, q, batch, tokens

    def compress(self, writer, table, b, tokens, spare):
        """Compress block b by way of unit `spare`, into its own first unit; make `tokens` what it then means."""
        unit, size = int(table[b]) & (2**26 - 1), self.block_size
        entry, own, other = (
            np.array([e], np.uint32)
            for e in (table[b], pack_entry(Format.FP8_E4M3, 0, unit), pack_entry(Format.FP8_E4M3, 0, spare))
        )
        writer.compress_blocks(entry, other)
        writer.slab[unit * self.layout.unit_bytes :][: self.layout.block_bytes] = 0xFF
        writer.copy_blocks(other, own)
        writer.slab[spare * self.layout.unit_bytes :][: self.layout.unit_bytes] = 0xFF
        read = [np.zeros((self.heads, size, d), np.float32) for d in self.dims]
        writer.gather(LAYER, own, size, *read)
        table[b] = own[0]
        for x, values in zip(tokens, read, strict=True):
            x[b * size : (b + 1) * size] = values.transpose(1, 0, 2)

    def draw(self, writer, table, b, tokens):
        """Make block b an FP8 block of random numbers, in its own first unit, and `tokens` what they mean."""
        unit, first = int(table[b]) & (2**26 - 1), b * self.block_size
        table[b] = pack_entry(Format.FP8_E4M3, 0, unit)
        writer.slab[unit * self.layout.unit_bytes :][: self.layout.block_bytes] = 0xFF
        for head in range(self.heads):
            scales = writer._scales(Format.FP8_E4M3, unit, LAYER, head)
            scales[:] = self.rng.choice([0.25, 0.5, 2.0], 2)
            for x, rows, scale in zip(tokens, writer._rows(Format.FP8_E4M3, unit, LAYER, head), scales, strict=True):
                part = x[first : first + self.block_size, head]
                stored = self.rng.choice(np.array([0, 1, 0x81, 0x28, 0xA9, 0x33, 0x3F, 0xC0], np.uint8), part.shape)
                where = places(self.layout, rows.shape[1], 1)[: len(part)]
                rows[np.arange(len(part))[:, None], where] = stored
                x[first : first + self.block_size, head] = encode(self.fmt, decode(Format.FP8_E4M3, stored) * scale)

    def slots(self, table, first, last):
        return np.array(slot_mapping(table.tolist(), first, last, self.block_size), np.int64)

    def attend(self, ops, q, batch):
        """out as float32, with NaN wherever nothing was written."""
        poison = encode(self.fmt, np.full((*q.shape[:2], self.dims[1]), np.nan, np.float32))
        ops.attend(LAYER, q, poison, batch, self.params)
        return decode(self.fmt, poison)


def only(batch, q, s):
    """The batch and q of sequence s alone."""
    first, last = batch.cu_q_lens[s], batch.cu_q_lens[s + 1]
    alone = AttentionBatch(
        np.array([0, last - first], np.int32), batch.kv_lens[s : s + 1], batch.block_tables[s : s + 1]
    )
    return alone, q[first:last]


def with_params(case, **changes):
    return replace(case, params=replace(case.params, **changes))


def dense_attention(case, q, tokens):
    """The whole batch by one masked fp64 softmax per sequence and head, with neither pages nor blocks."""
    out = []
    p, first = case.params, 0
    for (n, kv), (k, v) in zip(case.sequences, tokens, strict=True):
        query = decode(case.fmt, q[first : first + n]).astype(np.float64)
        first += n
        key, value = (np.repeat(decode(case.fmt, x).astype(np.float64), case.group, axis=1) for x in (k, v))
        scores = np.einsum("thd,jhd->htj", query, key) * p.scale
        if p.softcap:
            scores = p.softcap * np.tanh(scores / p.softcap)
        at, j = np.arange(kv - n, kv)[:, None], np.arange(kv)[None]
        seen = (j <= at) & ((j > at - p.window) | (p.window == 0))
        if p.chunk:
            seen &= j // p.chunk == at // p.chunk
        weights = np.where(seen, np.exp(scores), 0.0)
        sinks = 0.0 if p.sinks is None else np.exp(p.sinks.astype(np.float64))[:, None, None]
        weights = weights / (weights.sum(-1, keepdims=True) + sinks)
        out.append(np.einsum("htj,jhd->thd", weights, value))
    return np.concatenate(out) if out else np.empty((0, case.heads * case.group, case.dims[1]))


@st.composite
def cases(draw):
    size = draw(st.sampled_from((8, 16, 32, 128)))
    heads, group = draw(st.sampled_from(((1, 1), (3, 3), (2, 4), (1, 17))))
    lengths = st.sampled_from((0, 1, size - 1, size, size + 1, 3 * size + 2)) | st.integers(2, 300)
    sequences = []
    for kv in draw(st.lists(lengths, min_size=1, max_size=4)):
        queries = draw(st.sampled_from((0, 1, min(kv, 3), min(kv, 40))))
        sequences.append((min(queries, kv), kv))
    sinks = np.linspace(-2, 3, heads * group, dtype=np.float32)
    params = AttentionParams(
        scale=draw(st.sampled_from((0.125, 0.3))),
        window=draw(st.sampled_from((0, 0, 1, 5, 37))),
        chunk=draw(st.sampled_from((0, 0, 24, 64))),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0))),
        sinks=draw(st.sampled_from((None, sinks))),
    )
    return Case(
        sequences=tuple(sequences),
        fmt=draw(st.sampled_from(FORMATS)),
        block_size=size,
        heads=heads,
        group=group,
        dims=draw(st.sampled_from(((64, 64), (16, 8), (24, 12), (20, 80), (8, 1)))),
        params=params,
        seed=draw(st.integers(0, 1000)),
    )
