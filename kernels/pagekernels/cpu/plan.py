"""Cutting a step into items of work. An item's extent depends on its own sequence only, never on the batch."""

from __future__ import annotations

import numpy as np

from pagekernels.cpu.blocks import Entries, readable
from pagekernels.cpu.geometry import BLOCK, DIM, DIM_V, HEADS, UNITS, Geometry
from pagekernels.cpu.jit import exact

SPLIT = 256
"""Tokens of one decode item, counted from position 0; a multiple of every block size. Long streams fill all cores."""

DECODE_ROWS = 16
"""From this many rows (query tokens times heads per KV head) on, a sequence takes the prefill path."""

TILE = 64
"""Rows of one prefill item; a multiple of the widest vector."""

GRAIN = 1 << 20
"""Scores' elements (rows * keys * (D + Dv)) below which a call stays on its own thread: some 0.1 ms, while waking
another can cost a time slice where the cores are busy."""

SEQUENCE, HEAD, FIRST, PARTIAL, FIELDS = range(5)
"""An item: sequence, KV head, first token (decode) or row (prefill), and its partial result (-1 for prefill)."""

Items = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Item = np.ndarray[tuple[int], np.dtype[np.int64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int32]]

OK, BAD_QUERIES, BAD_LENGTH, BAD_ENTRY = range(4)


@exact
def visible_from(position: int, window: int, chunk: int) -> int:
    """The first position that the token at `position` attends to."""
    first = max(0, position - window + 1) if window > 0 else 0
    return max(first, position // chunk * chunk) if chunk > 0 else first


@exact
def first_visible(queries: int, kv_len: int, window: int, chunk: int) -> int:
    """The first position that any of a sequence's query tokens attends to."""
    return visible_from(kv_len - queries, window, chunk)


@exact
def check_sequence(
    cu_q_lens: Ints, kv_lens: Ints, tables: Entries, s: int, size: int, num_units: int, tokens: int, start: int
) -> tuple[int, int]:
    """(what is wrong with sequence s, at which table column); only entries that will be read are looked at."""
    queries, kv_len = cu_q_lens[s + 1] - cu_q_lens[s], kv_lens[s]
    if queries < 0 or cu_q_lens[s] < 0 or cu_q_lens[s + 1] > tokens:
        return BAD_QUERIES, 0
    if kv_len == 0 or queries == 0:
        return OK, 0
    if kv_len < queries or kv_len > tables.shape[1] * size:
        return BAD_LENGTH, 0
    for b in range(start // size, (kv_len + size - 1) // size):
        if not readable(tables[s, b], num_units):
            return BAD_ENTRY, b
    return OK, 0


@exact
def check(
    cu_q_lens: Ints, kv_lens: Ints, tables: Entries, geometry: Geometry, window: int, chunk: int, tokens: int
) -> tuple[int, int, int]:
    """(what is wrong, sequence, table column), or OK."""
    for s in range(len(kv_lens)):
        start = first_visible(cu_q_lens[s + 1] - cu_q_lens[s], kv_lens[s], window, chunk)
        size, units = geometry[BLOCK], geometry[UNITS]
        code, column = check_sequence(cu_q_lens, kv_lens, tables, s, size, units, tokens, start)
        if code != OK:
            return code, s, column
    return OK, 0, 0


@exact
def sequence_items(queries: int, kv_len: int, start: int, group: int) -> tuple[int, int, int]:
    """The items of one sequence and KV head as range(first, last, step) of their FIRST field; decode steps by SPLIT."""
    if queries == 0 or kv_len == 0:
        return 0, 0, TILE
    if queries * group < DECODE_ROWS:
        return start // SPLIT * SPLIT, kv_len, SPLIT
    return 0, queries * group, TILE


@exact
def is_small(cu_q_lens: Ints, kv_lens: Ints, geometry: Geometry, group: int, window: int, chunk: int) -> bool:
    """Whether the whole call is less work than GRAIN."""
    work = 0
    for s in range(len(kv_lens)):
        queries = cu_q_lens[s + 1] - cu_q_lens[s]
        work += queries * (kv_lens[s] - first_visible(queries, kv_lens[s], window, chunk))
    return bool(work * group * geometry[HEADS] * (geometry[DIM] + geometry[DIM_V]) < GRAIN)


@exact
def plan(cu_q_lens: Ints, kv_lens: Ints, heads: int, group: int, window: int, chunk: int) -> tuple[Items, int, int]:
    """(items, number of partial results, rows of the largest). Late tiles of a prefill see most and come first."""
    items = np.empty((0, FIELDS), np.int64)
    count = partials = most_rows = 0
    for filling in range(2):
        if filling:
            items = np.empty((count, FIELDS), np.int64)
            count = partials = 0
        for s in range(len(kv_lens)):
            queries = cu_q_lens[s + 1] - cu_q_lens[s]
            start = first_visible(queries, kv_lens[s], window, chunk)
            first, last, step = sequence_items(queries, kv_lens[s], start, group)
            pieces = (last - first + step - 1) // step
            if step == SPLIT:
                most_rows = max(most_rows, queries * group)
            for head in range(heads if filling else 0):
                for index in range(pieces - 1, -1, -1):
                    items[count, SEQUENCE], items[count, HEAD] = s, head
                    items[count, FIRST] = first + index * step
                    items[count, PARTIAL] = partials + index if step == SPLIT else -1
                    count += 1
                partials += pieces if step == SPLIT else 0
            count += 0 if filling else heads * pieces
    return items, partials, most_rows
