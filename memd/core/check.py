"""The invariant of a pool, stated in full and verified from first principles.

1. Every frame is free, split, or holds exactly one block; a split one has blocks in its units, and is emptied when
nobody refers to any of them; block ids were never used twice.
2. References: a block's holders are exactly the tables and leases that have it, as often as they have it; a lease has
what is yet to be copied into a table of its own, once, and so it has what its worker is to store in another format,
and where to.
3. A block without holders is sealed, indexed and cached; the cached queues hold these blocks alone, by how they are
kept, each in the order of their release.
4. A table's blocks are distinct, a suspended one has none; they are sealed exactly as far as its tokens fill them, and
chained to each other; what may still be written belongs to one lease; a worker's reserve is empty blocks that nobody
else has.
5. The index finds every block that it has under that block's digest and by its first tokens; digests are those of the
tokens.
6. What is promised is of tables that can still write it.
7. Claims are for a part of the pool, made by tables that are there, and lapse with them; refusals are remembered of
leases that are not lost; what has to yield is a worker's table that is not suspended.
8. Tables and leases know each other; clients' leases are never detached or lost.
9. Blocks that moved are kept for the workers that have not acknowledged it, whose tables do not have them any more;
what they wait for is numbered without a gap; the fenced are not waited for.
10. Free, held, cached and quarantined blocks add up to the pool, and the counters to the blocks there are.
"""

from __future__ import annotations

from collections import Counter

from memd.core import views
from memd.core.accounts import Usage
from memd.core.block import TOKEN_BYTES
from memd.core.check_recodes import check_recodes
from memd.core.check_store import check_cached, check_frames, check_index, require
from memd.core.errors import InvariantError
from memd.core.prefix import chained_digest, root_digest
from memd.core.state import PoolState
from memd.core.store import BlockStore
from memd.core.table import Table
from memd.core.values import BlockState, LeaseState
from memd.core.victims import rank_of
from memd.core.waiting import Waiting


def check(state: PoolState, waiting: Waiting) -> None:
    """Raise InvariantError, saying which part is broken, where and how. Changes nothing."""
    _check_leases(state)
    if state.store is None:
        require(not state.tables, "there are tables, but no pool")
        return
    check_frames(state.store)
    _check_references(state, state.store)
    check_cached(state.store)
    _check_reserves(state, state.store)
    _check_remaps(state, state.store)
    check_recodes(state, state.store)
    for table in state.tables.values():
        _check_table(state, state.store, table)
    check_index(state.store)
    _check_promises(state)
    _check_waiting(state, state.store, waiting)
    _check_sums(state, state.store)


def _check_references(state: PoolState, store: BlockStore) -> None:
    actual: list[list[int]] = [[] for _ in store.blocks.ids]
    for table in state.tables.values():
        for frame in table.frames:
            actual[frame].append(table.table_id)
    for lease in state.leases.values():
        for frame, count in lease.references.items():
            require(count > 0, f"lease {lease.lease_id} has {count} references to frame {frame}")
            actual[frame].extend([lease.lease_id] * count)
        for table_id, frame in lease.copy_sources.items():
            _check_source(store, lease.tables.get(table_id), frame)
            actual[frame].append(lease.lease_id)
        for unread in lease.remaps:
            actual[unread.frame].append(lease.lease_id)
        for place in (place for recode in lease.recodes for place in (*recode.sources, *recode.targets)):
            actual[place].append(lease.lease_id)
    for frame, holders in enumerate(actual):
        known = sorted(store.blocks.holders[frame])
        name = f"block {store.blocks.ids[frame]} in frame {frame}"
        require(known == sorted(holders), f"{name} counts {known} as its holders, but {holders} have it")


def _check_source(store: BlockStore, table: Table | None, frame: int) -> None:
    blocks, name = store.blocks, f"block {store.blocks.ids[frame]}, which is to be copied"
    require(blocks.prefixes[frame] != 0, f"{name}, is not sealed")
    if table is None:
        raise InvariantError(f"{name}, is kept for a table that is gone")
    index, rest = divmod(table.cached_tokens, blocks.block_size)
    if rest and table.num_tokens >= table.cached_tokens:  # else truncated since
        target, size = table.frames[index], rest * TOKEN_BYTES
        same = blocks.packed_tokens(frame)[:size] == blocks.packed_tokens(target)[:size]
        parent = blocks.prefixes[table.frames[index - 1]] if index else 0
        require(same and blocks.parents[frame] == parent, f"{name}, has other tokens, or another prefix")


def _check_reserves(state: PoolState, store: BlockStore) -> None:
    for lease in state.leases.values():
        for frame in lease.references if lease.is_worker else ():
            block, holders = f"block {store.blocks.ids[frame]} of a reserve", store.blocks.holders[frame]
            alone = tuple(holders) == (lease.lease_id,)
            require(alone, f"{block} is held by {holders}, not by lease {lease.lease_id} alone")
            unused = not store.blocks.num_tokens[frame] and not store.blocks.prefixes[frame]
            require(unused, f"{block} has been written")
        for table_id in lease.reserved_ids:
            require(table_id not in state.tables, f"table {table_id} is there, but its id still in reserve")
            require(table_id <= state.last_id, f"table id {table_id} is in reserve, but was never granted")


def _check_remaps(state: PoolState, store: BlockStore) -> None:
    readers: Counter[int] = Counter()
    for lease in state.leases.values():
        name, sequences = f"lease {lease.lease_id}", [unread.remap.sequence for unread in lease.remaps]
        last = lease.last_remap
        require(sequences == list(range(last - len(sequences) + 1, last + 1)), f"{name} waits for Remaps {sequences}")
        require(not sequences or lease.takes_remaps, f"{name} is told where its blocks are, but does not listen")
        require(not lease.is_fenced or lease.state is LeaseState.LOST, f"{name} is fenced, but {lease.state.name}")
        require(not lease.is_fenced or not sequences, f"{name} is fenced, but waited for")
        for unread in lease.remaps:
            block = f"block {store.blocks.ids[unread.frame]} in frame {unread.frame}"
            old = unread.block_id
            require(store.blocks.ids[unread.frame] == old, f"{block} was given away while {name} may read block {old}")
            require(store.blocks.prefixes[unread.frame] != 0, f"{block} moved, but is not sealed")
            mine = any(holder in lease.tables for holder in store.blocks.holders[unread.frame])
            require(not mine, f"{block} moved, but a table of {name} still has it")
            readers[unread.frame] += 1
    require(readers == state.readers, f"frames are read {dict(readers)}, counted {dict(state.readers)}")


def _check_table(state: PoolState, store: BlockStore, table: Table) -> None:
    blocks, name, size = store.blocks, f"table {table.table_id}", state.block_size
    require(len(set(table.frames)) == len(table.frames), f"{name} has a block twice")
    fits = 0 <= table.cached_tokens <= table.num_tokens <= len(table.frames) * size
    require(fits, f"{name} has more tokens than its blocks hold")
    idle = table.kept is None or not (table.frames or table.num_tokens)
    require(idle, f"{name} is suspended, but has blocks or tokens")
    before, digest = 0, root_digest(store.index.model_digest, table.salt)
    for index, frame in enumerate(table.frames):
        block = f"block {blocks.ids[frame]} of {name}"
        tokens = min(max(table.num_tokens - index * size, 0), size)
        require(blocks.num_tokens[frame] == tokens, f"{block} has {blocks.num_tokens[frame]} tokens, not {tokens}")
        require((blocks.prefixes[frame] != 0) == (tokens == size), f"{block} with {tokens} tokens is wrongly sealed")
        if tokens < size:
            owners = {views.lease_and_table(state, holder)[0] for holder in blocks.holders[frame]}
            require(owners == {table.lease_id}, f"{block} may still be written, but leases {sorted(owners)} hold it")
            continue
        digest = chained_digest(digest, blocks.packed_tokens(frame))
        require(blocks.digests[frame] == digest, f"{block} has the digest of other tokens")
        require(blocks.parents[frame] == before, f"{block} does not follow the block before it")
        before = blocks.prefixes[frame]


def _check_promises(state: PoolState) -> None:
    promised = state.promises.by_table()
    nobodys = state.promises.awaited.difference(*promised.values())
    require(not nobodys, f"{len(nobodys)} blocks are waited for that nobody has promised")
    for table_id, digests in promised.items():
        table = state.tables.get(table_id)
        if table is None:
            raise InvariantError(f"table {table_id} has promised blocks, but is gone")
        lost = state.leases[table.lease_id].state is LeaseState.LOST
        require(table.kept is None and not lost, f"table {table_id} has promised blocks, but cannot write them")
        room = len(table.frames) - table.num_tokens // state.block_size
        require(len(digests) <= room, f"table {table_id} has promised more blocks than it can write")


def _check_leases(state: PoolState) -> None:
    for lease in state.leases.values():
        name = f"lease {lease.lease_id}"
        require(lease.is_worker or lease.state is LeaseState.LIVE, f"{name} is a client's, but {lease.state.name}")
        require(lease.is_worker or not lease.reserved_ids, f"{name} is a client's, but has table ids in reserve")
        require(lease.is_worker or not lease.copy_sources, f"{name} is a client's, but has blocks to copy")
        kept = sum(len(table.kept or b"") for table in lease.tables.values())
        require(lease.kept_bytes == kept, f"{name} counts {lease.kept_bytes} bytes that are kept, but they are {kept}")
    owned = {table_id: table for lease in state.leases.values() for table_id, table in lease.tables.items()}
    require(owned == state.tables, "the leases' tables are not the pool's tables")
    for table in state.tables.values():
        owner = state.leases.get(table.lease_id)
        require(owner is not None and table.table_id in owner.tables, f"table {table.table_id} has another owner")
    require(max([*state.leases, *state.tables], default=0) <= state.last_id, "an id would be used twice")


def _check_waiting(state: PoolState, store: BlockStore, waiting: Waiting) -> None:
    claims = list(waiting.claims())
    kinds = {(claim.asker.lease_id, claim.asker.grows) for claim in claims}
    require(len(kinds) == len(claims), "a lease has two claims of a kind")
    for claim in claims:
        asker = claim.asker
        name, lease = f"claim of lease {asker.lease_id}", state.leases[asker.lease_id]
        require(lease.is_worker and lease.state is LeaseState.LIVE, f"{name} is no live worker's")
        require(0 < claim.num_blocks <= store.num_blocks, f"{name} is for {claim.num_blocks} blocks")
        require(bool(asker.table_id) or not asker.grows, f"{name} is for the growth of no table")
        if asker.table_id:
            table = lease.tables[asker.table_id]
            require((table.kept is None) == asker.grows, f"{name} is for a table that is suspended, or is not")
            require(rank_of(table) == asker.rank, f"{name} has another rank than its table")
    for lease_id, hungers in waiting.hungers().items():
        known = lease_id in state.leases and state.leases[lease_id].state is not LeaseState.LOST
        require(known and bool(hungers), f"a refusal of lease {lease_id} is remembered, but it has ended")
    for table in state.tables.values():
        right = table.yielding_since is None or (table.kept is None and state.leases[table.lease_id].is_worker)
        require(right, f"table {table.table_id} has to yield, but cannot")


_DOING = (BlockState.HELD, BlockState.QUARANTINED, BlockState.CACHED)
"""What a frame is doing: the first of these that a block in it does."""


def _by_frame(store: BlockStore) -> list[list[int]]:
    """The places of the blocks in each frame that has some."""
    whole = [[place] for place in store.blocks.frame_of.values() if not store.units.is_unit(place)]
    return whole + [store.units.blocks_in(frame) for frame in store.units]


def _check_host(store: BlockStore, usage: Usage, states: list[tuple[bool, Counter[BlockState]]]) -> None:
    below = [one for host, one in states if host]
    cached = sum(not one[BlockState.HELD] and not one[BlockState.QUARANTINED] for one in below)
    require(usage.host_cached == cached, f"{usage} does not agree with {cached} cached frames of the host")
    there = usage.host_free + len(below)
    require(usage.host_total == there == store.host_allocator.num_frames, f"{usage} does not add up for the host")


def _check_sums(state: PoolState, store: BlockStore) -> None:
    usage, blocks = views.usage(state), store.blocks
    states = [
        (store.units.is_host(places[0]), Counter(views.block_state(state, store, place) for place in places))
        for places in _by_frame(store)
    ]
    _check_host(store, usage, states)
    doing = Counter(next(one for one in _DOING if found[one]) for host, found in states if not host)
    seen = (doing[BlockState.HELD], doing[BlockState.CACHED], doing[BlockState.QUARANTINED])
    require((usage.held, usage.cached, usage.quarantined) == seen, f"{usage} does not agree with the blocks: {seen}")
    total = usage.free + usage.held + usage.cached + usage.quarantined + usage.kept
    require(total == usage.total, f"{usage} does not add up")
    counters = state.counters
    there = counters.allocated_blocks - counters.freed_blocks - counters.evicted_blocks
    require(there == len(blocks.frame_of), f"{counters} does not agree with {len(blocks.frame_of)} blocks")
