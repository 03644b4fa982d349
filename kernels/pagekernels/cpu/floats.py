"""Scalar floating point that LLVM can vectorise: 8- and 16-bit formats by bit patterns, exp and tanh by polynomials."""

from __future__ import annotations

import math

import numpy as np

from pagekernels.cpu.jit import exact
from pagekernels.cpu.simd import Vector, exponent, muladd, splat, zero_below
from pagekernels.layout import Format

F16 = int(Format.F16)

LANES = 16
"""Floats of a vector in the inner loops; rows in scratch are whole vectors."""

_LOG2E = np.float32(math.log2(math.e))
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
ROUND = np.float32(1.5 * 2**23)
"""Added to a small float, rounds it to an integer n, which then stands in the sum's low bits."""
_TINY = np.float32(-87.0)
_E4M3_NAN = np.float32(480.0)  # what the pattern of NaN would be worth
_E4M3_MAX = np.uint32(0x43E00000)  # 448

LOWEST = np.float32(-3.4028235e38)
"""Where running maxima start: finite, so that LOWEST - LOWEST is 0 and e^(-inf - LOWEST) is 0."""


@exact
def bits_of(value: np.float32) -> np.uint32:
    """The bit pattern."""
    return np.float32(value).view(np.uint32)


@exact
def float_of(bits: np.uint32) -> np.float32:
    """The float32 of a bit pattern."""
    return np.uint32(bits).view(np.float32)


@exact
def bf16_to_f32(bits: np.uint16) -> np.float32:
    """Exact."""
    return float_of(np.uint32(bits) << np.uint32(16))


@exact
def f16_to_f32(bits: np.uint16) -> np.float32:
    """Exact, subnormals, infinities and NaN included: shift the exponent in, then rebias it by a multiplication."""
    wide = np.uint32(bits)
    magnitude = np.uint32((wide & np.uint32(0x7FFF)) << np.uint32(13))
    rebiased = bits_of(float_of(magnitude) * np.float32(2.0**112))
    special = np.uint32(magnitude | np.uint32(0x7F800000))
    value = special if (wide & np.uint32(0x7C00)) == np.uint32(0x7C00) else rebiased
    return float_of(value | np.uint32((wide & np.uint32(0x8000)) << np.uint32(16)))


@exact
def e4m3_to_f32(stored: np.uint8) -> np.float32:
    """Exact, subnormals and NaN included: shift the exponent in, then rebias it by a multiplication."""
    signed = np.uint32(np.int32(np.int8(stored)) << np.int32(20))
    value = float_of(np.uint32(signed & np.uint32(0x87F00000))) * np.float32(2.0**120)
    return np.float32(np.nan) if abs(value) == _E4M3_NAN else value


@exact
def f32_to_bf16(value: np.float32) -> np.uint16:
    """Rounds to nearest, ties to even."""
    bits = bits_of(value)
    if np.isnan(value):
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@exact
def f32_to_f16(value: np.float32) -> np.uint16:
    """Rounds to nearest, ties to even; too large becomes infinity, too small a subnormal or zero."""
    bits = bits_of(value)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x47800000):
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):
        # Adding 0.5 leaves the subnormal's bits, rounded by the hardware, at the bottom of the sum.
        shifted = bits_of(float_of(magnitude) + np.float32(0.5))
        return np.uint16(sign | np.uint32(shifted - np.uint32(0x3F000000)))
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    return np.uint16(sign | np.uint32((magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)))


@exact
def f32_to_e4m3(value: np.float32) -> np.uint8:
    """Rounds to nearest, ties to even; too large, infinity included, becomes 448, the largest; NaN stays NaN."""
    bits = bits_of(value)
    magnitude = min(np.uint32(bits & np.uint32(0x7FFFFFFF)), _E4M3_MAX)
    odd = np.uint32(np.uint32(magnitude >> np.uint32(20)) & np.uint32(1))
    rebiased = np.uint32(np.uint32(magnitude + np.uint32(0x7FFFF - 0x3C000000 + 2**32)) + odd)
    # The last bit of 2**14 is worth 2**-9, a subnormal's step, so the hardware rounds the sum to whole steps.
    steps = np.uint32(bits_of(float_of(magnitude) + np.float32(2.0**14)) - np.uint32(0x46800000))
    stored = steps if magnitude < np.uint32(0x3C800000) else np.uint32(rebiased >> np.uint32(20))
    stored = np.uint32(0x7F) if np.isnan(value) else stored
    return np.uint8(stored | np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))


@exact
def half_to_f32(fmt: int, bits: np.uint16) -> np.float32:
    """The value of a 16-bit pattern of `fmt`."""
    return f16_to_f32(bits) if fmt == F16 else bf16_to_f32(bits)


@exact
def f32_to_half(fmt: int, value: np.float32) -> np.uint16:
    """The nearest 16-bit pattern of `fmt`."""
    return f32_to_f16(value) if fmt == F16 else f32_to_bf16(value)


@exact
def exp(x: np.float32) -> np.float32:
    """e**x for x <= 0 within 2 ulp; exactly 0 below -87 (and at -inf), exactly 1 at 0, NaN stays NaN."""
    shifted = x * _LOG2E + ROUND
    n = shifted - ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    # The rounded exponent sits in the low bits of `shifted`; moved up it becomes the float 2**n's exponent field.
    power = float_of(np.uint32(bits_of(shifted) + np.uint32(127)) << np.uint32(23))
    return np.float32(0.0) if x < _TINY else p * power


@exact
def exp_lanes(x: Vector) -> Vector:
    """Exp for LANES lanes, with fused multiply-adds."""
    shifted = muladd(x, splat(_LOG2E, LANES), splat(ROUND, LANES))
    n = shifted - splat(ROUND, LANES)
    r = muladd(n, splat(-_LN2_LOW, LANES), muladd(n, splat(-_LN2_HIGH, LANES), x))
    p = muladd(splat(np.float32(1.9875691500e-4), LANES), r, splat(np.float32(1.3981999507e-3), LANES))
    p = muladd(p, r, splat(np.float32(8.3334519073e-3), LANES))
    p = muladd(p, r, splat(np.float32(4.1665795894e-2), LANES))
    p = muladd(p, r, splat(np.float32(1.6666665459e-1), LANES))
    p = muladd(p, r, splat(np.float32(5.0000001201e-1), LANES))
    p = muladd(p, r * r, r) + splat(np.float32(1.0), LANES)
    power: Vector = zero_below(x, splat(_TINY, LANES), p * exponent(shifted))
    return power


@exact
def tanh(x: np.float32) -> np.float32:
    """Within 4 ulp."""
    a = abs(x)
    e = exp(np.float32(-2.0) * a)
    large = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    s = a * a
    p = np.float32(62.0 / 2835.0)
    p = p * s - np.float32(17.0 / 315.0)
    p = p * s + np.float32(2.0 / 15.0)
    p = p * s - np.float32(1.0 / 3.0)
    small = a + a * s * p
    value = small if a < np.float32(0.25) else large
    return -value if x < np.float32(0.0) else value


@exact
def capped(score: np.float32, softcap: np.float32) -> np.float32:
    """Softcap * tanh(score / softcap)."""
    return softcap * tanh(score / softcap)
