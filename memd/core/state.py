"""All that a pool is at one moment, and the changes that client and worker leases have in common."""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from memd.core import errors
from memd.core.accounts import Counters
from memd.core.allocator import NOWHERE
from memd.core.block import TOKEN_BYTES
from memd.core.extent import PoolMemory
from memd.core.geometry import Geometry
from memd.core.lease import Lease
from memd.core.promises import Promises
from memd.core.recodes import Recode
from memd.core.store import BlockStore
from memd.core.table import Table
from memd.core.values import LeaseState, TableRequest
from pagekernels.layout import PagedLayout
from pagepool.errors import invalid_field
from pagepool.limits import check_salt

ONE_TOKEN = struct.Struct("<I")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as blocks keep them; struct.error if one is not an unsigned 32-bit integer."""
    if len(token_ids) == 1:  # what a decode step commits to every table
        return ONE_TOKEN.pack(token_ids[0])
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def pack_checked(token_ids: Sequence[int], salt: bytes) -> bytes:
    """Token ids of a client as blocks keep them; INVALID_FIELD if they, or the salt beside them, cannot be."""
    check_salt("salt", salt)
    try:
        return pack_tokens(token_ids)
    except struct.error as error:
        raise invalid_field("token_ids", error, "unsigned 32-bit integers", "give the model's token ids") from error


def pack_words(lease_id: int, token_ids: Sequence[int]) -> bytes:
    """Token ids of a worker as blocks keep them; PROTOCOL_VIOLATION if they cannot be."""
    try:
        return pack_tokens(token_ids)
    except struct.error as error:
        what = f"a token id is not an unsigned 32-bit integer ({error})"
        raise errors.protocol_violation(lease_id, what, "give the model's token ids") from error


@dataclass(slots=True)
class Plan:
    """What granting a table request would do: `matched` frames to hold, `idle` of them cached; `fresh` blocks to grant.

    `spare` is how many fresh blocks there could be: what is available, less what is withheld and the matched blocks
    that are cached; it may be negative. The first `run` tokens of the first fresh block, if any, are those of the
    sealed one in frame `source`. Of a table that the device alone cannot hold, `below` blocks between those found and
    the fresh ones are granted in the host tier, where there could be `spare_below`.
    """

    packed: bytes
    matched: list[int]
    idle: int
    fresh: int
    spare: int
    source: int = NOWHERE
    run: int = 0
    below: int = 0
    spare_below: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the table, those found included."""
        return len(self.matched) + self.below + self.fresh

    @property
    def needed(self) -> int:
        """How many available blocks it takes."""
        return self.idle + self.fresh

    @property
    def fits(self) -> bool:
        """Whether it can be granted."""
        return self.below <= self.spare_below and (self.fresh <= self.spare or not self.needed)


@dataclass(slots=True, eq=False)
class PoolState:
    """The pool's parts. `store` and `layout` are None until the geometry is declared."""

    epoch: int
    block_size: int
    geometry: Geometry | None = None
    layout: PagedLayout | None = None
    store: BlockStore | None = None
    leases: dict[int, Lease] = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    promises: Promises = field(default_factory=Promises)
    last_id: int = 0  # of leases and tables: one sequence, so that either kind names a holder of blocks
    version: int = 0
    readers: Counter[int] = field(default_factory=Counter)  # by frame: references of workers that may still read it
    recoding: dict[int, Recode] = field(default_factory=dict)  # by place: what stores its block in another format
    finished_recodes: list[Recode] = field(default_factory=list)
    mover: Lease | None = None  # memd's own: it has what is on its way between tiers
    host_matches: deque[int] = field(default_factory=deque)  # ids of blocks of the host tier that were matched

    @property
    def num_leases(self) -> int:
        """Leases that are not lost."""
        return sum(one.state is not LeaseState.LOST and one is not self.mover for one in self.leases.values())

    @property
    def num_blocks(self) -> int:
        """Blocks of the native format in the whole pool; 0 until it is cut."""
        return self.store.num_blocks if self.store else 0

    @property
    def most_blocks(self) -> int:
        """Blocks of the native format that one table can have; 0 until the pool is cut."""
        return self.store.most_blocks if self.store else 0

    def cut(self, geometry: Geometry, memory: PoolMemory) -> None:
        """Cut the pool for a geometry; INVALID_FIELD if it cannot be."""
        layout = geometry.layout(self.block_size)
        self.store = BlockStore(layout, memory.extent(layout), geometry.model_digest, self.counters)
        self.layout, self.geometry = layout, geometry
        self.version += 1

    def new_id(self) -> int:
        """An id for a lease or a table, never used before."""
        self.last_id += 1
        return self.last_id

    def is_in_use(self) -> bool:
        """Whether any table of a worker that is not lost has blocks: those grow, and for them is the headroom."""
        workers = [one for one in self.leases.values() if one.is_worker and one.state is not LeaseState.LOST]
        return any(table.frames for lease in workers for table in lease.tables.values())

    def cut_store(self) -> BlockStore:
        """The store; POOL_WITHOUT_GEOMETRY before the pool is cut."""
        if self.store is None:
            raise errors.pool_without_geometry()
        return self.store

    def plan(self, request: TableRequest, packed: bytes, withheld: int) -> Plan:
        """What a table request needs now, if so many available blocks are not for it. Changes nothing."""
        store = self.cut_store()
        matched = [] if request.no_match else store.index.match(packed, request.salt)
        if request.exact and store.blocks.num_lossy:
            matched = list(takewhile(lambda place: not store.blocks.lossy[place], matched))
        idle = store.num_evictable(matched)
        spare = store.available - withheld - idle
        plan = Plan(packed, matched, idle, max(request.num_blocks - len(matched), 0), spare)
        if request.num_blocks > store.num_blocks and plan.fresh:
            # Half of what there is on the device is left to others, and to what the table grows by.
            plan.fresh = min(max(plan.spare // 2, 1), plan.fresh)
            plan.below = request.num_blocks - len(matched) - plan.fresh
            plan.spare_below = store.spare_below(matched)
            return plan
        if request.partial and not request.no_match and plan.fresh:
            source, run = store.index.partial(matched, packed, request.salt)
            # A source that is kept is no room for fresh blocks; where they need it, it is computed again.
            inexact = request.exact and store.blocks.lossy[source]
            if run and plan.fresh <= spare - store.num_evictable([source]) and not inexact:
                plan.source, plan.run = source, run
        return plan

    def create_table(self, lease: Lease, request: TableRequest, plan: Plan, now: float) -> Table:
        """Carry out a plan that was made in this command and has spare >= fresh."""
        arrival = request.arrival or now
        table = Table(self.new_id(), lease.lease_id, request.salt, request.priority, now, arrival=arrival)
        table.yields, table.exact = request.num_yields, request.exact
        self._fill(lease, table, plan, now)
        if not request.no_match:
            self.counters.prefix_query_tokens += len(plan.packed) // TOKEN_BYTES
            self.counters.prefix_hit_tokens += table.cached_tokens
        self.tables[table.table_id] = lease.tables[table.table_id] = table
        return table

    def resume_table(self, lease: Lease, table: Table, plan: Plan, now: float) -> None:
        """Give a suspended table blocks again, as `create_table` would; no prompt, so it does not count as a query."""
        self._fill(lease, table, plan, now)
        lease.kept_bytes -= len(table.kept or b"")
        table.kept, table.touched, table.lossy = None, now, False

    def _fill(self, lease: Lease, table: Table, plan: Plan, now: float) -> None:
        store, holders = self.cut_store(), (table.table_id,)
        store.hold(plan.matched, holders, now)
        if store.host_allocator.num_frames:
            self._note_host(store, plan.matched)
        if plan.run:
            store.hold([plan.source], (lease.lease_id,), now)
            lease.copy_sources[table.table_id] = plan.source
        table.frames.extend(plan.matched)
        table.frames.extend(store.grant_host(holders, now) for _ in range(plan.below))
        table.frames.extend(store.grant(plan.fresh, holders, now))
        table.num_tokens = table.cached_tokens = len(plan.matched) * self.block_size + plan.run
        if plan.run:
            store.blocks.copy(plan.source, table.frames[len(plan.matched)], plan.run)

    def _note_host(self, store: BlockStore, matched: Sequence[int]) -> None:
        found = [place for place in matched if store.units.is_host(place)]
        self.host_matches.extend(store.blocks.ids[place] for place in found)
        self.counters.host_hit_tokens += len(found) * self.block_size

    def extend_table(self, table: Table, num_blocks: int, now: float) -> Sequence[int]:
        """The frames of new blocks at the end of a table; that many must be available."""
        frames = self.cut_store().grant(num_blocks, (table.table_id,), now)
        table.frames.extend(frames)
        table.touched = now
        return frames

    def release_table(self, table: Table, now: float) -> None:
        """End a table; its last block is released first."""
        self.cut_store().release_all(table.frames[::-1], table.table_id, now)
        lease = self.leases[table.lease_id]
        self.copied(lease, table.table_id, now)
        self.promises.drop(table.table_id)
        lease.kept_bytes -= len(table.kept or b"")
        del self.tables[table.table_id], lease.tables[table.table_id]

    def copied(self, lease: Lease, table_id: int, now: float) -> None:
        """What was to be copied into a table has been, or need not be any more: its source is let go."""
        source = lease.copy_sources.pop(table_id, None)
        if source is not None:
            self.cut_store().release(source, lease.lease_id, now)

    def keeps_up(self, table_id: int, now: float) -> bool:
        """Whether a table was granted, or has committed something, a short time ago."""
        return now - self.tables[table_id].touched < self.promises.patience_s

    def start_reading(self, lease: Lease, frame: int, now: float) -> None:
        """A worker may read a sealed block that its tables do not have any more."""
        self.cut_store().hold([frame], (lease.lease_id,), now)
        self.readers[frame] += 1

    def stop_reading(self, lease: Lease, frame: int, now: float) -> None:
        """It does not any more, or nothing comes of it."""
        self.readers[frame] -= 1
        if not self.readers[frame]:
            del self.readers[frame]
        self.cut_store().release(frame, lease.lease_id, now)

    def is_retired(self, frame: int) -> bool:
        """Whether a block is quarantined until nobody reads it any more: no table has it, nor anybody directly."""
        return 0 < self.readers[frame] == len(self.cut_store().blocks.holders[frame])

    def abandon_recodes(self, lease: Lease, why: str, now: float) -> None:
        """Nothing comes of what a worker was to store in other formats; it may still write to the targets."""
        for recode in lease.recodes:
            self._let_go(recode.sources, lease, now)
            for place in recode.sources:
                del self.recoding[place]
            recode.sources.clear()
            if not recode.is_over:
                recode.is_over, recode.failure = True, why
                self.finished_recodes.append(recode)

    def _let_go(self, places: Sequence[int], lease: Lease, now: float) -> None:
        if self.store is not None:  # else there are none
            self.store.release_all(places, lease.lease_id, now)

    def end_lease(self, lease: Lease, now: float) -> None:
        """End a lease and release all that it holds."""
        self.abandon_recodes(lease, f"worker {lease.holder!r} has gone meanwhile", now)
        for recode in lease.recodes:
            self._let_go(recode.targets, lease, now)
        for table in list(lease.tables.values()):
            self.release_table(table, now)
        if lease.references:
            self.cut_store().release_counted(lease.references, lease.lease_id, now)
        for unread in reversed(lease.remaps):
            self.stop_reading(lease, unread.frame, now)
        del self.leases[lease.lease_id]
