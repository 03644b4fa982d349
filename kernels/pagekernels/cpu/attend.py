"""The parallel entry point of attention: plan, share out the items among threads, merge.

    threads take items by an atomic counter     item -> (sequence, KV head, split of the keys | tile of the rows)

Every item writes its own output, and splits are merged in order, so neither the number of threads nor their timing can
change a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange, types

from pagekernels.cpu.blocks import Entries, Floats, Halves, padded
from pagekernels.cpu.decode import add_values, merge, score_keys, weigh
from pagekernels.cpu.floats import LANES
from pagekernels.cpu.geometry import BLOCK, DIM, DIM_V, FORMAT, HEADS, Geometry, head_place
from pagekernels.cpu.jit import exact, kernel, next_ticket, read_only
from pagekernels.cpu.plan import (
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
    check,
    first_visible,
    is_small,
    plan,
    visible_from,
)
from pagekernels.cpu.prefill import SEEN_FROM, SEEN_TO, SINK, prefill_tile
from pagekernels.cpu.rows import element, store_element

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


Counters = np.ndarray[tuple[int], np.dtype[np.int64]]


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


@exact
def sink_of(sinks: Floats, head: int) -> np.float32:
    """A query head's sink, -inf for none."""
    return sinks[head] if len(sinks) else np.float32(-np.inf)


@exact
def run_decode(step: Step, item: Item, scratch: Floats, partials: Floats) -> None:
    """Load one sequence's few query rows of a KV head and fill the item's partial."""
    s, head, geometry, group = item[SEQUENCE], item[HEAD], step.geometry, step.group
    t0, queries, kv_len = step.cu_q_lens[s], step.cu_q_lens[s + 1] - step.cu_q_lens[s], step.kv_lens[s]
    q = np.zeros((queries * group, padded(geometry[DIM])), np.float32)
    for row in range(len(q)):
        t, h = t0 + row // group, head * group + row % group
        for d in range(geometry[DIM]):
            q[row, d] = element(step.q32, step.q16, geometry[FORMAT], t, h, d) * step.scale
    start = max(item[FIRST], first_visible(queries, kv_len, step.window, step.chunk))
    first, last = start // 4 * 4, min(item[FIRST] + SPLIT, kv_len)
    place, table, partial = head_place(geometry, head), step.tables[s], partials[item[PARTIAL]]
    scores = np.empty((len(q), SPLIT), np.float32)
    score_keys(step.words, step.halves, table, place, q, first, last, scores, scratch)
    for row in range(len(q)):
        at = kv_len - queries + row // group
        low, high = max(start, visible_from(at, step.window, step.chunk)), min(last, at + 1)
        weigh(scores[row], low - first, high - first, step.softcap, partial[row])
    add_values(step.words, step.halves, table, place, start, last, scores[:, start - first :], scratch, partial)


@exact
def run_merge(step: Step, item: Item, partials: Floats, finished: Counters) -> None:
    """If the item was the last of its (sequence, KV head) to finish: merge its splits, and store the output rows."""
    s, head, geometry, group = item[SEQUENCE], item[HEAD], step.geometry, step.group
    t0, queries, kv_len = step.cu_q_lens[s], step.cu_q_lens[s + 1] - step.cu_q_lens[s], step.kv_lens[s]
    start = first_visible(queries, kv_len, step.window, step.chunk) // SPLIT * SPLIT
    first = item[PARTIAL] - (item[FIRST] - start) // SPLIT
    splits = (kv_len - start + SPLIT - 1) // SPLIT
    if next_ticket(finished, first) + 1 < splits:
        return
    total = np.empty(geometry[DIM_V], np.float32)
    for row in range(queries * group):
        t, h = t0 + row // group, head * group + row % group
        merge(partials[first : first + splits], row, sink_of(step.sinks, h), total)
        for d in range(geometry[DIM_V]):
            store_element(step.out32, step.out16, geometry[FORMAT], t, h, d, total[d])


@exact
def run_prefill(step: Step, item: Item) -> None:
    """Load one tile of query rows, transposed; attend; store the output rows."""
    s, head, first, geometry, group = item[SEQUENCE], item[HEAD], item[FIRST], step.geometry, step.group
    fmt, t0, queries = geometry[FORMAT], step.cu_q_lens[s], step.cu_q_lens[s + 1] - step.cu_q_lens[s]
    rows = min(TILE, queries * group - first)
    panels = (rows + LANES - 1) // LANES
    qt = np.zeros((panels, geometry[DIM], LANES), np.float32)
    o = np.empty((panels, padded(geometry[DIM_V]), LANES), np.float32)
    state, seen = np.empty((panels, 3, LANES), np.float32), np.empty((panels, 2, LANES), np.int32)
    for r in range(panels * LANES):
        token, h = (first + min(r, rows - 1)) // group, head * group + (first + min(r, rows - 1)) % group
        at, p, lane = step.kv_lens[s] - queries + token, r // LANES, r % LANES
        seen[p, SEEN_FROM, lane], seen[p, SEEN_TO, lane] = visible_from(at, step.window, step.chunk), at + 1
        state[p, SINK, lane] = sink_of(step.sinks, h)
        for d in range(geometry[DIM]):
            qt[p, d, lane] = element(step.q32, step.q16, fmt, t0 + token, h, d) * step.scale
    place, table = head_place(geometry, head), step.tables[s]
    prefill_tile(step.words, step.halves, table, place, qt, seen, step.softcap, state, o)
    for r in range(rows):
        t, h = t0 + (first + r) // group, head * group + (first + r) % group
        for d in range(geometry[DIM_V]):
            store_element(step.out32, step.out16, fmt, t, h, d, o[r // LANES, d, r % LANES])


@exact
def work(step: Step, items: Items, partials: Floats, tickets: Counters, finished: Counters) -> None:
    """One thread's share: items while there are any."""
    geometry = step.geometry
    scratch = np.empty(geometry[BLOCK] * padded(max(geometry[DIM], geometry[DIM_V])), np.float32)
    ticket = next_ticket(tickets, 0)
    while ticket < len(items):
        item = items[ticket]
        if item[PARTIAL] >= 0:
            run_decode(step, item, scratch, partials)
            run_merge(step, item, partials, finished)
        else:
            run_prefill(step, item)
        ticket = next_ticket(tickets, 0)


@kernel(SIGNATURE, parallel=True)
def attend(
    words: Floats,
    halves: Halves,
    q32: Floats,
    q16: Halves,
    out32: Floats,
    out16: Halves,
    cu_q_lens: Ints,
    kv_lens: Ints,
    tables: Entries,
    sinks: Floats,
    geometry: Geometry,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    threads: int,
) -> tuple[int, int, int]:
    """See the module and PagedOps.attend. Returns plan.check's complaint, before anything is written."""
    group, tokens = max(q32.shape[1], q16.shape[1]) // geometry[HEADS], max(len(q32), len(q16))
    problem = check(cu_q_lens, kv_lens, tables, geometry, window, chunk, tokens)
    if problem[0] != OK:
        return problem
    items, num_partials, rows = plan(cu_q_lens, kv_lens, geometry[HEADS], group, window, chunk)
    partials = np.empty((num_partials, rows, padded(geometry[DIM_V]) + 2), np.float32)
    tickets, finished = np.zeros(1, np.int64), np.zeros(num_partials, np.int64)
    # fmt: off
    step = Step(
        words, halves, q32, q16, out32, out16, cu_q_lens, kv_lens, tables, sinks, geometry, group, np.float32(scale),
        window, chunk, np.float32(softcap),
    )
    # fmt: on
    if is_small(cu_q_lens, kv_lens, geometry, group, window, chunk):
        work(step, items, partials, tickets, finished)
    else:
        for _ in prange(threads):
            work(step, items, partials, tickets, finished)
    return problem
