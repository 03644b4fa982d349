"""How long drafts are: longer while guesses are right, shorter and then rarer while they are wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.core.speculation import FIRST_DRAFT, FIRST_REST, LAST_REST, Speculation


class Endless:
    """Always has something to guess."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, limit: int) -> list[int]:
        self.asked.append(limit)
        return [1] * limit


class Never:
    """Never has."""

    def propose(self, limit: int) -> list[int]:
        return []


def rest_of(speculation: Speculation) -> int:
    """How many tokens it decodes without a guess from now on."""
    count = 0
    while speculation.resting:
        assert speculation.draft(99) == []
        speculation.verified(0, 0)
        count += 1
    return count


def test_drafts_double_while_all_of_them_is_accepted() -> None:
    speculation, sizes = Speculation(Endless(), 12), []
    for _ in range(5):
        sizes.append(len(speculation.draft(99)))
        speculation.verified(sizes[-1], sizes[-1])
    assert sizes == [FIRST_DRAFT, 4, 8, 12, 12]
    assert (speculation.num_drafted, speculation.num_accepted) == (38, 38)


def test_a_draft_that_was_right_in_part_is_followed_by_one_a_token_longer_than_that() -> None:
    speculation = Speculation(Endless(), 16)
    for _ in range(3):
        speculation.verified(len(speculation.draft(99)), len(speculation.draft(99)))
    assert len(speculation.draft(99)) == 16
    speculation.verified(16, 5)
    assert len(speculation.draft(99)) == 6


def test_wrong_guesses_halve_then_rest_ever_longer_until_one_is_right() -> None:
    speculation, rests = Speculation(Endless(), 8), []
    speculation.verified(2, 2)
    sizes = []
    while not speculation.resting:
        sizes.append(len(speculation.draft(99)))
        speculation.verified(sizes[-1], 0)
    assert sizes == [4, 2, 1]
    for _ in range(7):
        rests.append(rest_of(speculation))
        assert len(speculation.draft(99)) == 1, "a single token is tried"
        speculation.verified(1, 0)
    assert rests == [FIRST_REST, 4, 8, 16, 32, LAST_REST, LAST_REST]
    rest_of(speculation)
    speculation.verified(1, 1)
    assert len(speculation.draft(99)) == 2
    speculation.verified(2, 0)
    speculation.verified(1, 0)
    assert rest_of(speculation) == FIRST_REST


def test_where_room_is_short_drafts_are_and_grow_again_with_it() -> None:
    speculation = Speculation(Endless(), 16)
    for _ in range(3):
        speculation.verified(len(speculation.draft(99)), len(speculation.draft(99)))
    assert len(speculation.draft(1)) == 1
    assert speculation.draft(0) == []
    speculation.verified(1, 1)
    assert len(speculation.draft(99)) == 16


def test_the_proposer_is_not_asked_while_the_sequence_rests_or_has_no_room() -> None:
    endless = Endless()
    speculation = Speculation(endless, 1)
    speculation.draft(0)
    speculation.verified(1, 0)
    rest_of(speculation)
    assert endless.asked == []


def test_where_there_is_nothing_to_guess_from_nothing_changes() -> None:
    speculation = Speculation(Never(), 8)
    for _ in range(99):
        assert speculation.draft(99) == []
        speculation.verified(0, 0)
    assert not speculation.resting
    assert (speculation.num_drafted, speculation.num_accepted) == (0, 0)


def test_a_proposer_that_says_too_much_is_cut() -> None:
    class Chatty:
        def propose(self, limit: int) -> list[int]:
            return [1] * (limit + 5)

    assert len(Speculation(Chatty(), 8).draft(99)) == FIRST_DRAFT


@given(st.integers(1, 32), st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), max_size=60))
def test_drafts_stay_within_limit_and_room_whatever_becomes_of_them(
    limit: int, rounds: list[tuple[int, float]]
) -> None:
    speculation = Speculation(Endless(), limit)
    for room, share in rounds:
        drafted = len(speculation.draft(room))
        assert drafted <= min(limit, room)
        assert drafted > 0 or speculation.resting or not room
        speculation.verified(drafted, round(share * drafted))
    assert speculation.num_accepted <= speculation.num_drafted


def test_text_that_never_repeats_pays_for_few_guesses() -> None:
    speculation = Speculation(Endless(), 32)
    for _ in range(1000):
        speculation.verified(len(speculation.draft(32)), 0)
    assert speculation.num_drafted <= 25
