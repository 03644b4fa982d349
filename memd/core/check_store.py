"""What must be true of a store: its places, what is cached in them, and what the index finds. Parts of check.

Each raises InvariantError, saying what is broken, where and how, and changes nothing.
"""

from __future__ import annotations

from memd.core.errors import InvariantError
from memd.core.store import BlockStore


def require(condition: bool, complaint: str) -> None:  # noqa: FBT001
    """InvariantError unless this is so."""
    if not condition:
        raise InvariantError(complaint)


def check_frames(store: BlockStore) -> None:
    """Every place has one block or none, and every column says so."""
    blocks = store.blocks
    free, below = list(store.allocator.free_frames()), list(store.host_allocator.free_frames())
    require(len(free) == store.allocator.num_free, f"{len(free)} frames are free, counted {store.allocator.num_free}")
    counted = store.host_allocator.num_free
    require(len(below) == counted, f"{len(below)} frames of the host are free, counted {counted}")
    first = store.first_host
    apart = all(frame < first for frame in (*free, *store.units.kept)) and all(frame >= first for frame in below)
    require(apart, "a frame of one tier is free in the other")
    free += below
    require(len(set(free)) == len(free), "a frame is free twice")
    occupied = {place for place, block_id in enumerate(blocks.ids) if block_id}
    used = _check_units(store, occupied)
    kept = store.units.kept
    require(len(kept) <= store.units.num_kept, f"{len(kept)} frames are kept back, wanted {store.units.num_kept}")
    require(len({*free, *kept}) == len(free) + len(kept), "a frame is kept back twice, or free too")
    free += kept
    both, neither = used & set(free), set(range(store.units.first)) - used - set(free)
    require(not both, f"frames {sorted(both)} are free, but blocks are in them")
    require(not neither, f"frames {sorted(neither)} are neither free nor in use")
    require(
        blocks.frame_of == {blocks.ids[place]: place for place in occupied}, "ids and places of blocks do not agree"
    )
    require(list(blocks.frame_of) == sorted(blocks.frame_of), "block ids do not rise")
    known = [block_id for block_id in blocks.order if block_id in blocks.frame_of]
    require(known == list(blocks.frame_of), "the order of block ids does not have each of them once, rising")
    require(max(blocks.frame_of, default=0) < blocks.next_id, f"block id {blocks.next_id} would be used twice")
    for place in set(range(len(blocks.ids))) - occupied:
        left = (blocks.holders[place], blocks.prefixes[place], blocks.digests[place], blocks.num_tokens[place])
        require(not any(left) and not blocks.lossy[place], f"place {place} is empty, but something is left in it")
    require(blocks.num_lossy == sum(blocks.lossy), f"{sum(blocks.lossy)} blocks are lossy, counted {blocks.num_lossy}")


def _check_units(store: BlockStore, occupied: set[int]) -> set[int]:
    """The frames in use, whole or split."""
    units = {place for place in occupied if store.units.is_unit(place)}
    there = {place for frame in store.units for place in store.units.blocks_in(frame)}
    require(units == there, f"blocks are in units {sorted(units)}, but split frames have {sorted(there)}")
    require(not occupied & set(store.units), f"frames {sorted(occupied & set(store.units))} are split, but have blocks")
    for place in units:
        require(store.units.frame_of(place) in store.units, f"unit {place} is of a frame that is not split")
    store.units.check({place for place in units if not store.blocks.holders[place]})
    return (occupied - units) | set(store.units)


def check_cached(store: BlockStore) -> None:
    """Cached are the blocks that nobody refers to, by how they are kept and in the order of their release."""
    blocks, cached = store.blocks, list(store.cached)
    idle = {place for place in blocks.frame_of.values() if not blocks.holders[place]}
    whole = {place for place in idle if not store.units.is_unit(place)}
    emptied = whole | {frame for frame in store.units if store.units.is_idle(frame)}
    counted = len(store.cached) + len(store.cached.host)
    require(len(cached) == counted, f"{len(cached)} frames are cached, counted {counted}")
    require(len(set(cached)) == len(cached), "a frame is cached twice")
    require(set(cached) == emptied, f"frames {sorted(cached)} are cached, but nobody refers to {sorted(emptied)}")
    for priority, queue in (queue for order in store.cached.orders() for queue in order.queues()):
        # A split frame comes to its queue when its last block is let go, or leaves it.
        times = [blocks.touched[frame] for frame in queue if frame not in store.units]
        require(times == sorted(times), f"cached blocks of priority {priority} are not in the order of release")
        for frame in queue:
            kept = store.cached.retention_of(frame)
            wanted = 0 if kept is None else None if kept.pinned else kept.priority
            require(priority == wanted, f"frame {frame} is cached with {priority}, but kept with {wanted}")
    pinned = sum(kept.pinned for kept in store.cached.kept.values())
    require(
        pinned == store.cached.num_pinned_kept, f"{pinned} blocks are pinned, counted {store.cached.num_pinned_kept}"
    )
    for frame in store.cached.kept:
        require(blocks.prefixes[frame] != 0, f"frame {frame} is kept, but has no sealed block")
    for frame in idle:
        require(blocks.prefixes[frame] != 0, f"block {blocks.ids[frame]} is cached, but not sealed")
        found = store.index.frames.get(blocks.digests[frame])
        require(found == frame, f"block {blocks.ids[frame]} is cached, but cannot be matched")


def check_index(store: BlockStore) -> None:
    """The index finds every block that it has by its digest and by its first tokens."""
    blocks = store.blocks
    for digest, frame in store.index.frames.items():
        there = blocks.prefixes[frame] != 0 and blocks.digests[frame] == digest
        require(there, f"the index has a digest for frame {frame}, where no such block is")
    known = [frame for frame in range(len(store.blocks.ids)) if store.index.finds(frame)]
    require(known == sorted(store.index.frames.values()), f"frames {known} are thought to be found, others are")
    chains = store.index.beginnings.chains()
    found = sorted(frame for chain in chains for frame in chain)
    require(found == sorted(store.index.frames.values()), f"frames {found} are found by their first tokens, others not")
    require(all(map(store.index.beginnings.is_in_place, chains)), "a block is found by tokens that are not its first")
    for frame in blocks.frame_of.values():
        sealed, name = blocks.prefixes[frame] != 0, f"block {blocks.ids[frame]}"
        require(sealed == bool(blocks.digests[frame]), f"{name} has a digest without being sealed, or none")
        require(not sealed or blocks.num_tokens[frame] == blocks.block_size, f"{name} is sealed, but not full")
    for frame in blocks.salts:
        first = blocks.prefixes[frame] != 0 and blocks.parents[frame] == 0
        require(first, f"a salt is kept for frame {frame}, which holds no first block")
