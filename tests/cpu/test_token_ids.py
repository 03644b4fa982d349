"""Token ids as bytes and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagepool.token_ids import all_below, pack, unpack


def test_ids_are_little_endian_words() -> None:
    assert pack([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_what_is_packed_is_unpacked_again(token_ids: list[int]) -> None:
    assert unpack(pack(token_ids)).tolist() == token_ids
    assert pack(unpack(pack(token_ids))) == pack(token_ids)


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 999, 1000, 1001, 2**31 - 1, 2**31])), st.booleans())
def test_ids_are_all_below_a_limit_or_one_is_not(token_ids: list[int], narrow: bool) -> None:
    limit = 1000 if narrow else 2**31
    assert all_below(pack(token_ids), limit) is all(token < limit for token in token_ids)
    few = [token % 1001 for token in token_ids]
    assert all_below(pack(few), 1000) is all(token < 1000 for token in few)


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
