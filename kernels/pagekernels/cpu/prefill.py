"""Attention for many query tokens: tiles of rows, vectorised across the rows.

Scores and outputs are held transposed, so that each vector lane is one row (query token i, query head g of the group;
row = i * G + g) and nothing is ever summed across lanes:

    S[j, r] = sum_d K[j, d] Qt[d, r]      P = e^(cap(S) - m)      O[d, r] = O[d, r] e^(m_old - m) + sum_j V[j, d] P[j, r]

Both products are `multiply_add`. Each lane adds in order of d and j, so a row's result does not depend on its tile.
Online softmax, float32. Twin: twin.attention.
"""

from __future__ import annotations

import numpy as np

from pagekernels.cpu.blocks import Entries, Floats, Halves, block_rows
from pagekernels.cpu.floats import exp, tanh
from pagekernels.cpu.jit import SEQUENTIAL, device
from pagekernels.cpu.plan import visible_from

LANES = 16
"""Rows are padded to a multiple of this, the widest vector in float32."""

SINK = 3
"""The lines of a tile's state: running maximum, running sum, rescale factor, sink (-inf: none)."""


@device(SEQUENTIAL)
def multiply_add(a: Floats, base: int, step_m: int, step_k: int, b: Floats, c: Floats, width: int) -> None:
    """c[m, r] += sum_k a[base + m * step_m + k * step_k] * b[k, r] for r < width; k in order."""
    for m in range(len(c)):
        out = c[m]
        k = 0
        while k + 4 <= len(b):
            at = base + m * step_m + k * step_k
            a0, a1, a2, a3 = a[at], a[at + step_k], a[at + 2 * step_k], a[at + 3 * step_k]
            b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
            for r in range(width):
                out[r] = out[r] + a0 * b0[r] + a1 * b1[r] + a2 * b2[r] + a3 * b3[r]
            k += 4
        while k < len(b):
            a0, b0 = a[base + m * step_m + k * step_k], b[k]
            for r in range(width):
                out[r] += a0 * b0[r]
            k += 1


@device(SEQUENTIAL)
def mask_and_cap(s: Floats, start: int, seen: np.ndarray, softcap: np.float32, width: int) -> None:
    """Cap scores, then hide key start + j from row r unless seen[0, r] <= start + j < seen[1, r]."""
    for j in range(len(s)):
        line, key = s[j], np.int32(start + j)
        if softcap > np.float32(0.0):
            for r in range(width):
                line[r] = softcap * tanh(line[r] / softcap)
        low, high = seen[0], seen[1]
        for r in range(width):
            line[r] = line[r] if low[r] <= key and key < high[r] else np.float32(-np.inf)


@device(SEQUENTIAL)
def softmax_lanes(s: Floats, state: Floats, o: Floats, width: int) -> None:
    """Turn s [keys, r] into weights; bring state (m, l, rescale) and o [Dv, r] to the new maxima."""
    m, total, rescale = state[0], state[1], state[2]
    for r in range(width):
        rescale[r] = m[r]
    for j in range(len(s)):
        line = s[j]
        for r in range(width):
            m[r] = line[r] if line[r] > m[r] else m[r]
    moved = False
    for r in range(width):
        moved |= rescale[r] != m[r]
    if moved:
        for r in range(width):
            base = m[r] if m[r] > np.float32(-np.inf) else np.float32(0.0)
            rescale[r] = exp(rescale[r] - base)
            total[r] *= rescale[r]
        for d in range(len(o)):
            line = o[d]
            for r in range(width):
                line[r] *= rescale[r]
    for j in range(len(s)):
        line = s[j]
        for r in range(width):
            base = m[r] if m[r] > np.float32(-np.inf) else np.float32(0.0)
            line[r] = exp(line[r] - base)
            total[r] += line[r]


@device(SEQUENTIAL)
def finish_lanes(state: Floats, o: Floats, width: int) -> None:
    """Divide o [Dv, r] by the softmax's denominator, the sinks' share (-inf: none) included."""
    m, total, rescale, sinks = state[0], state[1], state[2], state[SINK]
    for r in range(width):
        top = max(m[r], sinks[r])
        rescale[r] = exp(m[r] - top)
        total[r] = total[r] * rescale[r] + exp(sinks[r] - top)
    for d in range(len(o)):
        line = o[d]
        for r in range(width):
            line[r] = line[r] * rescale[r] / total[r]


@device(SEQUENTIAL)
def prefill_item(
    words: Floats,
    halves: Halves,
    table: Entries,
    place: tuple[int, int, int, int, int],
    qt: Floats,
    seen: np.ndarray,
    softcap: np.float32,
    scratch: tuple[Floats, Floats, Floats],
    state: Floats,
    o: Floats,
    width: int,
) -> None:
    """Fill o [Dv, r] and state for the queries qt [D, r], which see keys seen[0, r]..seen[1, r]-1."""
    unit_bytes, element, size, dim, dim_v = place
    key_scratch, value_scratch, scores = scratch
    s = scores.reshape(size, qt.shape[1])
    state[0] = -np.inf
    state[1] = 0.0
    o[:] = 0.0
    first_key, last_key = seen[0, :width].min(), seen[1, :width].max()
    all_from, all_to = seen[0, :width].max(), seen[1, :width].min()
    for b in range(first_key // size, (last_key + size - 1) // size):
        start = b * size
        low, high = max(first_key - start, 0), min(last_key - start, size)
        keys, k0 = block_rows(words, halves, table[b], unit_bytes, element, high * dim, key_scratch)
        values, v0 = block_rows(
            words, halves, table[b], unit_bytes, element + size * dim, high * dim_v, value_scratch
        )
        tile = s[low:high]
        tile[:] = 0.0
        multiply_add(keys, k0 + low * dim, dim, 1, qt, tile, width)
        if softcap > np.float32(0.0) or start + low < all_from or start + high > all_to:
            mask_and_cap(tile, start + low, seen, softcap, width)
        softmax_lanes(tile, state, o, width)
        multiply_add(values, v0 + low * dim_v, 1, dim_v, tile, o, width)
    finish_lanes(state, o, width)


@device(SEQUENTIAL)
def set_seen(seen: np.ndarray, row: int, rows: int, group: int, position: int, window: int, chunk: int) -> None:
    """seen[:, r] = the keys that row + r attends to; lanes beyond `rows` repeat the last row."""
    for r in range(seen.shape[1]):
        at = position + (row + min(r, rows - 1)) // group
        seen[0, r] = visible_from(at, window, chunk)
        seen[1, r] = at + 1
