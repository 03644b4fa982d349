"""Snapshots of the state for whoever looks into the pool. Nothing here changes anything."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice

from memd.core import errors
from memd.core.accounts import Usage
from memd.core.block import TOKEN_BYTES
from memd.core.state import PoolState
from memd.core.store import BlockStore
from memd.core.table import Table
from memd.core.values import BlockState, BlockView, Holder, LeaseState, LeaseView, TableView

MAX_LISTED_HOLDERS = 64
"""Holders told of a block in a list of blocks: those of a prompt that thousands share would make a long list each."""


def usage(state: PoolState) -> Usage:
    """Blocks by what they are doing."""
    if state.store is None:
        return Usage(0, 0, 0, 0, 0)
    total, free, cached = state.store.allocator.num_frames, state.store.allocator.num_free, len(state.store.cached)
    quarantined = _num_frames_of(state.store, _writable_by_lost(state).union(filter(state.is_retired, state.readers)))
    kept, pinned = len(state.store.units.kept), state.store.cached.num_pinned
    held = total - free - cached - quarantined - kept
    reserve = sum(lease.num_reserved for lease in state.leases.values() if lease.state is not LeaseState.LOST)
    split, fp8 = state.store.units.num_split, state.store.units.num_blocks
    below = state.store.host_allocator
    host = (below.num_frames, below.num_free, len(state.store.cached.host))
    return Usage(total, free, held, cached, quarantined, pinned, reserve, split, fp8, kept, *host)


def _writable_by_lost(state: PoolState) -> set[int]:
    """The places that lost workers may still write to."""
    lost = [lease for lease in state.leases.values() if lease.state is LeaseState.LOST]
    places = {place for lease in lost for place in lease.references}
    for table in (table for lease in lost for table in lease.tables.values()):
        places.update(table.frames[table.num_tokens // state.block_size :])
    return places.union(place for lease in lost for recode in lease.recodes for place in recode.targets)


def _num_frames_of(store: BlockStore, quarantined: set[int]) -> int:
    """Frames of the device with nothing but such blocks, and ones that nobody refers to."""
    units, held = store.units, store.blocks.holders
    quarantined = {place for place in quarantined if not units.is_host(place)}
    split = {units.frame_of(place) for place in quarantined if units.is_unit(place)}
    waiting = sum(all(place in quarantined or not held[place] for place in units.blocks_in(frame)) for frame in split)
    return waiting + sum(not units.is_unit(place) for place in quarantined)


def lease(state: PoolState, lease_id: int) -> LeaseView:
    """A lease, a worker's too."""
    if lease_id not in state.leases:
        raise errors.lease_not_found(lease_id)
    return state.leases[lease_id].view()


def block(state: PoolState, block_id: int, now: float) -> BlockView:
    """A block."""
    if state.store is None or block_id not in state.store.blocks.frame_of:
        raise errors.block_not_found(block_id)
    return _block_view(state, state.store, state.store.blocks.frame_of[block_id], now)


def block_id_after(state: PoolState, block_id: int, count: int) -> int:
    """A greater id, with at most `count` blocks up to it; 0 if there is no block with a greater one."""
    if state.store is None:
        return 0
    order = state.store.blocks.order
    first = bisect_right(order, block_id)
    return order[min(first + count, len(order)) - 1] if first < len(order) else 0


def blocks_between(state: PoolState, after: int, last: int, kind: BlockState | None, now: float) -> list[BlockView]:
    """Blocks with ids greater than one, up to another, by rising id; only those in one state, if it is given.

    Each with at most MAX_LISTED_HOLDERS of its holders, and the number of the others.
    """
    store = state.store
    if store is None:
        return []
    order, frame_of = store.blocks.order, store.blocks.frame_of
    ids = order[bisect_right(order, after) : bisect_right(order, last)]
    frames: Iterator[int] = (frame_of[block_id] for block_id in ids if block_id in frame_of)
    if kind is not None:
        frames = (frame for frame in frames if block_state(state, store, frame) is kind)
    return [_block_view(state, store, frame, now, MAX_LISTED_HOLDERS) for frame in frames]


def table(state: PoolState, table_id: int, now: float) -> TableView:
    """A table with its token ids."""
    if state.store is None or table_id not in state.tables:
        raise errors.table_not_found(table_id)
    return table_view(state, state.tables[table_id], now, with_tokens=True)


def tables_after(state: PoolState, table_id: int, limit: int, now: float) -> Iterator[TableView]:
    """Up to `limit` tables with greater ids, by rising id, without token ids.

    Each is looked at when it is asked for, for many may be very long; what has been released by then is left out.
    """
    # Forks come later than their ids, which were in reserve.
    for one in nsmallest(limit, (one for one in state.tables if one > table_id)):
        if one in state.tables:
            yield table_view(state, state.tables[one], now)


def block_state(state: PoolState, store: BlockStore, frame: int) -> BlockState:
    """What a block's memory is doing. An unsealed block has holders of one lease only.

    Quarantined is one that a lost lease may write, and one that workers may still read since their tables moved on.
    """
    holders = store.blocks.holders[frame]
    if not holders:
        return BlockState.CACHED
    if store.blocks.prefixes[frame]:
        return BlockState.QUARANTINED if state.is_retired(frame) else BlockState.HELD
    owner = state.leases[lease_and_table(state, next(iter(holders)))[0]]
    return BlockState.QUARANTINED if owner.state is LeaseState.LOST else BlockState.HELD


def table_view(state: PoolState, one: Table, now: float, *, with_tokens: bool = False) -> TableView:
    """A snapshot of a table."""
    store = state.cut_store()
    packed, num_tokens = b"", one.num_tokens
    if one.kept is not None:
        packed, num_tokens = one.kept if with_tokens else b"", len(one.kept) // TOKEN_BYTES
    elif with_tokens:
        packed = b"".join(store.blocks.packed_tokens(frame) for frame in one.frames)
    return TableView(
        table_id=one.table_id,
        lease_id=one.lease_id,
        holder=state.leases[one.lease_id].holder,
        blocks=store.run(one.frames),
        num_tokens=num_tokens,
        cached_tokens=one.cached_tokens,
        token_ids=struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed),
        priority=one.priority,
        idle_s=max(now - one.touched, 0.0),  # it may have been since a list was begun
        suspended=one.kept is not None,
    )


def _block_view(
    state: PoolState, store: BlockStore, frame: int, now: float, max_holders: int | None = None
) -> BlockView:
    blocks = store.blocks
    references, kept = blocks.references(frame), store.cached.kept.get(frame)
    listed = islice(references.items(), max_holders)
    holders = [_holder(state, holder, count) for holder, count in listed]
    return BlockView(
        block_id=blocks.ids[frame],
        state=block_state(state, store, frame),
        format=store.format_of(frame),
        entry=store.entry(frame),
        sealed=blocks.prefixes[frame] != 0,
        exact=not blocks.lossy[frame],
        num_tokens=blocks.num_tokens[frame],
        digest=blocks.digests[frame],
        holders=holders,
        ref_count=len(blocks.holders[frame]),
        idle_s=now - blocks.touched[frame],
        priority=kept.priority if kept else 0,
        pinned=kept is not None and kept.pinned,
        kept_s=max(kept.until - now, 0.0) if kept else 0.0,
        more_holders=len(references) - len(holders),
        errors=blocks.errors(frame),
        host=store.units.is_host(frame),
    )


def _holder(state: PoolState, holder: int, ref_count: int) -> Holder:
    lease_id, table_id = lease_and_table(state, holder)
    return Holder(lease_id, table_id, ref_count, state.leases[lease_id].is_worker)


def lease_and_table(state: PoolState, holder: int) -> tuple[int, int]:
    """(lease id, table id or 0) of a holder of blocks."""
    owner = state.tables.get(holder)
    return (holder, 0) if owner is None else (owner.lease_id, holder)
