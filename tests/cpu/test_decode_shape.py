"""How the tuned decode kernel is cut for what a device's shared memory holds."""

from __future__ import annotations

import itertools

import pytest

from pagekernels.cuda.decode_shape import HEAD_DIMS, DecodeShape, Tuning, defines, fitted
from pagekernels.layout import Format

LIMITS = {"sm_80": 166912, "sm_86": 101376, "sm_90": 232448}
"""Bytes of shared memory that a thread block may have."""

SHAPES = [
    DecodeShape(dim, block_size, group, Format.BF16, queries, mixed, False)
    for dim, block_size, group, queries, mixed in itertools.product(
        HEAD_DIMS, (8, 16, 128), (1, 4, 16), (1, 16), (False, True)
    )
]


@pytest.mark.parametrize("arch", LIMITS)
def test_a_slot_is_always_of_the_same_stream(arch: str) -> None:
    for shape in SHAPES:
        macros = defines(shape, Tuning(mixed=shape.mixed), arch, LIMITS[arch])
        streams, slots = int(macros["STREAMS"]), int(macros["SLOTS"])
        assert slots % streams == 0, shape
        assert slots >= 2 * streams, shape
        assert int(macros["SHARED_BYTES"]) <= LIMITS[arch], shape


def test_what_is_asked_for_is_brought_to_whole_rounds() -> None:
    shape = DecodeShape(128, 16, 4, Format.BF16, 1, False, False)
    assert shape.cut(Tuning(slots=12), LIMITS["sm_90"]) == (6, 12)
    assert shape.cut(Tuning(streams=8, slots=12), LIMITS["sm_90"]) == (8, 8)
    assert shape.cut(Tuning(streams=5, slots=24), LIMITS["sm_90"]) == (5, 20)
    assert shape.cut(Tuning(), LIMITS["sm_90"]) == (8, 16)


def test_a_device_without_room_for_two_tiles_is_refused() -> None:
    shape = fitted(DecodeShape(256, 16, 4, Format.BF16, 1, False, False), 40_000)
    with pytest.raises(ValueError, match="32768 bytes, exceed 40000"):
        shape.cut(Tuning(), 40_000)
