"""Seconds on the wire and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagepool.durations import NANOSECONDS, to_duration, to_seconds, to_timestamp


@given(st.floats(0, 1e9))
def test_seconds_come_back_to_the_nanosecond_from_a_valid_message(seconds: float) -> None:
    for message in (to_duration(seconds), to_timestamp(seconds)):
        assert 0 <= message.nanos < NANOSECONDS
        assert to_seconds(message) == pytest.approx(seconds, abs=1e-9, rel=1e-15)
        assert message.ToNanoseconds() == round(seconds * 1e9)


def test_what_rounds_up_to_a_second_is_one() -> None:
    assert to_duration(0.9999999999).seconds == 1
    assert to_duration(0.9999999999).nanos == 0
