"""Attention for a few query tokens: one pass over K, one over V, vectorised along the head.

    partial[row] = (sum_j e^(s_j - m) v_j [Dv],  m = max_j s_j,  l = sum_j e^(s_j - m)),  s_j = cap(scale * q_row . k_j)

for the rows (query token i, query head g of the group; row = i * G + g) of one sequence and KV head, over the keys j of
one SPLIT; `merge` joins a sequence's partials in order of position (online softmax). float32. Twin: twin.attention.
"""

from __future__ import annotations

import numpy as np

from pagekernels.cpu.blocks import Entries, Floats, Halves, Place, block_rows, padded
from pagekernels.cpu.floats import LANES, LOWEST, capped, exp, exp_lanes
from pagekernels.cpu.jit import exact
from pagekernels.cpu.plan import SPLIT
from pagekernels.cpu.simd import greatest, load, maximum, muladd, splat, spread, store, sums4

WIDE = 64
"""Output elements held in registers at a time."""


@exact
def dot_rows(q: Floats, row: int, keys: Floats, base: int, count: int, scores: Floats, to: int) -> None:
    """scores[row, to + j] = q[row] . keys[j] for j < count rounded up to 4, which may hold garbage."""
    stride = q.shape[1]
    zero = splat(np.float32(0.0), LANES)
    for j in range(0, count, 4):
        at = base + j * stride
        s0, s1, s2, s3 = zero, zero, zero, zero
        for d in range(0, stride, LANES):
            x = load(q, row * stride + d, LANES)
            s0 = muladd(x, load(keys, at + d, LANES), s0)
            s1 = muladd(x, load(keys, at + stride + d, LANES), s1)
            s2 = muladd(x, load(keys, at + 2 * stride + d, LANES), s2)
            s3 = muladd(x, load(keys, at + 3 * stride + d, LANES), s3)
        store(scores, row * scores.shape[1] + to + j, sums4(s0, s1, s2, s3))


@exact
def weigh(scores: Floats, first: int, last: int, softcap: np.float32, partial: Floats) -> None:
    """Turn scores[first:last] of SPLIT into weights e^(s - m), all others into 0; m and l go to the partial's end."""
    if softcap > np.float32(0.0):
        for j in range(SPLIT):
            scores[j] = capped(scores[j], softcap)
    scores[: max(first, 0)] = -np.inf
    scores[max(first, last, 0) :] = -np.inf
    tops = splat(LOWEST, LANES)
    for j in range(0, SPLIT, LANES):
        tops = maximum(load(scores, j, LANES), tops)
    top, total = greatest(tops), np.float32(0.0)
    for j in range(0, SPLIT, LANES):
        store(scores, j, exp_lanes(load(scores, j, LANES) - splat(top, LANES)))
    for j in range(max(first, last, 0)):
        total += scores[j]
    partial[-2], partial[-1] = top, total


@exact
def add_rows(weights: Floats, values: Floats, base: int, stride: int, count: int, partial: Floats, at: int) -> None:
    """partial[at:at + stride] += weights[j] * values[j] for j < count, in that order."""
    d = 0
    while d + WIDE <= stride:
        total = load(partial, at + d, WIDE)
        for j in range(count):
            total = muladd(spread(weights, j, WIDE), load(values, base + j * stride + d, WIDE), total)
        store(partial, at + d, total)
        d += WIDE
    while d < stride:
        rest = load(partial, at + d, LANES)
        for j in range(count):
            rest = muladd(spread(weights, j, LANES), load(values, base + j * stride + d, LANES), rest)
        store(partial, at + d, rest)
        d += LANES


@exact
def score_keys(
    words: Floats,
    halves: Halves,
    table: Entries,
    place: Place,
    q: Floats,
    first_key: int,
    last_key: int,
    scores: Floats,
    scratch: Floats,
) -> None:
    """scores[row, j] = q[row] . k[first_key + j]; first_key is a multiple of 4, and so is the room in scores."""
    unit_bytes, element, size, dim, _, scale = place
    for b in range(first_key // size, (last_key + size - 1) // size):
        low, high = max(first_key - b * size, 0), min(last_key - b * size, size)
        start = element + low * dim
        keys, base = block_rows(words, halves, table[b], unit_bytes, start, high - low, dim, scale, scratch)
        for row in range(len(q)):
            dot_rows(q, row, keys, base, high - low, scores, b * size + low - first_key)


@exact
def add_values(
    words: Floats,
    halves: Halves,
    table: Entries,
    place: Place,
    first_key: int,
    last_key: int,
    weights: Floats,
    scratch: Floats,
    partial: Floats,
) -> None:
    """partial[row, :Dv] = sum_j weights[row, j] v[first_key + j]."""
    unit_bytes, element, size, dim, dim_v, scale = place
    partial[: len(weights), :-2] = np.float32(0.0)
    for b in range(first_key // size, (last_key + size - 1) // size):
        low, high = max(first_key - b * size, 0), min(last_key - b * size, size)
        start = element + size * dim + low * dim_v
        values, base = block_rows(words, halves, table[b], unit_bytes, start, high - low, dim_v, scale + 1, scratch)
        for row in range(len(weights)):
            line, at = weights[row, b * size + low - first_key :], row * partial.shape[1]
            add_rows(line, values, base, padded(dim_v), high - low, partial, at)


@exact
def merge(partials: Floats, row: int, sink: np.float32, total: Floats) -> None:
    """Total [Dv] = the row's attention, from partials [splits, rows, padded(Dv) + 2]; a sink of -inf is none."""
    dim = partials.shape[2] - 2
    top = max(sink, LOWEST)
    for p in range(len(partials)):
        top = max(top, partials[p, row, dim])
    weight = exp(sink - top)
    total[:] = np.float32(0.0)
    for p in range(len(partials)):
        rescale = exp(partials[p, row, dim] - top)
        weight += partials[p, row, dim + 1] * rescale
        for d in range(len(total)):
            total[d] += partials[p, row, d] * rescale
    for d in range(len(total)):
        total[d] /= weight
