"""Blocks that move between the device and the host tier, and stay what they were for whoever has them.

As in `compression` a block gets a second place, and is there when the bytes are: but nothing is computed, so memd
copies them itself, by copy engines where there are some, and nobody's step waits. Who uses a block is told by a Remap.

Down go blocks that nobody refers to, in the order in which they would be evicted, while little of the device is free;
what is wanted sooner is copied at once, so much a command, and else evicted. Up go those that a request has matched,
while there is room: it begins without waiting, and reads them where they are, in place, until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from memd.core.compression import Compression
from memd.core.errors import InvariantError
from memd.core.lease import Lease
from memd.core.recodes import Recode
from memd.core.state import PoolState
from memd.core.store import BlockStore
from memd.core.values import BlockCopy

MAX_MOVED_BYTES, MAX_MOVES = 64 << 20, 2
"""Bytes of a move, and moves that are on their way at a time: while one is copied, the one before is made true."""

FREE_SHARE, LEAST_FREE_SHARE = 0.1, 0.02
"""Of the device: blocks go down while less is free, and up while more is."""

RETRY_S = 1.0
"""How long nothing is moved after a copy that failed: the next would be of the same blocks, and fail as well."""

MAX_LOOKED_AT = 512
"""Frames, or matched blocks, that are looked at in one go."""

MOVER_LOCK = "\0memd"
"""In the place of a lock file: no file has such a name, so no worker can be taken for it."""


class Tiering:
    """Begins moves, and ends them. `run`: whenever time has passed, room is new, or a move is over."""

    def __init__(self, state: PoolState, compression: Compression) -> None:
        self._state = state
        self._compression = compression
        self._uncopied: deque[Recode] = deque()
        self._begins = 0.0  # nothing before that
        self._matched: deque[int] = deque()  # ids of blocks of the host tier
        state.host_matches = self._matched

    @property
    def most_blocks(self) -> int:
        """Blocks of the native format that one table can have, in both tiers; 0 until the pool is cut."""
        return self._state.most_blocks

    def run(self, now: float) -> None:
        """Begin what there is to do."""
        store = self._state.store
        if store is None or not store.host_allocator.num_frames:
            return
        if self._state.mover is None:
            lease = Lease(self._state.new_id(), "memd", float("inf"), float("inf"), MOVER_LOCK)
            self._state.leases[lease.lease_id] = self._state.mover = lease
        mover = self._state.mover
        store.blocks.thin(self._matched)
        while len(mover.recodes) < MAX_MOVES and now >= self._begins:
            if places := self._promotable(store):
                self._begin(store, mover, places, now, host=False)
            elif places := self._demotable(store, mover):
                self._begin(store, mover, places, now, host=True)
            else:
                break

    def take_hurried(self) -> list[BlockCopy]:
        """What is to be copied before anything else happens to the pool, and anybody hears of what was granted."""
        store = self._state.store
        if store is None or not store.hurried:
            return []
        return [BlockCopy(store.entry(source), store.entry(target)) for source, target in store.take_hurried()]

    def take_copies(self) -> list[tuple[Recode, list[BlockCopy]]]:
        """Moves whose bytes are to be copied, each once; say `done` when they are there."""
        taken, self._uncopied = list(self._uncopied), deque()
        entry = self._state.cut_store().entry if taken else None
        return [
            (move, [BlockCopy(entry(one), entry(other)) for one, other in zip(move.sources, move.targets, strict=True)])
            for move in taken
            if entry is not None
        ]

    def done(self, move: Recode, now: float, *, failed: bool = False) -> None:
        """The bytes of the oldest move are where they should be, or will never be."""
        store, mover = self._state.cut_store(), self._state.mover
        if mover is None or mover.recodes.popleft() is not move:
            raise InvariantError(f"move {move.sequence} is over, but is not the oldest")
        for source, target in zip(move.sources, move.targets, strict=True):
            del self._state.recoding[source]
            fixed = self._compression.why_fixed(store, source, to_units=False)
            pinned = store.units.is_host(target) and store.cached.is_pinned(source)
            if fixed is None and not failed and not pinned:
                self._compression.move(store, (source, target), now, lossy=bool(store.blocks.lossy[source]))
                if store.units.is_host(target):
                    self._state.counters.demoted_blocks += 1
                    if len(store.blocks.holders[target]) > 1:  # it was matched meanwhile, and so comes up again
                        self._matched.append(store.blocks.ids[target])
                else:
                    self._state.counters.promoted_blocks += 1
            store.release(target, mover.lease_id, now)
            store.release(source, mover.lease_id, now)
        move.is_over = True
        self._state.version += 1
        self._begins = now + RETRY_S if failed else 0.0
        self.run(now)

    def _begin(self, store: BlockStore, mover: Lease, places: list[int], now: float, *, host: bool) -> None:
        holders = (mover.lease_id,)
        store.hold(places, holders, now)
        targets = [self._target(store, place, holders, now, host=host) for place in places]
        mover.last_recode += 1
        move = Recode(mover.last_recode, mover.lease_id, places, targets, to_units=False)
        mover.recodes.append(move)
        self._state.recoding.update(dict.fromkeys(places, move))
        self._uncopied.append(move)
        self._state.version += 1

    def _target(self, store: BlockStore, place: int, holders: tuple[int, ...], now: float, *, host: bool) -> int:
        if store.units.is_unit(place):
            return store.grant_unit(holders, now, host=host)
        return store.grant_host(holders, now) if host else store.grant(1, holders, now)[0]

    def _most(self) -> int:
        layout = self._state.layout
        assert layout is not None
        return max(MAX_MOVED_BYTES // layout.block_bytes, 1)

    def _demotable(self, store: BlockStore, mover: Lease) -> list[int]:
        """Cached blocks of the device to be moved down, beside those that are on their way."""
        going = {store.units.frame_at(one) for move in mover.recodes for one in move.sources}
        under_way = sum(frame < store.first_host for frame in going)
        wanted = int(FREE_SHARE * store.num_blocks + 1) - store.allocator.num_free - under_way
        room = store.host_allocator.num_free + store.cached.host.num_evictable
        places: list[int] = []
        for frame in islice(store.cached.evictable(), min(max(wanted, 0), room, MAX_LOOKED_AT, self._most())):
            there = store.units.blocks_in(frame) if frame in store.units else [frame]
            if len(places) + len(there) > room:  # a block in a unit may take a frame, if only from what is in there
                break
            places += there
        return places

    def _promotable(self, store: BlockStore) -> list[int]:
        """Matched blocks of the host tier, in use, to be moved up."""
        spare = store.allocator.num_free - int(LEAST_FREE_SHARE * store.num_blocks)
        most = min(spare, self._most())
        return list(islice(self._matched_places(store), most)) if most > 0 else []

    def _matched_places(self, store: BlockStore) -> Iterator[int]:
        seen = set[int]()
        for _ in range(min(len(self._matched), MAX_LOOKED_AT)):
            block_id = self._matched.popleft()
            place = store.blocks.frame_of.get(block_id)
            if place is None or place in seen or not store.units.is_host(place) or not store.blocks.holders[place]:
                continue
            if self._compression.why_fixed(store, place, to_units=False) is not None:
                self._matched.append(block_id)
                continue
            seen.add(place)
            yield place
