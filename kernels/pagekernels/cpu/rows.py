"""Moving query and output rows between arrays and scratch, in either element type.

Every q, out, k and v travels as a pair (float32 array, 16-bit array) of which the unused one is empty: one compiled
kernel serves all formats.
"""

from __future__ import annotations

import numpy as np

from pagekernels.cpu.blocks import Floats, Halves
from pagekernels.cpu.floats import f32_to_half, half_to_f32
from pagekernels.cpu.jit import exact


@exact
def element(x32: Floats, x16: Halves, fmt: int, t: int, h: int, d: int) -> np.float32:
    """x[t, h, d] as float32."""
    return x32[t, h, d] if len(x32) else half_to_f32(fmt, x16[t, h, d])


@exact
def store_element(x32: Floats, x16: Halves, fmt: int, t: int, h: int, d: int, value: np.float32) -> None:
    """x[t, h, d] = value, rounded to the pair's type."""
    if len(x32):
        x32[t, h, d] = value
    else:
        x16[t, h, d] = f32_to_half(fmt, value)
