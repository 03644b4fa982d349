"""Bugs in how a worker and memd follow blocks that move, which random interleavings must find."""

from __future__ import annotations

import pytest

from inferd.core.acknowledgements import Acknowledgements
from inferd.core.block_tables import BlockTables
from memd.core.remaps import Remaps
from memd.core.state import PoolState
from pagepool.pool_values import Remap


def acknowledges_at_once(patch: pytest.MonkeyPatch) -> None:
    """Steps in flight go on reading what is given away."""
    patch.setattr(Acknowledgements, "take", lambda self: max([0, *(self._heard.popleft()[0] for _ in [*self._heard])]))


def gives_away_at_once(patch: pytest.MonkeyPatch) -> None:
    """memd waits for nobody."""

    def start(self: PoolState, lease: object, frame: int, now: float) -> None:
        lease.remaps.pop()  # type: ignore[attr-defined]

    patch.setattr(PoolState, "start_reading", start)


def forgets_forks_under_way(patch: pytest.MonkeyPatch) -> None:
    """Only the named table is changed."""

    def remap(self: BlockTables, news: Remap) -> None:
        others = {one: self._tables.pop(one) for one in [*self._tables] if one != news.table_id}
        original(self, news)
        self._tables.update(others)

    original = BlockTables.remap
    patch.setattr(BlockTables, "remap", remap)


def replaces_whatever_is_there(patch: pytest.MonkeyPatch) -> None:
    """The index alone decides, also when the table was cut and filled anew."""

    def remap(self: BlockTables, news: Remap) -> None:
        table = self._tables.get(news.table_id)
        if table is not None and news.index < len(table.block_ids):
            old_id = table.block_ids[news.index]
            original(self, Remap(news.sequence, table.table_id, news.index, old_id, news.block_id, news.entry))

    original = BlockTables.remap
    patch.setattr(BlockTables, "remap", remap)


def merges_what_is_not_equal(patch: pytest.MonkeyPatch) -> None:
    """Any block of the index will do."""

    def merge(self: Remaps, sealed: list[tuple[int, int]], now: float) -> None:
        index = self._state.cut_store().index.frames
        for frame, at in sealed:
            self.move(frame, next(iter(index.values())), at, now)

    patch.setattr(Remaps, "merge", merge)
