"""Blocks, their frames and the prefix index kept consistent: grant, hold, release and seal.

The life of a block:

    free --grant--> held, unsealed --write until full--> held, sealed --last release--> cached --evict--> free
                          |                                  ^                             |
                          '--last release--> free            '------------hold-------------'
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

from memd.core.accounts import Counters
from memd.core.allocator import Allocator, Links
from memd.core.block import FEW_HOLDERS, Blocks, ManyHolders, span_of
from memd.core.cached import CachedFrames, Retention
from memd.core.errors import InvariantError
from memd.core.prefix import PrefixIndex
from memd.core.values import BlockRun
from pagekernels.layout import PagedLayout, pack_entry


class BlockStore:
    """Every frame of the pool and the block in it. The caller has checked that what it asks for is possible.

    Eviction policy: sealed blocks that nobody refers to, the one released longest ago first, but by priority if they
    have one, and no pinned ones. Blocks of a table are released from its end, so a prefix is eaten from its end too.
    """

    __slots__ = (
        "_entry_base",
        "_entry_step",
        "allocator",
        "blocks",
        "cached",
        "counters",
        "format",
        "index",
    )

    def __init__(self, layout: PagedLayout, num_blocks: int, model_digest: bytes, counters: Counters) -> None:
        links = Links(num_blocks)
        self.allocator = Allocator(num_blocks, links)
        self.cached = CachedFrames(links)
        self.blocks = Blocks(num_blocks, layout.block_size)
        self.index = PrefixIndex(self.blocks, model_digest)
        self.counters = counters
        self.format = layout.format
        self._entry_base = pack_entry(layout.format, 0, 0)
        self._entry_step = layout.units_per_block

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
        return self.allocator.num_frames

    @property
    def available(self) -> int:
        """Blocks that can be granted: free and cached ones, but for those that are pinned."""
        return self.allocator.num_free + self.cached.num_evictable

    def num_evictable(self, frames: Sequence[int]) -> int:
        """How many of these blocks are counted as available: those that are cached and not pinned."""
        held = self.blocks.holders
        count = sum(not held[frame] for frame in frames) if (span := span_of(frames)) is None else held[span].count(())
        if self.cached.num_pinned:
            count -= sum(not held[frame] and self.cached.is_pinned(frame) for frame in frames)
        return count

    def num_pinned_beside(self, frames: Collection[int]) -> int:
        """How many cached blocks other than these cannot be evicted."""
        if not self.cached.num_pinned:
            return 0
        held, is_pinned = self.blocks.holders, self.cached.is_pinned
        return self.cached.num_pinned - sum(not held[frame] and is_pinned(frame) for frame in frames)

    def entry(self, frame: int) -> int:
        """The packed entry of the block in a frame."""
        return self._entry_base | frame * self._entry_step

    def run(self, frames: Sequence[int]) -> BlockRun:
        """The ids and packed entries of the blocks in these frames."""
        ids, base, step = self.blocks.ids, self._entry_base, self._entry_step
        if (span := span_of(frames)) is not None:
            return BlockRun(ids[span].tolist(), list(range(base + span.start * step, base + span.stop * step, step)))
        return BlockRun([ids[frame] for frame in frames], [base | frame * step for frame in frames])

    def grant(self, count: int, holders: tuple[int, ...], now: float) -> list[int]:
        """Frames of `count` new blocks, unsealed, each with the one reference in `holders`; evicts what it must."""
        for _ in range(count - self.allocator.num_free):
            self._evict(self.cached.pop())
        frames = self.allocator.take(count)
        self.blocks.occupy(frames, holders, now)
        self.counters.allocated_blocks += count
        return frames

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

    def seal(self, frame: int, parent: int | None, salt: bytes) -> bool:
        """Seal a full block that follows the sealed block in frame `parent`, or begins a table.

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
                self._evict(incumbent)
            blocks.prefixes[frame] = blocks.ids[frame]
        blocks.parents[frame] = before
        blocks.digests[frame] = digest
        if salt and parent is None:
            blocks.salts[frame] = salt
        if blocks.prefixes[frame] == blocks.ids[frame]:  # the first with these tokens after this prefix
            self.index.add(frame)
        if parent is not None:
            self.index.expect(parent, self.index.frames.get(digest, frame))
        return has_twin

    def _evict(self, frame: int) -> None:
        """Free a block that has left the cached queue."""
        if not self.index.remove(frame):
            raise InvariantError(f"block {self.blocks.ids[frame]} is evicted, but was not in the prefix index")
        self._vacate(frame)
        self.counters.evicted_blocks += 1

    def _vacate(self, frame: int) -> None:
        if frame in self.cached.kept:
            self.cached.keep(frame, None)
        self.blocks.vacate(frame)
        self.allocator.give_back(frame)
