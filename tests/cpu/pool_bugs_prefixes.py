"""Bugs in what is reused of prefixes, each to be planted into one method, that random command sequences must find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memd.core.beginnings import Beginnings
from memd.core.lease import Lease
from memd.core.prefix import PrefixIndex
from memd.core.promises import Promises
from memd.core.state import Plan, PoolState
from memd.core.table import Table
from memd.core.values import TableRequest


def lets_a_source_go_at_once(patch: pytest.MonkeyPatch) -> None:
    """What a worker has yet to copy may be evicted."""

    def create_table(self: PoolState, lease: Lease, request: TableRequest, plan: Plan, now: float) -> Table:
        table = original(self, lease, request, plan, now)
        self.copied(lease, table.table_id, now)
        return table

    original = PoolState.create_table
    patch.setattr(PoolState, "create_table", create_table)


def keeps_a_source_for_good(patch: pytest.MonkeyPatch) -> None:
    """No commit tells that the copy was made."""
    patch.setattr(PoolState, "copied", lambda self, lease, table_id, now: None)


def copies_from_another_prefix(patch: pytest.MonkeyPatch) -> None:
    """Blocks that begin alike are taken for the same, whatever comes before."""
    patch.setattr(Beginnings, "_follows", lambda self, frame, parent, salt: True)
    patch.setattr(Beginnings, "_chain", lambda self, parent, salt, packed: packed[0] % len(self._heads))


def keeps_the_promises_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Nobody hears that what is waited for will not be."""
    patch.setattr(Promises, "drop", lambda self, table_id: None)


def wakes_nobody_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """A block that is sealed is no news."""

    def sealed(self: Promises, table_id: int, digest: bytes) -> None:
        waiting = self._waiting.pop(digest, None)
        original(self, table_id, digest)
        if waiting is not None and digest in self._tables:
            self._waiting[digest] = waiting

    original = Promises.sealed
    patch.setattr(Promises, "sealed", sealed)


def waits_for_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """A request waits for a block that it will not be granted, for its last token is in it."""

    def following(self: PrefixIndex, matched: list[int], packed: bytes, salt: bytes, most: int) -> Iterator[bytes]:
        return original(self, matched, packed, salt, most + 1)

    original = PrefixIndex.following
    patch.setattr(PrefixIndex, "following", following)
