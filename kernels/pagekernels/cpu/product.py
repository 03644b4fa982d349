"""Products of a few rows with a matrix of weights, as a decode step has them: bound by reading the weights once.

A general matrix product packs or re-reads for a few rows; on two cores with AVX2 this one takes 0.7 of MKL's time for
one row and half of it for nine. Every row of x is added up in the same order however many there are, so that a token's
result does not depend on its batch.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.core import types

from pagekernels.cpu.blocks import Floats, Halves
from pagekernels.cpu.floats import LANES
from pagekernels.cpu.jit import exact, kernel
from pagekernels.cpu.simd import load, muladd, splat, store, sums4, widened

MAX_ROWS = 16
"""Rows of x up to which this is the faster way."""

_CHUNK = 32  # rows of weights that a thread takes at a time


def takes(num_rows: int, width: int) -> bool:
    """Whether `multiply` is made for so many rows of this many elements."""
    return 0 < num_rows <= MAX_ROWS and width % LANES == 0


@exact
def _dot4(x: Floats, row: int, line: Floats, at: int, width: int, sums: Floats) -> None:
    """sums[:4] = the dot products of x[row : row + 4] with line[at : at + width]."""
    zero = splat(np.float32(0.0), LANES)
    s0, s1, s2, s3 = zero, zero, zero, zero
    first = row * width
    for i in range(0, width, LANES):
        w = load(line, at + i, LANES)
        s0 = muladd(w, load(x, first + i, LANES), s0)
        s1 = muladd(w, load(x, first + width + i, LANES), s1)
        s2 = muladd(w, load(x, first + 2 * width + i, LANES), s2)
        s3 = muladd(w, load(x, first + 3 * width + i, LANES), s3)
    store(sums, 0, sums4(s0, s1, s2, s3))


@exact
def _dot1(x: Floats, row: int, line: Floats, at: int, width: int, sums: Floats) -> None:
    """As _dot4 for one row, added up in the same order."""
    zero = splat(np.float32(0.0), LANES)
    s0 = zero
    for i in range(0, width, LANES):
        s0 = muladd(load(line, at + i, LANES), load(x, row * width + i, LANES), s0)
    store(sums, 0, sums4(s0, zero, zero, zero))


@exact
def _line(x: Floats, line: Floats, at: int, out: Floats, column: int) -> None:
    """out[:, column] = x . line[at : at + width]."""
    width, sums = x.shape[1], np.empty(4, np.float32)
    whole = len(x) // 4 * 4
    for row in range(0, whole, 4):
        _dot4(x, row, line, at, width, sums)
        for i in range(4):
            out[row + i, column] = sums[i]
    for row in range(whole, len(x)):
        _dot1(x, row, line, at, width, sums)
        out[row, column] = sums[0]


_WEIGHTS32 = types.Array(types.float32, 2, "C", readonly=True)
_WEIGHTS16 = types.Array(types.uint16, 2, "C", readonly=True)


@kernel(types.void(types.float32[:, ::1], _WEIGHTS32, _WEIGHTS16, types.float32[:, ::1]), parallel=True)
def multiply(x: Floats, weights: Floats, halves: Halves, out: Floats) -> None:
    """Out [M, O] = x [M, I] times weights [O, I], or, if those have no rows, times the bf16 patterns in halves [O, I].

    I is a multiple of LANES. Sums are float32.
    """
    width, num_lines = x.shape[1], out.shape[1]
    for chunk in numba.prange((num_lines + _CHUNK - 1) // _CHUNK):
        scratch = np.empty(width, np.float32)
        for line in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, num_lines)):
            if len(weights):
                _line(x, weights, line * width, out, line)
            else:
                for i in range(0, width, LANES):
                    store(scratch, i, widened(halves, line * width + i, LANES))
                _line(x, scratch, 0, out, line)
