"""Bugs in what is reused of prefixes, each to be planted into one method, that random command sequences must find."""

from __future__ import annotations

import pytest

from memd.core.beginnings import Beginnings
from memd.core.lease import Lease
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
