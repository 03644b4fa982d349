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
from memd.core.cached import CachedFrames, Retention
from memd.core.entries import Entries
from memd.core.errors import InvariantError
from memd.core.fp8 import Fp8
from memd.core.prefix import PrefixIndex
from memd.core.units import SplitFrames
from memd.core.values import BlockRun
from pagekernels.layout import PagedLayout


class BlockStore:
    """Every place of the pool and the block in it. The caller has checked that what it asks for is possible.

    A place is a frame, of a block of the native format, or a unit of a split frame, of an FP8 block; see SplitFrames.
    What is granted, and what is available, are frames.

    Evicted are sealed blocks that nobody refers to, the one released longest ago first, but by priority, and none that
    is pinned. Blocks of a table are released from its end, so a prefix is eaten from its end too. `sealed` has the ids
    of blocks as they were sealed, for who takes them out: None for nobody.
    """

    __slots__ = (
        "allocator",
        "blocks",
        "cached",
        "counters",
        "entries",
        "entry",
        "format_of",
        "index",
        "sealed",
        "units",
    )

    def __init__(
        self, layout: PagedLayout, num_blocks: int, model_digest: bytes, counters: Counters, fp8: Fp8 | None = None
    ) -> None:
        links = Links(num_blocks)
        self.allocator = Allocator(num_blocks, links)
        self.units = SplitFrames(num_blocks, layout.units_per_block)
        self.units.keep(fp8.num_kept(num_blocks) if fp8 else 0, self.allocator)
        self.cached = CachedFrames(links, self.units)
        self.blocks = Blocks(num_blocks * (1 + layout.units_per_block if fp8 else 1), layout.block_size)
        self.index = PrefixIndex(self.blocks, model_digest)
        self.counters = counters
        entries = Entries(layout, self.units)
        self.entry, self.entries, self.format_of = entries.entry, entries.entries, entries.format_of
        self.sealed: deque[int] | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that can be granted at most: one a frame, but for those that are kept back."""
        return self.allocator.num_frames - self.units.num_kept

    @property
    def available(self) -> int:
        """Blocks that can be granted: free and cached ones, but for those that are pinned, or to be kept back."""
        missing = self.units.num_kept - len(self.units.kept)
        return self.allocator.num_free + max(self.cached.num_evictable - missing, 0)

    def num_evictable(self, frames: Sequence[int]) -> int:
        """How many available frames these blocks are in: those that are cached and not pinned."""
        held = self.blocks.holders
        if self.units:
            return self._num_evictable_split(frames)
        count = sum(not held[frame] for frame in frames) if (span := span_of(frames)) is None else held[span].count(())
        if self.cached.num_pinned:
            count -= sum(not held[frame] and self.cached.is_pinned(frame) for frame in frames)
        return count

    def _num_evictable_split(self, places: Sequence[int]) -> int:
        whole = [place for place in places if not self.units.is_unit(place) and not self.blocks.holders[place]]
        retentions = map(self.cached.retention_of, (*whole, *self.units.idle_frames_of(places)))
        return sum(one is None or not one.pinned for one in retentions)

    def num_pinned_beside(self, frames: Collection[int]) -> int:
        """How many cached frames other than those of these blocks cannot be emptied."""
        if not self.cached.num_pinned:
            return 0
        if self.units:
            frames = {self.units.frame_of(one) if self.units.is_unit(one) else one for one in frames}
            retentions = [self.cached.retention_of(one) for one in frames if self.is_cached(one)]
            return self.cached.num_pinned - sum(one is not None and one.pinned for one in retentions)
        held, is_pinned = self.blocks.holders, self.cached.is_pinned
        return self.cached.num_pinned - sum(not held[frame] and is_pinned(frame) for frame in frames)

    def is_cached(self, frame: int) -> bool:
        """Whether there is something in a frame that nobody refers to."""
        if frame in self.units:
            return self.units.is_idle(frame)
        return self.blocks.ids[frame] != 0 and not self.blocks.holders[frame]

    def run(self, places: Sequence[int]) -> BlockRun:
        """The ids and packed entries of the blocks in these places."""
        ids, span = self.blocks.ids, span_of(places)
        return BlockRun([ids[place] for place in places] if span is None else ids[span].tolist(), self.entries(places))

    def grant(self, count: int, holders: tuple[int, ...], now: float) -> list[int]:
        """Frames of `count` new blocks, unsealed, each with the one reference in `holders`; evicts what it must."""
        while self.allocator.num_free < count:
            self._evict(self.cached.pop())
        frames = self.allocator.take(count)
        self.blocks.occupy(frames, holders, now)
        self.counters.allocated_blocks += count
        return frames

    def grant_unit(self, holders: tuple[int, ...], now: float) -> int:
        """The place of a new FP8 block, as `grant` grants frames; takes a frame only where no split one has room."""
        if not (self.units.num_holes or self.allocator.num_free or self.units.kept):
            self._evict(self.cached.pop())
        if (frame := self.units.fullest) is not None and self.units.is_idle(frame):
            self.cached.remove_whole(frame)
        place = self.units.take(self.allocator)
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
        self._vacate(frame)
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
                self._drop(incumbent)
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
        self._vacate(place)
        self.counters.freed_blocks += 1

    def _evict(self, frame: int) -> None:
        """Free a frame that has left the cached queue, and with it whatever is in it."""
        if frame not in self.units:
            self._drop(frame)
            return
        first, *others = list(self.units.blocks_in(frame))
        self.units.wake(first)  # the frame has left its queue already
        self._drop(first)
        for place in others:
            self.cached.remove(place)
            self._drop(place)

    def _drop(self, place: int) -> None:
        """End a cached block that is in no queue."""
        if not self.index.remove(place):
            raise InvariantError(f"block {self.blocks.ids[place]} is evicted, but was not in the prefix index")
        self._vacate(place)
        self.counters.evicted_blocks += 1

    def _vacate(self, place: int) -> None:
        if place in self.cached.kept:
            self.cached.keep(place, None)
        self.blocks.vacate(place)
        if not self.units.is_unit(place):
            self.units.put_back(place, self.allocator)
            return
        frame = self.units.frame_of(place)
        self.units.rest(place)
        self.units.give_back(place, self.allocator)
        if frame in self.units and self.units.is_idle(frame):
            self.cached.append_whole(frame)
