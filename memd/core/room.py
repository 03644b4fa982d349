"""What room there is on the device: how many blocks could be granted, and what that would evict."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memd.core.allocator import Allocator
from memd.core.block import Blocks, span_of
from memd.core.cached import CachedFrames
from memd.core.units import SplitFrames


class Room:
    """Counts of a store's frames. Nothing here changes anything."""

    __slots__ = ("allocator", "blocks", "cached", "units")

    def __init__(self, allocator: Allocator, units: SplitFrames, cached: CachedFrames, blocks: Blocks) -> None:
        self.allocator = allocator
        self.units = units
        self.cached = cached
        self.blocks = blocks

    @property
    def available(self) -> int:
        """Blocks that can be granted: free and cached ones, but for those that are pinned, or to be kept back."""
        missing = self.units.num_kept - len(self.units.kept)
        return self.allocator.num_free + max(self.cached.num_evictable - missing, 0)

    def num_evictable(self, frames: Sequence[int]) -> int:
        """How many available frames these blocks are in: those that are cached on the device and not pinned."""
        held = self.blocks.holders
        if self.units or self.units.has_host:
            return self.num_evictable_of(frames, host=False)
        count = sum(not held[frame] for frame in frames) if (span := span_of(frames)) is None else held[span].count(())
        if self.cached.num_pinned:
            count -= sum(not held[frame] and self.cached.is_pinned(frame) for frame in frames)
        return count

    def num_evictable_of(self, places: Sequence[int], *, host: bool) -> int:
        """How many frames of a tier these blocks are in that are cached and not pinned."""
        places = [place for place in places if self.units.is_host(place) is host]
        whole = [place for place in places if not self.units.is_unit(place) and not self.blocks.holders[place]]
        retentions = map(self.cached.retention_of, (*whole, *self.units.idle_frames_of(places)))
        return sum(one is None or not one.pinned for one in retentions)

    def num_pinned_beside(self, frames: Collection[int]) -> int:
        """How many cached frames other than those of these blocks cannot be emptied."""
        if not self.cached.num_pinned:
            return 0
        if self.units or self.units.has_host:
            frames = {self.units.frame_at(one) for one in frames if not self.units.is_host(one)}
            retentions = [self.cached.retention_of(one) for one in frames if self.is_cached(one)]
            return self.cached.num_pinned - sum(one is not None and one.pinned for one in retentions)
        held, is_pinned = self.blocks.holders, self.cached.is_pinned
        return self.cached.num_pinned - sum(not held[frame] and is_pinned(frame) for frame in frames)

    def is_cached(self, frame: int) -> bool:
        """Whether there is something in a frame that nobody refers to."""
        if frame in self.units:
            return self.units.is_idle(frame)
        return self.blocks.ids[frame] != 0 and not self.blocks.holders[frame]
