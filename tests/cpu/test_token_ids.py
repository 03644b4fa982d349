"""Token ids as bytes and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagepool.token_ids import pack, unpack


def test_ids_are_little_endian_words() -> None:
    assert pack([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_what_is_packed_is_unpacked_again(token_ids: list[int]) -> None:
    assert unpack(pack(token_ids)) == token_ids


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_of_more_than_32_bits_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        pack([1, token])


def test_bytes_are_no_token_ids() -> None:
    with pytest.raises(TypeError, match="give numbers"):
        pack(bytes(4))


def test_a_part_of_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes"):
        unpack(bytes(7))
