"""Prompt lookup: drafts are those of a scan over the whole history, at a cost that does not grow with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.core.ngram import MAX_NGRAM, MIN_NGRAM, NgramIndex


def scan(tokens: Sequence[int], limit: int, min_ngram: int, max_ngram: int) -> list[int]:
    """The same draft found by looking at every place, longest suffix first, latest place first."""
    for length in range(max_ngram, min_ngram - 1, -1):
        suffix = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == suffix:
                longer = list(tokens)
                for at in range(start + length, start + length + limit):
                    longer.append(longer[at])
                return longer[len(tokens) :]
    return []


class Counted(list[int]):
    """A list that counts how many of its items are read."""

    reads = 0

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        self.reads += len(found) if isinstance(where, slice) else 1
        return found


def test_the_tokens_after_the_latest_occurrence_are_proposed() -> None:
    assert NgramIndex([1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1, 2]).propose(3) == [6, 7, 8]


def test_the_longest_suffix_decides_even_if_a_shorter_one_occurred_later() -> None:
    assert NgramIndex([1, 2, 3, 9, 4, 2, 3, 8, 5, 1, 2, 3]).propose(1) == [9]


def test_a_copy_runs_into_what_it_writes() -> None:
    assert NgramIndex([5, 1, 2, 3, 1, 2, 3]).propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert NgramIndex([7, 7, 7]).propose(5) == [7] * 5


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 1, 5, 2]])
def test_nothing_is_proposed_where_no_suffix_has_occurred_before(tokens: list[int]) -> None:
    assert NgramIndex(tokens).propose(4) == []


def test_no_more_is_proposed_than_asked_for() -> None:
    assert NgramIndex([1, 2, 3, 1, 2]).propose(0) == []
    assert NgramIndex([1, 2, 3, 1, 2]).propose(1) == [3]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (3, 2), (-1, -1)])
def test_lengths_that_cannot_be_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        NgramIndex([], shortest, longest)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=9),
    st.integers(0, 9),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_drafts_are_those_of_a_scan_whenever_they_are_asked_for(
    parts: list[list[int]], limit: int, shortest: int, more: int
) -> None:
    tokens: list[int] = []
    index = NgramIndex(tokens, shortest, shortest + more)
    for part in parts:
        tokens += part
        assert index.propose(limit) == scan(tokens, limit, shortest, shortest + more)


@pytest.mark.parametrize("kind", ["distinct", "repeating"])
def test_a_token_costs_the_same_however_long_the_history_is(kind: str) -> None:
    reads: Counter[int] = Counter()
    for length in (100, 10_000):
        tokens = Counted(range(length) if kind == "distinct" else [at % 50 for at in range(length)])
        index = NgramIndex(tokens)
        index.propose(4)
        lengths = MAX_NGRAM - MIN_NGRAM + 1
        assert tokens.reads <= lengths * (length + MAX_NGRAM) + 4, "the history is read once for each length"
        tokens.reads = 0
        for new in range(200):
            tokens.append(length + new if kind == "distinct" else (length + new) % 50)
            index.propose(4)
        reads[length] = tokens.reads
    assert reads[100] == reads[10_000] <= 200 * (2 * sum(range(MIN_NGRAM, MAX_NGRAM + 1)) + 4)
