"""Attention for a few query tokens: one pass over K and V, vectorised along the head.

    partial[row] = (sum_j e^(s_j - m) v_j [Dv],  m = max_j s_j,  l = sum_j e^(s_j - m)),  s_j = cap(scale * q_row . k_j)

for the rows (query token i, query head g of the group; row = i * G + g) of one sequence and KV head, over the keys of
one SPLIT; `merge` joins a sequence's partials in order of position. Online softmax, float32. Twin: twin.attention.
"""

from __future__ import annotations

import numpy as np

from pagekernels.cpu.blocks import Entries, Floats, Halves, block_rows
from pagekernels.cpu.floats import exp, tanh
from pagekernels.cpu.jit import ANY_ORDER, SEQUENTIAL, device
from pagekernels.cpu.plan import visible_from


@device(ANY_ORDER)
def dot_rows(q: Floats, keys: Floats, base: int, first: int, last: int, dim: int, scores: Floats) -> None:
    """scores[j] = q . keys[j] for j in first..last-1; four rows at a time."""
    j = first
    while j + 4 <= last:
        r = base + j * dim
        k0, k1 = keys[r : r + dim], keys[r + dim : r + 2 * dim]
        k2, k3 = keys[r + 2 * dim : r + 3 * dim], keys[r + 3 * dim : r + 4 * dim]
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for d in range(dim):
            s0 += q[d] * k0[d]
            s1 += q[d] * k1[d]
            s2 += q[d] * k2[d]
            s3 += q[d] * k3[d]
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = s0, s1, s2, s3
        j += 4
    while j < last:
        k0 = keys[base + j * dim : base + (j + 1) * dim]
        s0 = np.float32(0.0)
        for d in range(dim):
            s0 += q[d] * k0[d]
        scores[j] = s0
        j += 1


@device(SEQUENTIAL)
def add_rows(weights: Floats, values: Floats, base: int, first: int, last: int, dim: int, total: Floats) -> None:
    """total += weights[j] * values[j] for j in first..last-1, in that order; four rows at a time."""
    j = first
    while j + 4 <= last:
        r = base + j * dim
        v0, v1 = values[r : r + dim], values[r + dim : r + 2 * dim]
        v2, v3 = values[r + 2 * dim : r + 3 * dim], values[r + 3 * dim : r + 4 * dim]
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(dim):
            total[d] = total[d] + w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
        j += 4
    while j < last:
        v0, w0 = values[base + j * dim : base + (j + 1) * dim], weights[j]
        for d in range(dim):
            total[d] += w0 * v0[d]
        j += 1


@device(SEQUENTIAL)
def softmax_step(scores: Floats, first: int, last: int, softcap: np.float32, state: Floats, total: Floats) -> None:
    """Turn scores[first:last] into weights; bring state (m, l) and total [Dv] to the new maximum."""
    if softcap > np.float32(0.0):
        for j in range(first, last):
            scores[j] = softcap * tanh(scores[j] / softcap)
    top = state[0]
    for j in range(first, last):
        top = max(top, scores[j])
    if top > state[0]:
        rescale = exp(state[0] - top)
        state[0] = top
        state[1] *= rescale
        for d in range(len(total)):
            total[d] *= rescale
    for j in range(first, last):
        scores[j] = exp(scores[j] - top)
    for j in range(first, last):
        state[1] += scores[j]


@device(SEQUENTIAL)
def decode_item(
    words: Floats,
    halves: Halves,
    table: Entries,
    place: tuple[int, int, int, int, int],
    q: Floats,
    ranges: tuple[int, int, int, int, int, int, int],
    softcap: np.float32,
    scratch: tuple[Floats, Floats, Floats],
    partial: Floats,
) -> None:
    """Fill partial [rows, Dv + 2]. ranges: position of the first query, its rows' group, window, chunk, rows, keys."""
    unit_bytes, element, size, dim, dim_v = place
    position, group, window, chunk, rows, first_key, last_key = ranges
    key_scratch, value_scratch, scores = scratch
    partial[:, :dim_v] = 0.0
    partial[:, dim_v] = -np.inf
    partial[:, dim_v + 1] = 0.0
    for b in range(first_key // size, (last_key + size - 1) // size):
        start = b * size
        low, high = max(first_key - start, 0), min(last_key - start, size)
        keys, k0 = block_rows(words, halves, table[b], unit_bytes, element, high * dim, key_scratch)
        values, v0 = block_rows(
            words, halves, table[b], unit_bytes, element + size * dim, high * dim_v, value_scratch
        )
        for row in range(rows):
            at = position + row // group
            first = max(low, visible_from(at, window, chunk) - start)
            last = min(high, at + 1 - start)
            if first < last:
                dot_rows(q[row], keys, k0, first, last, dim, scores)
                softmax_step(scores, first, last, softcap, partial[row, dim_v:], partial[row, :dim_v])
                add_rows(scores, values, v0, first, last, dim_v, partial[row, :dim_v])


@device(SEQUENTIAL)
def merge(partials: Floats, row: int, sink: np.float32, total: Floats) -> None:
    """total [Dv] = the row's attention, from partials [splits, rows, Dv + 2]; a sink of -inf is none."""
    dim = partials.shape[2] - 2
    top = sink
    for p in range(len(partials)):
        top = max(top, partials[p, row, dim])
    weight = exp(sink - top)
    total[:] = 0.0
    for p in range(len(partials)):
        rescale = exp(partials[p, row, dim] - top)
        weight += partials[p, row, dim + 1] * rescale
        for d in range(dim):
            total[d] += partials[p, row, d] * rescale
    for d in range(dim):
        total[d] /= weight
