"""Attention for many query tokens: panels of LANES rows, vectorised across the rows.

Queries, scores and outputs are held transposed, so that each vector lane is one row (query token i, query head g of the
group; row = i * G + g) and nothing is ever summed across lanes. For a panel and a block:

    S[j, r] = sum_d K[j, d] Qt[d, r]
    P[j, r] = e^(cap(S[j, r]) - m[r])
    O[d, r] = O[d, r] e^(m_old[r] - m[r]) + sum_j V[j, d] P[j, r]

Each lane adds in order of d and j, so a row's result depends neither on its panel nor on its chunk. Online softmax,
float32. Twin: twin.attention.
"""

from __future__ import annotations

import numpy as np

from pagekernels.cpu.blocks import Entries, Floats, Halves, Place, block_rows, padded
from pagekernels.cpu.floats import LANES, LOWEST, capped, exp_lanes
from pagekernels.cpu.jit import exact
from pagekernels.cpu.simd import greatest, load, maximum, muladd, splat, spread, store

M, TOTAL, SINK = range(3)
"""The lines of a panel's state [3, LANES]: running maximum, running sum, sink (-inf: none)."""

SEEN_FROM, SEEN_TO = range(2)
"""The lines of a panel's seen [2, LANES]: each row attends to the keys from..to-1."""

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Bounds = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@exact
def multiply_add(
    a: Floats, base: int, step_m: int, step_k: int, b: Floats, b0: int, terms: int, c: Floats, c0: int, count: int
) -> None:
    """c[m] += sum_k a[base + m * step_m + k * step_k] * b[k], lines of LANES; m < count, a multiple of 4; k < terms.

    b and c start at elements b0 and c0.
    """
    for m in range(0, count, 4):
        to, at = c0 + m * LANES, base + m * step_m
        t0, t1 = load(c, to, LANES), load(c, to + LANES, LANES)
        t2, t3 = load(c, to + 2 * LANES, LANES), load(c, to + 3 * LANES, LANES)
        for k in range(terms):
            x, i = load(b, b0 + k * LANES, LANES), at + k * step_k
            t0 = muladd(spread(a, i, LANES), x, t0)
            t1 = muladd(spread(a, i + step_m, LANES), x, t1)
            t2 = muladd(spread(a, i + 2 * step_m, LANES), x, t2)
            t3 = muladd(spread(a, i + 3 * step_m, LANES), x, t3)
        store(c, to, t0)
        store(c, to + LANES, t1)
        store(c, to + 2 * LANES, t2)
        store(c, to + 3 * LANES, t3)


@exact
def cap(s: Floats, count: int, softcap: np.float32) -> None:
    """Cap `count` scores in place."""
    for i in range(count):
        s[i] = capped(s[i], softcap)


@exact
def hide(s: Floats, first_key: int, count: int, seen: Ints) -> None:
    """s[j, r] = -inf where row r does not attend to key first_key + j."""
    for j in range(count):
        key = np.int32(first_key + j)
        for r in range(LANES):
            visible = seen[SEEN_FROM, r] <= key < seen[SEEN_TO, r]
            s[j * LANES + r] = s[j * LANES + r] if visible else np.float32(-np.inf)


@exact
def weigh(s: Floats, first: int, last: int, state: Floats, o: Floats) -> None:
    """Turn the scores s[first:last] into weights; bring state and o [Dv, LANES] to the new maxima."""
    old = load(state, M * LANES, LANES)
    top = old
    for j in range(first, last):
        top = maximum(load(s, j * LANES, LANES), top)
    total = load(state, TOTAL * LANES, LANES)
    if greatest(top - old) > np.float32(0.0):
        rescale = exp_lanes(old - top)
        total = total * rescale
        for d in range(len(o)):
            store(o, d * LANES, load(o, d * LANES, LANES) * rescale)
    for j in range(first, last):
        weight = exp_lanes(load(s, j * LANES, LANES) - top)
        store(s, j * LANES, weight)
        total = total + weight
    store(state, M * LANES, top)
    store(state, TOTAL * LANES, total)


@exact
def clear(c: Floats, first: int, last: int) -> None:
    """c[first:last] = 0, in lines of LANES."""
    for line in range(first, last):
        store(c, line * LANES, splat(np.float32(0.0), LANES))


@exact
def finish(state: Floats, o: Floats) -> None:
    """Divide o [Dv, LANES] by the softmax's denominator, the sink's share included."""
    m, sink = load(state, M * LANES, LANES), load(state, SINK * LANES, LANES)
    top = maximum(sink, m)
    rescale = exp_lanes(m - top)
    total = muladd(load(state, TOTAL * LANES, LANES), rescale, exp_lanes(sink - top))
    for d in range(len(o)):
        store(o, d * LANES, load(o, d * LANES, LANES) * rescale / total)


@exact
def seen_bounds(seen: Ints) -> Bounds:
    """[panels, 4]: the least and greatest SEEN_FROM, the least and greatest SEEN_TO of each panel's rows."""
    bounds = np.empty((len(seen), 4), np.int64)
    for p in range(len(seen)):
        bounds[p, 0], bounds[p, 1] = seen[p, SEEN_FROM].min(), seen[p, SEEN_FROM].max()
        bounds[p, 2], bounds[p, 3] = seen[p, SEEN_TO].min(), seen[p, SEEN_TO].max()
    return bounds


@exact
def prefill_tile(
    words: Floats,
    halves: Halves,
    table: Entries,
    place: Place,
    qt: Floats,
    seen: Ints,
    softcap: np.float32,
    state: Floats,
    o: Floats,
) -> None:
    """Fill o [panels, padded(Dv), LANES] for the queries qt [panels, D, LANES].

    Of state [panels, 3, LANES] only the sinks are read; seen is [panels, 2, LANES].
    """
    unit_bytes, element, size, dim, dim_v, scale = place
    stride, stride_v = padded(dim), padded(dim_v)
    key_scratch, value_scratch = np.empty(size * stride, np.float32), np.empty(size * stride_v, np.float32)
    s, bounds = np.empty(size * LANES, np.float32), seen_bounds(seen)
    state[:, M], state[:, TOTAL], o[:] = LOWEST, np.float32(0.0), np.float32(0.0)
    first_block, last_block = bounds[:, 0].min() // size, (bounds[:, 3].max() + size - 1) // size
    for b in range(first_block, last_block):
        start, v = b * size, element + size * dim
        keys, k0 = block_rows(words, halves, table[b], unit_bytes, element, size, dim, scale, key_scratch)
        values, v0 = block_rows(words, halves, table[b], unit_bytes, v, size, dim_v, scale + 1, value_scratch)
        for p in range(len(qt)):
            low, high = max(bounds[p, 0] - start, 0), min(bounds[p, 3] - start, size)
            if low < high:
                first, last = low // 4 * 4, (high + 3) // 4 * 4
                clear(s, first, last)
                multiply_add(keys, k0 + first * stride, stride, 1, qt[p], 0, dim, s, first * LANES, last - first)
                if softcap > np.float32(0.0):
                    cap(s, last * LANES, softcap)
                if start + low < bounds[p, 1] or start + high > bounds[p, 2]:
                    hide(s, start, high, seen[p])
                weigh(s, low, high, state[p], o[p])
                at, weights = v0 + low * stride_v, low * LANES
                multiply_add(values, at, 1, stride_v, s, weights, high - low, o[p], 0, stride_v)
    for p in range(len(qt)):
        finish(state[p], o[p])
