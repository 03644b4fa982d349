"""Random pools and batches for the kernel tests, poisoned wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from pagekernels.layout import Format, LayerShape, PagedLayout, pack_entry, slot_mapping
from pagekernels.ops import AttentionBatch, AttentionParams
from pagekernels.twin import TwinOps, decode, encode

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
    layout: PagedLayout = field(init=False)

    def __post_init__(self):
        middle = LayerShape(self.heads, *self.dims)
        self.layout = PagedLayout(self.block_size, (BETWEEN_LAYERS[0], middle, BETWEEN_LAYERS[1]), self.fmt)

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
        for s, (_, kv) in enumerate(self.sequences):
            tables[s, : needed[s]] = [pack_entry(self.fmt, 0, int(u)) for u in units[used : used + needed[s]]]
            used += needed[s]
            k = self.values(kv, self.heads, self.dims[0])
            v = self.values(kv, self.heads, self.dims[1], constant=self.constant_v)
            writer.append(LAYER, k, v, self.slots(tables[s], 0, kv))
            tokens.append((k, v))
        lengths = [n for n, _ in self.sequences]
        q = self.values(sum(lengths), self.heads * self.group, self.dims[0])
        batch = AttentionBatch(
            np.cumsum([0, *lengths]).astype(np.int32), np.array([kv for _, kv in self.sequences], np.int32), tables
        )
        return slab, q, batch, tokens

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
