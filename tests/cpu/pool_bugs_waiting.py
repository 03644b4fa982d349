"""Bugs where blocks are short, each to be planted into one method, that random command sequences must find."""

from __future__ import annotations

import pytest

from memd.core.draft import Draft
from memd.core.operations import Suspend
from memd.core.waiting import Waiting


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


def tells_nobody_that_there_are_blocks(patch: pytest.MonkeyPatch) -> None:
    """Who was refused never asks again."""
    patch.setattr(Waiting, "_is_news", lambda self, hunger: False)
