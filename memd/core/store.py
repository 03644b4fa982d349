"""Blocks, their frames and the prefix index kept consistent: grant, hold, release and seal.

The life of a block:

    free --grant--> held, unsealed --write until full--> held, sealed --last release--> cached --evict--> free
                          |                                  ^                             |
                          '--last release--> free            '------------hold-------------'
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from memd.core.accounts import Counters
from memd.core.allocator import Allocator, Links
from memd.core.block import FEW_HOLDERS, Blocks, ManyHolders, span_of
from memd.core.cached import CachedFrames
from memd.core.entries import Entries
from memd.core.errors import InvariantError
from memd.core.evicting import MAX_HURRIED_BYTES, evict
from memd.core.eviction import Retention
from memd.core.extent import Extent
from memd.core.prefix import PrefixIndex
from memd.core.room import Room
from memd.core.units import SplitFrames
from memd.core.values import BlockRun
from pagekernels.layout import PagedLayout


class BlockStore:
    """Every place of the pool and the block in it. The caller has checked that what it asks for is possible.

    A place is a frame, of a block of the native format, or a unit of a split frame, of an FP8 block; see SplitFrames.
    What is granted, and what is available, are frames.

    Evicted are sealed blocks that nobody refers to, the one released longest ago first, but by priority, and none that
    is pinned. Blocks of a table are released from its end, so a prefix is eaten from its end too. `sealed` has the ids
    of blocks as they were sealed, for who takes them out: None for nobody. `hurried` are the places that evicted blocks
    of the device have moved from, and to, in the host tier: their bytes are to be copied before anything else happens.
    """

    __slots__ = (
        "_room",
        "allocator",
        "blocks",
        "cached",
        "counters",
        "entries",
        "entry",
        "first_host",
        "format_of",
        "host_allocator",
        "hurried",
        "index",
        "max_hurried",
        "num_writable_host",
        "sealed",
        "units",
    )

    def __init__(self, layout: PagedLayout, extent: Extent, model_digest: bytes, counters: Counters) -> None:
        links, first_host = Links(extent.num_frames), extent.num_blocks
        self.first_host = first_host
        self.allocator = Allocator(extent.num_blocks, links)
        self.host_allocator = Allocator(extent.num_host, links, first_host)
        self.units = SplitFrames(extent.num_frames, layout.units_per_block, first_host)
        self.units.keep(extent.fp8.num_kept(extent.num_blocks) if extent.fp8 else 0, self.allocator)
        self.cached = CachedFrames(links, self.units, first_host)
        self.blocks = Blocks(extent.num_places(layout.units_per_block), layout.block_size)
        self.index = PrefixIndex(self.blocks, model_digest)
        self.counters = counters
        self._room = Room(self.allocator, self.units, self.cached, self.blocks)
        entries = Entries(layout, self.units, extent)
        self.entry, self.entries, self.format_of = entries.entry, entries.entries, entries.format_of
        self.sealed: deque[int] | None = None
        self.num_writable_host = extent.num_host if extent.host_slab == 0 else 0
        self.hurried: list[tuple[int, int]] = []
        self.max_hurried = min(MAX_HURRIED_BYTES // layout.block_bytes + 1, extent.num_host)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be granted at most: one a frame, but for those that are kept back."""
        return self.allocator.num_frames - self.units.num_kept

    @property
    def most_blocks(self) -> int:
        """Blocks that one table can have: those of the host tier too, if workers can write there."""
        return self.num_blocks + self.num_writable_host

    def spare_below(self, places: Sequence[int]) -> int:
        """Frames of the host tier that can be granted while these blocks, which may be cached there, are held."""
        cached = self._room.num_evictable_of(places, host=True)
        return self.host_allocator.num_free + self.cached.host.num_evictable - cached

    @property
    def available(self) -> int:
        """Blocks that can be granted now."""
        return self._room.available

    def num_evictable(self, places: Sequence[int]) -> int:
        """How many available frames these blocks are in."""
        return self._room.num_evictable(places)

    def num_pinned_beside(self, places: Collection[int]) -> int:
        """How many cached frames other than those of these blocks cannot be emptied."""
        return self._room.num_pinned_beside(places)

    def take_hurried(self) -> list[tuple[int, int]]:
        """What is in `hurried`, once, in the order in which it is to be copied."""
        hurried, self.hurried = self.hurried, []
        return hurried

    def run(self, places: Sequence[int]) -> BlockRun:
        """The ids and packed entries of the blocks in these places."""
        ids, span = self.blocks.ids, span_of(places)
        return BlockRun([ids[place] for place in places] if span is None else ids[span].tolist(), self.entries(places))

    def grant(self, count: int, holders: tuple[int, ...], now: float) -> list[int]:
        """Frames of `count` new blocks, unsealed, each with the one reference in `holders`; evicts what it must."""
        while self.allocator.num_free < count:
            evict(self, self.cached.pop(), now)
        frames = self.allocator.take(count)
        self.blocks.occupy(frames, holders, now)
        self.counters.allocated_blocks += count
        return frames

    def grant_host(self, holders: tuple[int, ...], now: float) -> int:
        """A frame of the host tier, as `grant` grants those of the device."""
        if not self.host_allocator.num_free:
            evict(self, self.cached.host.pop(), now)
        (frame,) = self.host_allocator.take(1)
        self.blocks.occupy([frame], holders, now)
        self.counters.allocated_blocks += 1
        return frame

    def grant_unit(self, holders: tuple[int, ...], now: float, *, host: bool = False) -> int:
        """The place of a new FP8 block, as `grant` grants frames; takes a frame only where no split one has room."""
        allocator, order = self._tier(host=host), self.cached.orders()[host]
        if not (self.units.num_holes_of(host=host) or allocator.num_free or (self.units.kept and not host)):
            evict(self, order.pop(), now)
        if (frame := self.units.fullest(host=host)) is not None and self.units.is_idle(frame):
            self.cached.remove_whole(frame)
        place = self.units.take(allocator, host=host)
        self.blocks.occupy([place], holders, now)
        self.counters.allocated_blocks += 1
        return place

    def grant_beside(self, count: int, holders: tuple[int, ...], spared: Collection[int], now: float) -> list[int]:
        """As `grant`, but no block in the `spared` frames is evicted, whatever its priority; it counts as used."""
        cached = [frame for frame in spared if not self.blocks.holders[frame]]
        for frame in cached:
            self.cached.remove(frame)
        frames = self.grant(count, holders, now)
        for frame in reversed(cached):  # a prefix is eaten from its end
            self.cached.append(frame)
        for frame in spared:
            self.blocks.touched[frame] = now
        return frames

    def hold(self, frames: Sequence[int], holders: tuple[int, ...], now: float) -> None:
        """Add the one reference in `holders` to each of these blocks, which may be cached."""
        held, touched, cached = self.blocks.holders, self.blocks.touched, list[int]()
        if (span := span_of(frames)) is not None and held[span].count(()) == len(frames):
            held[span], touched[span] = [holders] * len(frames), array("d", [now]) * len(frames)
            self.cached.remove_all(frames)
            return
        (holder,), add = holders, self.blocks.add_reference
        for frame in frames:
            known = held[frame]
            if not known:
                cached.append(frame)
                held[frame] = holders
            elif len(known) < FEW_HOLDERS and type(known) is tuple:  # mostly; no call for it
                held[frame] = known + holders
            elif type(known) is ManyHolders:
                known.add(holder)
            else:
                add(frame, holder)
            touched[frame] = now
        self.cached.remove_all(cached)

    def hold_counted(self, counts: dict[int, int], holder: int, now: float) -> None:
        """As many references of a holder to each of these blocks as are counted."""
        self.hold(list(counts), (holder,), now)
        for frame, count in counts.items():
            if count > 1:
                self.blocks.add_reference(frame, holder, count - 1)

    def keep(self, frame: int, retention: Retention | None, now: float) -> None:
        """Give a sealed block this retention, or none; if it is cached, that is a use of it."""
        if self.blocks.holders[frame]:
            self.cached.keep(frame, retention)
            return
        self.cached.remove(frame)
        self.cached.keep(frame, retention)
        self.blocks.touched[frame] = now
        self.cached.append(frame)

    def release(self, frame: int, holder: int, now: float) -> None:
        """Drop one reference; after the last one a sealed block is cached and any other free.

        A sealed block whose digest another block has in the index cannot be matched, so it is freed too; if that
        other block is gone by now, this one takes its place.
        """
        self.release_all((frame,), holder, now)

    def release_all(self, frames: Iterable[int], holder: int, now: float) -> None:
        """As `release` of each of these blocks, in this order."""
        for frame in self.blocks.drop_references(frames, holder, now):
            self._end(frame)

    def release_counted(self, counts: dict[int, int], holder: int, now: float) -> None:
        """As many references to each of these blocks as are counted, the block named last first."""
        for frame, count in counts.items():
            if count > 1:
                self.blocks.drop_but_one(frame, holder, count)
        self.release_all(reversed(counts), holder, now)

    def _end(self, frame: int) -> None:
        """Nobody refers to a block any more."""
        blocks = self.blocks
        if blocks.prefixes[frame]:
            incumbent = self.index.frames.get(blocks.digests[frame])
            if incumbent is None:
                self.index.add(frame)
            if incumbent is None or incumbent == frame:
                self.cached.append(frame)
                return
        self.vacate(frame)
        self.counters.freed_blocks += 1

    def seal(self, frame: int, parent: int | None, salt: bytes, *, lossy: bool = False) -> bool:
        """Seal a full block that follows the sealed block in frame `parent`, or begins a table.

        `lossy`: it was computed from blocks of which one is not exact.

        Whether the index has an equal block: of two blocks with the same prefix the first stays there. One that only
        has the same digest, by a collision or because the block before it was evicted and computed anew, gives way: no
        match can reach it.
        """
        blocks = self.blocks
        packed = blocks.packed_tokens(frame)
        before = 0 if parent is None else blocks.prefixes[parent]
        digest = self.index.digest_of(parent, packed, salt)
        incumbent = self.index.frames.get(digest)
        has_twin = incumbent is not None and self.index.holds(incumbent, before, packed, salt)
        if incumbent is not None and has_twin:
            blocks.prefixes[frame] = blocks.prefixes[incumbent]
        else:
            if incumbent is not None and not blocks.holders[incumbent]:
                self.cached.remove(incumbent)
                self.drop(incumbent)
            blocks.prefixes[frame] = blocks.ids[frame]
        blocks.parents[frame] = before
        blocks.digests[frame] = digest
        if lossy:
            blocks.note_lossy(frame, lossy=True)
        if salt and parent is None:
            blocks.salts[frame] = salt
        if blocks.prefixes[frame] == blocks.ids[frame]:  # the first with these tokens after this prefix
            self.index.add(frame)
        if parent is not None:
            self.index.expect(parent, self.index.frames.get(digest, frame))
        if self.sealed is not None:
            self.sealed.append(blocks.ids[frame])
        return has_twin

    def supersede(self, place: int, other: int) -> None:
        """Have matches find an equal block instead of a cached one, which is freed."""
        self.index.add(other)
        self.cached.remove(place)
        self.vacate(place)
        self.counters.freed_blocks += 1

    def drop(self, place: int) -> None:
        """End a cached block that is in no queue."""
        if not self.index.remove(place):
            raise InvariantError(f"block {self.blocks.ids[place]} is evicted, but was not in the prefix index")
        self.vacate(place)
        self.counters.evicted_blocks += 1

    def vacate(self, place: int) -> None:
        """A block that nobody refers to and that is in no queue and in no index is gone."""
        if place in self.cached.kept:
            self.cached.keep(place, None)
        self.blocks.vacate(place)
        if not self.units.is_unit(place):
            self.units.put_back(place, self._tier(host=place >= self.first_host))
            return
        frame = self.units.frame_of(place)
        self.units.rest(place)
        self.units.give_back(place, self._tier(host=frame >= self.first_host))
        if frame in self.units and self.units.is_idle(frame):
            self.cached.append_whole(frame)

    def _tier(self, *, host: bool) -> Allocator:
        return self.host_allocator if host else self.allocator
