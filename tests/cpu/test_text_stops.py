"""Stop texts: what is shown, what waits, and that the way a text is cut into pieces changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.text.stops import StopFinder


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    finder = StopFinder(stops)
    shown = "".join(finder.feed(piece) for piece in pieces)
    return shown if finder.found is not None else shown + finder.flush(), finder.found


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """Letter by letter: the first moment at which some stop text stands at the end."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text(alphabet="abé", max_size=24)


@given(st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4), st.lists(letters, max_size=12))
def test_any_cut_into_pieces_gives_what_a_letter_by_letter_search_gives(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == reference(stops, "".join(pieces))


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(letters, max_size=12))
def test_what_was_shown_never_has_to_be_taken_back(stops: list[str], pieces: list[str]) -> None:
    finder, shown, seen = StopFinder(stops), "", ""
    for piece in pieces:
        shown, seen = shown + finder.feed(piece), seen + piece
        assert reference(stops, seen)[0].startswith(shown)
        held = len(seen) - len(shown)
        assert finder.found is not None or held < max(map(len, stops)), "nothing but a possible start is held back"


def test_a_stop_text_split_over_pieces_is_cut_before_its_first_letter() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert [finder.feed(piece) for piece in ("Yes.", "\n", "\nUs", "er", ": no")] == ["Yes.", "", "", "", ""]
    assert finder.found == "\n\nUser:"


def test_a_start_that_came_to_nothing_is_shown_with_the_next_piece() -> None:
    finder = StopFinder(["END"])
    assert [finder.feed("the E"), finder.feed("N"), finder.feed("orm")] == ["the ", "", "ENorm"]


def test_what_is_held_back_at_the_end_is_shown_by_flush() -> None:
    finder = StopFinder(["END"])
    assert (finder.feed("the EN"), finder.flush(), finder.found) == ("the ", "EN", None)


@pytest.mark.parametrize("text", ["stop here", "xstopstop"])
def test_nothing_follows_a_stop_text(text: str) -> None:
    finder = StopFinder(["stop"])
    finder.feed(text)
    assert (finder.feed("more"), finder.flush()) == ("", "")
