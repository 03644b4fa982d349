"""Bugs where blocks are short, each to be planted into one method, that random command sequences must find."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest

from memd.core.apart import HeldApart
from memd.core.draft import Draft
from memd.core.operations import Suspend
from memd.core.pool import Pool
from memd.core.values import Step, StepOutcome
from memd.core.victims import Victims, rank_of
from memd.core.waiting import Asker, Waiting


def forgets_the_tokens_to_come(patch: pytest.MonkeyPatch) -> None:
    """A suspended table keeps what was committed, and nothing of what was sampled."""

    def suspend(self: Draft, operation: Suspend) -> None:
        original(self, Suspend(operation.table_id, ()))

    original = Draft._suspend
    patch.setattr(Draft, "_suspend", suspend)


def lets_the_suspended_keep_a_block(patch: pytest.MonkeyPatch) -> None:
    """Its last block does not come back."""

    def drop_all(self: Draft, table_id: int, frames: list[int]) -> None:
        original(self, table_id, frames[:-1])

    original = Draft._drop_all
    patch.setattr(Draft, "_drop_all", drop_all)


def grants_what_others_claim(patch: pytest.MonkeyPatch) -> None:
    """First come, first served, whoever had others yield for it."""
    patch.setattr(Waiting, "claimed_before", lambda self, asker: 0)


def holds_blocks_back_that_clients_have(patch: pytest.MonkeyPatch) -> None:
    """All wait for what no worker can give."""
    patch.setattr(HeldApart, "cornering", lambda self, plan: 0)


def tells_nobody_that_there_are_blocks(patch: pytest.MonkeyPatch) -> None:
    """Who was refused never asks again."""
    patch.setattr(Waiting, "_is_news", lambda self, hunger: False)


def tells_nobody_what_went_down_with_a_stream(patch: pytest.MonkeyPatch) -> None:
    """Who comes back waits for news that memd thinks it has heard."""
    patch.setattr(Waiting, "tell_again", lambda self, lease_id: None)


def tells_no_victim_after_a_repeated_answer(patch: pytest.MonkeyPatch) -> None:
    """The worker has heard of it only before it knew the table."""

    def step(self: Pool, lease_id: int, step: Step, now: float) -> StepOutcome:
        victims = list(self.victims._untold)
        outcome = original(self, lease_id, step, now)
        if self._state.leases[lease_id].replaying:
            self.victims._untold[:] = victims
        return outcome

    original = Pool.step
    patch.setattr(Pool, "step", step)


def has_tables_yield_for_what_was_found(patch: pytest.MonkeyPatch) -> None:
    """They go for nothing: their blocks are those that the asker holds with them."""

    def for_creation(self: Victims, asker: Asker, missing: int, found: Iterable[int], now: float) -> None:
        original(self, asker, missing, (), now)

    original = Victims.for_creation
    patch.setattr(Victims, "for_creation", for_creation)


def names_a_table_however_often_it_has_yielded(patch: pytest.MonkeyPatch) -> None:
    """The least urgent one begins anew for ever."""
    original = Victims._candidates
    patch.setattr(Victims, "_candidates", lambda self, most: original(self, inf))


def names_nobody_where_all_is_shared(patch: pytest.MonkeyPatch) -> None:
    """Tables that have nothing for themselves wait for each other, for good."""

    def for_growth(self: Victims, asker: Asker, missing: int, now: float) -> None:
        candidates = [table for table in self._candidates(inf) if rank_of(table) > asker.rank]
        if not candidates or self._choose(candidates, missing, now).named:
            original(self, asker, missing, now)

    original = Victims.for_growth
    patch.setattr(Victims, "for_growth", for_growth)
