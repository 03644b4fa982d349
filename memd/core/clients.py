"""What clients do under leases of their own, one unary command each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memd.core import errors
from memd.core.lease import MAX_CLIENT_LEASES, MAX_NAME_BYTES, MAX_TABLES, MAX_TTL_S, MIN_TTL_S, Lease
from memd.core.state import PoolState, pack_checked
from memd.core.store import BlockStore
from memd.core.table import Table
from memd.core.values import BlockRun, TableRequest
from memd.core.waiting import Waiting
from pagepool.errors import invalid_field
from pagepool.limits import check_priority

MAX_LISTED_BLOCKS = 65_536
"""Ids that a call may list: what others wait for meanwhile."""
MAX_REFERENCES = 65_536
"""References of one lease to one block, beside those of its tables."""


def require_name(field: str, name: str) -> None:
    """INVALID_FIELD if a name is too long."""
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise invalid_field(field, f"{size} bytes long", f"up to {MAX_NAME_BYTES} bytes", "shorten it")


class ClientLeases:
    """Leases with a time-to-live, and the commands that need one."""

    def __init__(self, state: PoolState, waiting: Waiting) -> None:
        self._state = state
        self._waiting = waiting

    def create(self, holder: str, ttl_s: float, now: float) -> Lease:
        """A new lease; the granted time-to-live is the one asked for, brought between 1 second and 1 hour.

        LEASE_LIMIT if there are too many of clients.
        """
        require_name("holder", holder)
        if not ttl_s > 0:
            raise invalid_field("ttl", f"{ttl_s} s", "positive", f"{MIN_TTL_S:g} s to {MAX_TTL_S:g} s are granted")
        leases = self._state.leases
        if len(leases) >= MAX_CLIENT_LEASES and sum(not one.is_worker for one in leases.values()) >= MAX_CLIENT_LEASES:
            raise errors.lease_limit(MAX_CLIENT_LEASES)
        granted = min(max(ttl_s, MIN_TTL_S), MAX_TTL_S)
        lease = Lease(self._state.new_id(), holder, granted, now + granted)
        leases[lease.lease_id] = lease
        return lease

    def find(self, lease_id: int, now: float) -> Lease:
        """A client's lease; one that is late ends here, even if no tick has come yet."""
        lease = self._state.leases.get(lease_id)
        if lease is None:
            raise errors.lease_not_found(lease_id)
        if lease.is_worker:
            raise errors.lease_is_workers(lease_id)
        if lease.is_late(now):
            self.expire(lease, now)
            raise errors.lease_not_found(lease_id)
        return lease

    def expire(self, lease: Lease, now: float) -> None:
        """End a late lease: a client maps nothing, so all that it held is free at once."""
        self._state.end_lease(lease, now)
        self._state.counters.lost_leases += 1
        self._state.version += 1

    def release(self, lease_id: int, now: float) -> None:
        """End a lease; no error if it has ended already."""
        lease = self._state.leases.get(lease_id)
        if lease is None:
            return
        if lease.is_worker:
            raise errors.lease_is_workers(lease_id)
        self._state.end_lease(lease, now)

    def allocate(self, lease_id: int, num_blocks: int, now: float) -> BlockRun:
        """New blocks, each with one reference of the lease."""
        lease = self.find(lease_id, now)
        store = self._state.cut_store()
        if num_blocks < 1:
            raise invalid_field("num_blocks", num_blocks, "at least 1", "ask for some")
        self.require(store, num_blocks, num_blocks, self.spare())
        frames = store.grant(num_blocks, (lease_id,), now)
        lease.references.update(dict.fromkeys(frames, 1))
        return store.run(frames)

    def free(self, lease_id: int, block_ids: Sequence[int], now: float) -> None:
        """Drop one direct reference of the lease per listed id; the last listed is released first, as in a table."""
        lease = self.find(lease_id, now)
        frames = self.frames(block_ids)
        store, counts = self._state.cut_store(), Counter(frames)
        for frame, asked in counts.items():
            held = lease.references.get(frame, 0)
            if held < asked:
                raise errors.block_not_held(store.blocks.ids[frame], lease_id, held, asked)
        store.release_counted(counts, lease_id, now)
        for frame, dropped in counts.items():
            lease.references[frame] -= dropped
            if not lease.references[frame]:
                del lease.references[frame]

    def share(self, lease_id: int, block_ids: Sequence[int], now: float) -> None:
        """Add one direct reference of the lease per listed id."""
        lease = self.find(lease_id, now)
        counts = Counter(self.frames(block_ids))
        store, held = self._state.cut_store(), lease.references.get
        for frame in counts:
            self.require_readable(lease, frame)
        after = {frame: held(frame, 0) + more for frame, more in counts.items()}
        for frame, references in after.items():
            if references > MAX_REFERENCES:
                raise errors.too_many_references(store.blocks.ids[frame], lease_id, references, MAX_REFERENCES)
        store.hold_counted(counts, lease_id, now)
        lease.references.update(after)

    def require_table(self, lease: Lease) -> None:
        """TABLE_LIMIT unless the lease may have one more table."""
        if len(lease.tables) >= MAX_TABLES:
            raise errors.table_limit(lease.lease_id, MAX_TABLES)

    def create_table(self, lease_id: int, request: TableRequest, now: float) -> Table:
        """A new table: match, pin and create in one."""
        lease = self.find(lease_id, now)
        self.require_table(lease)
        check_priority("priority", request.priority)
        store = self._state.cut_store()
        # What no pool of this size can hold is not looked at. One token more: the last one is never found.
        most = store.num_blocks * self._state.block_size + 1
        packed = pack_checked(request.token_ids[:most], request.salt)
        plan = self._state.plan(request, packed, self._waiting.claimed_before(None))
        self.require(store, request.num_blocks, plan.needed, max(plan.spare + plan.idle, 0))
        return self._state.create_table(lease, request, plan, now)

    def extend_table(self, lease_id: int, table_id: int, num_blocks: int, now: float) -> BlockRun:
        """New blocks at the end of a table."""
        table = self.table(lease_id, table_id, now)
        store = self._state.cut_store()
        if num_blocks < 1:
            raise invalid_field("num_blocks", num_blocks, "at least 1", "ask for some")
        self.require(store, len(table.frames) + num_blocks, num_blocks, self.spare())
        return store.run(self._state.extend_table(table, num_blocks, now))

    def release_table(self, lease_id: int, table_id: int, now: float) -> None:
        """End a table."""
        self._state.release_table(self.table(lease_id, table_id, now), now)

    def spare(self) -> int:
        """Blocks that clients can have: what no table of a worker claims."""
        return self._waiting.spare_for(None)

    def require(self, store: BlockStore, in_all: int, fresh: int, spare: int) -> None:
        """REQUEST_TOO_LARGE or POOL_EXHAUSTED unless `fresh` blocks, `in_all` with those there, can be granted."""
        if in_all > store.num_blocks:
            raise errors.request_too_large("num_blocks", in_all, store.num_blocks)
        self.require_spare(store, fresh, spare)

    def require_spare(self, store: BlockStore, fresh: int, spare: int) -> None:
        """POOL_EXHAUSTED unless so many blocks can be granted."""
        if fresh > spare:
            self._state.counters.refused_requests += 1
            self._state.version += 1
            raise errors.pool_exhausted(fresh, spare, store.num_blocks, store.cached.num_pinned)

    def frames(self, block_ids: Sequence[int]) -> list[int]:
        """The frames of blocks; INVALID_FIELD if there is none or too many, BLOCK_NOT_FOUND if one is gone."""
        if not block_ids:
            raise invalid_field("block_ids", "empty", "at least one id", "list the blocks")
        if len(block_ids) > MAX_LISTED_BLOCKS:
            limit = f"at most {MAX_LISTED_BLOCKS} in one call"
            raise invalid_field("block_ids", f"{len(block_ids)} ids", limit, "list the rest in further calls")
        frame_of = self._state.store.blocks.frame_of if self._state.store else {}
        try:
            return [frame_of[block_id] for block_id in block_ids]
        except KeyError as error:
            raise errors.block_not_found(error.args[0]) from None

    def require_readable(self, lease: Lease, frame: int) -> None:
        """BLOCK_NOT_SEALED if another lease may still write the block."""
        blocks = self._state.cut_store().blocks
        if blocks.prefixes[frame]:  # by far the most, and thousands may hold each of them
            return
        if not any(holder == lease.lease_id or holder in lease.tables for holder in blocks.references(frame)):
            raise errors.block_not_sealed(blocks.ids[frame])

    def table(self, lease_id: int, table_id: int, now: float) -> Table:
        """A table of a client's lease."""
        lease = self.find(lease_id, now)
        if table_id in lease.tables:
            return lease.tables[table_id]
        if table_id in self._state.tables:
            raise errors.table_not_held(table_id, lease_id)
        raise errors.table_not_found(table_id)
