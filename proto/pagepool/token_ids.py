"""Token ids as bytes, 32-bit and little-endian: how messages carry those of long prompts.

Protobuf's numbers are converted one by one on either side, which takes longer than all else that is done with a prompt
that is found in the pool.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4


def pack(token_ids: Sequence[int]) -> bytes:
    """The ids as bytes. ValueError or TypeError if one is no unsigned 32-bit integer."""
    if isinstance(token_ids, (bytes, bytearray, memoryview)):
        raise TypeError("token ids are given as bytes, which may mean one id each or four bytes of one; give numbers")
    try:
        return _little_endian(array("I", token_ids)).tobytes()
    except OverflowError as error:
        raise ValueError(f"a token id does not fit into 32 bits: {error}") from error


def unpack(packed: bytes) -> list[int]:
    """The ids of bytes; ValueError if there is a part of an id at the end."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {TOKEN_BYTES}-byte token ids")
    words = array("I")
    words.frombytes(packed)
    return _little_endian(words).tolist()


def _little_endian(words: array[int]) -> array[int]:
    assert words.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        words.byteswap()
    return words
