"""Which tables have to yield when blocks are short: the least urgent ones, whichever worker holds them.

A table is named once. Its worker suspends or releases it as soon as no step of it is in flight; until then what it will
free counts as on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memd.core.lease import Lease
from memd.core.state import PoolState
from memd.core.table import Table
from memd.core.values import Grant, LeaseState
from memd.core.waiting import Asker, Rank

YIELD_S = 10.0
"""How long a named table is counted on; if it has not yielded by then, others are named in its place."""

MAX_YIELDS = 4
"""A table that has yielded so often goes on: its worker, which asks for more each time, has asked for all that it may
need by now, so it ends, and until then whoever is more urgent yields rather than it. Only if such a table runs short
all the same, less urgent ones of the kind yield to it, or it itself if there is none."""

MAX_LOOKED = 65_536
"""Blocks of tables that are looked at for one asker: all workers wait meanwhile, some 20 ms."""


def rank_of(table: Table) -> Rank:
    """How urgent a table is."""
    return -table.priority, table.arrival, table.table_id


class Freed:
    """Blocks that come back if some tables let go of theirs: those that nobody else has, and that are not pinned.

    Those with the ids `found` do not either: the asker takes them anyway, and they are no room for others beside them.
    """

    def __init__(self, state: PoolState, found: Iterable[int] = ()) -> None:
        self._store = state.cut_store()
        self._found = {self._store.blocks.frame_of.get(block_id) for block_id in found}
        self._left: dict[int, int] = {}  # by frame, of those that several have: how many still do
        self._alone: set[int] = set()  # ids of tables that free blocks, whoever else lets go
        self._together: set[int] = set()  # frames that all have let go of that had them
        self._num_alone = 0
        self.looked = 0  # frames of the tables added

    @property
    def count(self) -> int:
        """How many they are."""
        return self._num_alone + len(self._together)

    def add(self, table: Table) -> None:
        """One more lets go."""
        holders, kept, found, left_of = self._store.blocks.holders, self._store.cached.kept, self._found, self._left
        self.looked += len(table.frames)
        num_alone, units = 0, self._store.units
        frames: Iterable[int] = table.frames
        if units.has_host:
            frames = [frame for frame in frames if not units.is_host(frame)]
        for frame in frames:  # there may be many thousands
            left = left_of.get(frame)
            if left is None:
                if frame in found or (frame in kept and kept[frame].pinned):
                    continue
                left = len(holders[frame])
                if left == 1:
                    num_alone += 1
                    continue
            left_of[frame] = left - 1
            if left == 1:
                self._together.add(frame)
        if num_alone:
            self._num_alone += num_alone
            self._alone.add(table.table_id)

    def gives(self, table: Table) -> bool:
        """Whether one that was added gives any block."""
        return table.table_id in self._alone or not self._together.isdisjoint(table.frames)


class Choice(NamedTuple):
    """Of the tables `looked` at, the least urgent first, those that free blocks.

    Whether these are enough; and if not, whether that is because no more may be looked at.
    """

    looked: list[Table]
    named: list[Table]
    enough: bool
    spent: bool


class Victims:
    """Names tables that have to yield, and tells their workers."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._untold: list[Table] = []
        self.max_looked, self.max_yields = MAX_LOOKED, MAX_YIELDS

    def for_growth(self, asker: Asker, missing: int, now: float) -> None:
        """A table lacks so many blocks: less urgent ones yield, as many as are needed, those that free none left out.

        If none of them frees any, the least urgent one that shares blocks with the table yields: what it leaves to the
        table alone is written without a copy, and is freed with the last that has it. If there is none, it itself does.
        If more would have to be looked at, the least urgent one yields, however little it frees.
        """
        most = math.inf if self._state.tables[asker.table_id].yields >= self.max_yields else self.max_yields
        candidates = [table for table in self._candidates(most) if rank_of(table) > asker.rank]
        choice = self._choose(candidates, missing, now)
        named = choice.named
        if choice.spent and not named:
            named = choice.looked[:1]  # none, if all that yield already are more than are looked at
        elif not named and not choice.enough:
            table = self._state.tables[asker.table_id]
            shared = set(table.frames)
            named = [next((one for one in candidates if not shared.isdisjoint(one.frames)), table)]
        self._name(named, now)

    def for_creation(self, asker: Asker, missing: int, found: Iterable[int], now: float) -> None:
        """A request lacks so many blocks beside those it has found, whose ids these are.

        Tables of lower priority yield if those that are looked at are enough; within one it waits.
        """
        candidates = [table for table in self._candidates(self.max_yields) if -table.priority > asker.rank[0]]
        choice = self._choose(candidates, missing, now, found)
        if choice.enough:
            self._name(choice.named, now)

    def tell_again(self, tables: Iterable[Table]) -> None:
        """The worker of these tables is back; it may not have heard."""
        self._untold += [table for table in tables if table.yielding_since is not None]

    def tell_granted_again(self, lease: Lease, grants: Iterable[Grant]) -> None:
        """Grants are repeated: before, a worker that had not read them could not know which tables were meant."""
        self.tell_again(filter(None, (lease.tables.get(grant.table_id) for grant in grants)))

    def take_news(self) -> list[tuple[int, int]]:
        """(lease id, table id) of tables that have to yield, to be told to their live workers; each once."""
        if not self._untold:
            return []
        told = {table.table_id: table for table in self._untold if self._can_yield(table)}
        self._untold.clear()
        return [(table.lease_id, table_id) for table_id, table in told.items()]

    def _can_yield(self, table: Table) -> bool:
        there = self._state.tables.get(table.table_id) is table and table.yielding_since is not None
        return there and self._state.leases[table.lease_id].state is LeaseState.LIVE

    def _candidates(self, most: float) -> list[Table]:
        """Tables that can be named, the least urgent first, of those that have yielded less often than `most` times."""
        leases = [lease for lease in self._state.leases.values() if lease.is_worker and lease.state is LeaseState.LIVE]
        tables = [table for lease in leases for table in lease.tables.values() if table.yields < most]
        return sorted((one for one in tables if one.frames and one.yielding_since is None), key=rank_of, reverse=True)

    def _choose(self, candidates: Sequence[Table], missing: int, now: float, found: Iterable[int] = ()) -> Choice:
        """The first candidates that free what is missing beside those that yield already."""
        freed, looked = Freed(self._state, found), list[Table]()
        for table in (*self._leaving(now), *candidates):
            if freed.count >= missing or freed.looked >= self.max_looked:
                break
            freed.add(table)
            if table.yielding_since is None:
                looked.append(table)
        enough = freed.count >= missing
        # One whose blocks others have too frees nothing, unless those were named as well.
        named = [table for table in looked if freed.gives(table)]
        return Choice(looked, named, enough, not enough and freed.looked >= self.max_looked)

    def _leaving(self, now: float) -> list[Table]:
        """Tables that yield already, and in time."""
        named = [table for table in self._state.tables.values() if table.yielding_since is not None]
        return [one for one in named if now - (one.yielding_since or 0.0) < YIELD_S and self._can_yield(one)]

    def _name(self, tables: Iterable[Table], now: float) -> None:
        for table in tables:
            table.yielding_since = now
            self._untold.append(table)
