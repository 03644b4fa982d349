"""The parallel entry point of attention: plan, share out the items among threads, merge.

    threads take items by an atomic counter     item -> (sequence, KV head, split of the keys | tile of the rows)

Every item writes its own output, and splits are merged in order, so neither the number of threads nor their timing can
change a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange, types

from pagekernels.cpu.blocks import Entries, Floats, Halves
from pagekernels.cpu.decode import decode_item, merge
from pagekernels.cpu.geometry import BLOCK, DIM, DIM_V, FORMAT, HEADS, UNITS, Geometry, head_place
from pagekernels.cpu.jit import SEQUENTIAL, device, exact, kernel, next_ticket, read_only
from pagekernels.cpu.plan import (
    DECODE_ROWS,
    FIRST,
    HEAD,
    OK,
    PARTIAL,
    SEQUENCE,
    SPLIT,
    TILE,
    Ints,
    Item,
    Items,
    check_sequence,
    first_visible,
    plan,
)
from pagekernels.cpu.prefill import LANES, SINK, prefill_item, set_seen
from pagekernels.cpu.rows import element, store

SIGNATURE = types.UniTuple(types.int64, 3)(
    types.float32[::1],  # words: the slab
    types.uint16[::1],  # halves: the slab
    read_only(types.float32, 3),  # q32 [T, Hq, D] or empty
    read_only(types.uint16, 3),  # q16 [T, Hq, D] or empty
    types.float32[:, :, :],  # out32 [T, Hq, Dv] or empty
    types.uint16[:, :, :],  # out16 [T, Hq, Dv] or empty
    read_only(types.int32, 1),  # cu_q_lens [S + 1]
    read_only(types.int32, 1),  # kv_lens [S]
    read_only(types.uint32, 2),  # block_tables [S, M]
    read_only(types.float32, 1),  # sinks [Hq] or empty
    types.int64[::1],  # geometry [GEOMETRY]
    types.float64,  # scale
    types.int64,  # window
    types.int64,  # chunk
    types.float64,  # softcap
    types.int64,  # threads
)


class Step(NamedTuple):
    """What every item of a call shares; the names are SIGNATURE's."""

    words: Floats
    halves: Halves
    q32: Floats
    q16: Halves
    out32: Floats
    out16: Halves
    cu_q_lens: Ints
    kv_lens: Ints
    tables: Entries
    sinks: Floats
    geometry: Geometry
    group: int
    scale: np.float32
    window: int
    chunk: int
    softcap: np.float32


Scratch = tuple[Floats, Floats, Floats]
"""K rows of a block [B * D], V rows of a block [B * Dv], scores [B * TILE]."""


@exact
def sink_of(sinks: Floats, head: int) -> np.float32:
    """A query head's sink, -inf for none."""
    return sinks[head] if len(sinks) else np.float32(-np.inf)


@device(SEQUENTIAL)
def run_decode(step: Step, item: Item, scratch: Scratch, partials: Floats) -> None:
    """Load one sequence's few query rows of a KV head and fill the item's partial."""
    s, head, geometry, group = item[SEQUENCE], item[HEAD], step.geometry, step.group
    t0, queries, kv_len = step.cu_q_lens[s], step.cu_q_lens[s + 1] - step.cu_q_lens[s], step.kv_lens[s]
    rows = queries * group
    q = np.empty((rows, geometry[DIM]), np.float32)
    for row in range(rows):
        t, h = t0 + row // group, head * group + row % group
        for d in range(geometry[DIM]):
            q[row, d] = element(step.q32, step.q16, geometry[FORMAT], t, h, d) * step.scale
    first = max(item[FIRST], first_visible(queries, kv_len, step.window, step.chunk))
    last = min(item[FIRST] + SPLIT, kv_len)
    ranges = kv_len - queries, group, step.window, step.chunk, rows, first, last
    place, partial = head_place(geometry, head), partials[item[PARTIAL]]
    decode_item(step.words, step.halves, step.tables[s], place, q, ranges, step.softcap, scratch, partial)


@device(SEQUENTIAL)
def run_merge(step: Step, item: Item, partials: Floats) -> None:
    """Merge the splits of one (sequence, KV head), of which `item` is any, and store its output rows."""
    s, head, geometry, group = item[SEQUENCE], item[HEAD], step.geometry, step.group
    t0, queries, kv_len = step.cu_q_lens[s], step.cu_q_lens[s + 1] - step.cu_q_lens[s], step.kv_lens[s]
    start = first_visible(queries, kv_len, step.window, step.chunk) // SPLIT
    splits = (kv_len + SPLIT - 1) // SPLIT - start
    first = item[PARTIAL] - (item[FIRST] // SPLIT - start)
    total = np.empty(geometry[DIM_V], np.float32)
    for row in range(queries * group):
        t, h = t0 + row // group, head * group + row % group
        merge(partials[first : first + splits], row, sink_of(step.sinks, h), total)
        for d in range(geometry[DIM_V]):
            store(step.out32, step.out16, geometry[FORMAT], t, h, d, total[d])


@device(SEQUENTIAL)
def run_prefill(step: Step, item: Item, scratch: Scratch) -> None:
    """Load one tile of query rows, transposed; attend; store the output rows."""
    s, head, first, geometry, group = item[SEQUENCE], item[HEAD], item[FIRST], step.geometry, step.group
    fmt, t0, queries = geometry[FORMAT], step.cu_q_lens[s], step.cu_q_lens[s + 1] - step.cu_q_lens[s]
    rows = min(TILE, queries * group - first)
    width = (rows + LANES - 1) // LANES * LANES
    qt, o = np.zeros((geometry[DIM], TILE), np.float32), np.empty((geometry[DIM_V], TILE), np.float32)
    state, seen = np.empty((4, TILE), np.float32), np.empty((2, TILE), np.int32)
    state[SINK] = -np.inf
    set_seen(seen, first, rows, group, step.kv_lens[s] - queries, step.window, step.chunk)
    for r in range(rows):
        t, h = t0 + (first + r) // group, head * group + (first + r) % group
        state[SINK, r] = sink_of(step.sinks, h)
        for d in range(geometry[DIM]):
            qt[d, r] = element(step.q32, step.q16, fmt, t, h, d) * step.scale
    place = head_place(geometry, head)
    prefill_item(step.words, step.halves, step.tables[s], place, qt, seen, step.softcap, scratch, state, o, width)
    for r in range(rows):
        t, h = t0 + (first + r) // group, head * group + (first + r) % group
        for d in range(geometry[DIM_V]):
            store(step.out32, step.out16, fmt, t, h, d, o[d, r])


@device(SEQUENTIAL)
def work(step: Step, items: Items, partials: Floats, counter: Ints) -> None:
    """One thread's share: items while there are any."""
    size = step.geometry[BLOCK]
    scratch = (
        np.empty(size * step.geometry[DIM], np.float32),
        np.empty(size * step.geometry[DIM_V], np.float32),
        np.empty(size * TILE, np.float32),
    )
    ticket = next_ticket(counter)
    while ticket < len(items):
        if items[ticket, PARTIAL] >= 0:
            run_decode(step, items[ticket], scratch, partials)
        else:
            run_prefill(step, items[ticket], scratch)
        ticket = next_ticket(counter)


@exact
def check(step: Step, tokens: int) -> tuple[int, int, int]:
    """(what is wrong, sequence, table column), or OK."""
    for s in range(len(step.kv_lens)):
        queries, kv_len = step.cu_q_lens[s + 1] - step.cu_q_lens[s], step.kv_lens[s]
        start = first_visible(queries, kv_len, step.window, step.chunk)
        size, units = step.geometry[BLOCK], step.geometry[UNITS]
        code, column = check_sequence(step.cu_q_lens, step.kv_lens, step.tables, s, size, units, tokens, start)
        if code != OK:
            return code, s, column
    return OK, 0, 0


@kernel(SIGNATURE)
def attend(
    words, halves, q32, q16, out32, out16, cu_q_lens, kv_lens, tables, sinks, geometry, scale, window, chunk, softcap, threads
):
    """See the module and PagedOps.attend. Returns plan.check_sequence's complaint, before anything is written."""
    group = max(q32.shape[1], q16.shape[1]) // geometry[HEADS]
    step = Step(words, halves, q32, q16, out32, out16, cu_q_lens, kv_lens, tables, sinks, geometry, group, np.float32(scale), window, chunk, np.float32(softcap))
    problem = check(step, max(len(q32), len(q16)))
    if problem[0] != OK:
        return problem
    items, num_partials = plan(cu_q_lens, kv_lens, geometry[HEADS], group, window, chunk)
    partials = np.empty((num_partials, DECODE_ROWS, geometry[DIM_V] + 2), np.float32)
    counter = np.zeros(1, np.int64)
    for _ in prange(threads):
        work(step, items, partials, counter)
    for i in prange(len(items)):
        if items[i, PARTIAL] >= 0 and items[i, FIRST] // SPLIT == first_visible(cu_q_lens[items[i, SEQUENCE] + 1] - cu_q_lens[items[i, SEQUENCE]], kv_lens[items[i, SEQUENCE]], window, chunk) // SPLIT:
            run_merge(step, items[i], partials)
    return problem
