"""When those whom a full queue turns away are told to come back."""

from __future__ import annotations

import pytest

from inferd.core.pace import MAX_S, MIN_S, SPAN, UNKNOWN_S, QueuePace


def paced(*ends: float) -> QueuePace:
    pace = QueuePace()
    for end in ends:
        pace.left(end)
    return pace


@pytest.mark.parametrize("ends", [(), (5.0,)])
def test_before_requests_have_ended_nobody_knows(ends: tuple[float, ...]) -> None:
    assert paced(*ends).retry_after_s(7.0) == UNKNOWN_S


def test_the_next_place_comes_free_after_the_mean_time_between_ends() -> None:
    assert paced(10, 14, 16).retry_after_s(16) == 3.0


def test_only_the_last_ends_count() -> None:
    assert paced(*range(0, 100 * SPAN, 100), *range(5000, 5000 + SPAN)).retry_after_s(5000 + SPAN - 1) == 1.0


def test_each_who_is_turned_away_is_told_a_later_time_until_places_come_free() -> None:
    pace = paced(0, 2, 4)
    assert [pace.retry_after_s(4) for _ in range(3)] == [2.0, 4.0, 6.0]
    pace.left(6)
    pace.left(8)
    assert pace.retry_after_s(8) == 4.0


def test_places_that_come_free_while_nobody_is_turned_away_are_not_saved_up() -> None:
    pace = paced(*range(10))
    assert [pace.retry_after_s(9) for _ in range(2)] == [1.0, 2.0]


def test_an_end_that_is_overdue_makes_the_pace_slower() -> None:
    pace = paced(0, 1, 2)
    assert pace.retry_after_s(30) == 10.0


def test_nobody_is_told_to_come_at_once_or_next_week() -> None:
    assert paced(*[3.0] * 5).retry_after_s(3.0) == MIN_S
    assert paced(0, 1).retry_after_s(1e6) == MAX_S
