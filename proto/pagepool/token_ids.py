"""Token ids as bytes, 32-bit and little-endian: how messages carry those of long prompts.

Protobuf's numbers are converted one by one on either side, which takes longer than all else that is done with a prompt
that is found in the pool.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

TOKEN_BYTES = 4


def pack(token_ids: Sequence[int]) -> bytes:
    """The ids as bytes. ValueError or TypeError if one is no unsigned 32-bit integer."""
    if isinstance(token_ids, (bytes, bytearray, memoryview)):
        raise TypeError("token ids are given as bytes, which may mean one id each or four bytes of one; give numbers")
    try:
        return _little_endian(array("I", token_ids)).tobytes()
    except OverflowError as error:
        raise ValueError(f"a token id does not fit into 32 bits: {error}") from error


def unpack(packed: bytes) -> array[int]:
    """The ids of bytes; ValueError if there is a part of an id at the end.

    An array, since a list of them takes a hundred times as long: who only hands a prompt on never needs one.
    """
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {TOKEN_BYTES}-byte token ids")
    words = array("I")
    words.frombytes(packed)
    return _little_endian(words)


def all_below(packed: bytes, limit: int) -> bool:
    """Whether every id of these bytes, of which there are whole ones, is below `limit`, from 0 to 2**31.

    Looks at all of them at once, as the digits of one number: none reaches 2**31, and none does with 2**31 - limit
    added, which carries into no other id then.
    """
    digits, bits = int.from_bytes(packed, "little"), (len(packed) // TOKEN_BYTES).bit_length()
    top, more = _repeated(1 << 31, bits), _repeated((1 << 31) - limit, bits)
    return not digits & top and not (digits + more) & top


@lru_cache(maxsize=32)
def _repeated(digit: int, bits: int) -> int:
    """The digit 2**bits - 1 times: once for each of up to so many ids, since those beyond the last do no harm."""
    return int.from_bytes(digit.to_bytes(TOKEN_BYTES, "little") * ((1 << bits) - 1), "little")


def _little_endian(words: array[int]) -> array[int]:
    assert words.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        words.byteswap()
    return words
