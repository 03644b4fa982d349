"""Which tables have to yield when blocks are short: the least urgent ones, whichever worker holds them.

A table is named once. Its worker suspends or releases it as soon as no step of it is in flight; until then what it will
free counts as on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from memd.core.lease import Lease
from memd.core.state import PoolState
from memd.core.table import Table
from memd.core.values import Grant, LeaseState
from memd.core.waiting import Asker, Rank

YIELD_S = 10.0
"""How long a named table is counted on; if it has not yielded by then, others are named in its place."""


def rank_of(table: Table) -> Rank:
    """How urgent a table is."""
    return -table.priority, table.arrival, table.table_id


class Freed:
    """Blocks that come back if some tables let go of theirs: those that nobody else has, and that are not pinned.

    Those in the frames `found` do not either: the asker takes them anyway, and they are no room for others beside them.
    """

    def __init__(self, state: PoolState, found: Iterable[int] = ()) -> None:
        self._store, self._found = state.cut_store(), frozenset(found)
        self._letting_go: Counter[int] = Counter()  # by frame, of those that several have
        self.count = 0

    def add(self, table: Table) -> None:
        """One more lets go."""
        holders = self._store.blocks.holders
        for frame in table.frames:
            if len(holders[frame]) > 1:
                self._letting_go[frame] += 1
                if self._letting_go[frame] < len(holders[frame]):
                    continue
            self.count += self._is_room(frame)

    def gives(self, table: Table) -> bool:
        """Whether one that was added gives any block."""
        holders = self._store.blocks.holders
        return any(
            len(holders[frame]) in (1, self._letting_go[frame]) and self._is_room(frame) for frame in table.frames
        )

    def _is_room(self, frame: int) -> bool:
        return frame not in self._found and not self._store.cached.is_pinned(frame)


class Victims:
    """Names tables that have to yield, and tells their workers."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._untold: list[Table] = []

    def for_growth(self, asker: Asker, missing: int, now: float) -> None:
        """A table lacks so many blocks: less urgent ones yield, as many as are needed, those that free none left out.

        If none of them frees any, the least urgent one that shares blocks with the table yields: what it leaves to the
        table alone is written without a copy, and is freed with the last that has it. If there is none, it itself does.
        """
        candidates = [table for table in self._candidates() if rank_of(table) > asker.rank]
        named, enough = self._choose(candidates, missing, now)
        if not named and not enough:
            table = self._state.tables[asker.table_id]
            shared = set(table.frames)
            named = [next((one for one in candidates if not shared.isdisjoint(one.frames)), table)]
        self._name(named, now)

    def for_creation(self, asker: Asker, missing: int, found: Iterable[int], now: float) -> None:
        """A request lacks so many blocks beside those it has found, which are in these frames.

        Tables of lower priority yield if that is enough; within one it waits.
        """
        candidates = [table for table in self._candidates() if -table.priority > asker.rank[0]]
        named, enough = self._choose(candidates, missing, now, found)
        if enough:
            self._name(named, now)

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

    def _candidates(self) -> list[Table]:
        """Tables that can be named, the least urgent first."""
        leases = [lease for lease in self._state.leases.values() if lease.is_worker and lease.state is LeaseState.LIVE]
        tables = [table for lease in leases for table in lease.tables.values()]
        return sorted((one for one in tables if one.frames and one.yielding_since is None), key=rank_of, reverse=True)

    def _choose(
        self, candidates: Sequence[Table], missing: int, now: float, found: Iterable[int] = ()
    ) -> tuple[list[Table], bool]:
        """The first candidates that free what is missing beside those that yield already; whether that is enough."""
        freed = Freed(self._state, found)
        for table in self._state.tables.values():
            if table.yielding_since is not None and now - table.yielding_since < YIELD_S and self._can_yield(table):
                freed.add(table)
        chosen = []
        for table in candidates:
            if freed.count >= missing:
                break
            freed.add(table)
            chosen.append(table)
        # One whose blocks others have too frees nothing, unless those were named as well.
        return [table for table in chosen if freed.gives(table)], freed.count >= missing

    def _name(self, tables: Iterable[Table], now: float) -> None:
        for table in tables:
            table.yielding_since = now
            self._untold.append(table)
