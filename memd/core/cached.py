"""Cached blocks in the order in which they are evicted, and what prefixes are kept for longer.

Least recently used first, but a kept prefix by its priority: whatever has a lower one goes before it. A pinned one does
not go at all. Both end with their time; then the blocks count as just used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memd.core.allocator import FrameQueue, Links
from memd.core.errors import InvariantError
from memd.core.units import SplitFrames


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a block stays cached. `until` is when that ends; priority 0 is everybody's."""

    priority: int
    pinned: bool
    until: float


class CachedFrames:
    """Frames of sealed blocks that nobody refers to, and the retention of those that have one, referred to or not.

    Blocks are named by their places. A split frame is queued when nobody refers to any block in it, from then on, and
    as strongly kept as any of these; it is emptied as a whole.
    """

    __slots__ = ("_common", "_links", "_pinned", "_queues", "_spare", "_units", "kept", "num_pinned_kept")

    def __init__(self, links: Links, units: SplitFrames) -> None:
        self._links, self._units = links, units
        self._common = FrameQueue(links)
        self._queues = {0: self._common}  # by priority, none empty but the common one
        self._spare: list[FrameQueue] = []
        self._pinned = FrameQueue(links)
        self.kept: dict[int, Retention] = {}  # by place
        self.num_pinned_kept = 0

    def __len__(self) -> int:
        return self.num_evictable + self.num_pinned

    def __iter__(self) -> Iterator[int]:
        for priority in sorted(self._queues):
            yield from self._queues[priority]
        yield from self._pinned

    def queues(self) -> list[tuple[int | None, list[int]]]:
        """The frames by priority, None for the pinned ones, each in the order of their release."""
        rest = [(priority, list(queue)) for priority, queue in self._queues.items()]
        return [*rest, (None, list(self._pinned))]

    @property
    def num_evictable(self) -> int:
        """Frames that can be popped."""
        return sum(map(len, self._queues.values()))

    @property
    def num_pinned(self) -> int:
        """Cached frames that cannot be popped."""
        return len(self._pinned)

    def is_pinned(self, place: int) -> bool:
        """Whether a block, cached or not, is pinned."""
        return place in self.kept and self.kept[place].pinned

    def retention_of(self, frame: int) -> Retention | None:
        """How a frame is kept: as its block is, or as strongly as any of those in it."""
        if frame not in self._units:
            return self.kept.get(frame)
        said = [self.kept[place] for place in self._units.blocks_in(frame) if place in self.kept]
        if not said:
            return None
        until = max(one.until for one in said)
        return Retention(max(one.priority for one in said), any(one.pinned for one in said), until)

    def append(self, place: int) -> None:
        """A block was released just now."""
        if not self._units.is_unit(place):
            self.append_whole(place)
        elif self._units.rest(place):
            self.append_whole(self._units.frame_of(place))

    def append_whole(self, frame: int) -> None:
        """Nobody refers to what is in a frame, which is in no queue."""
        (self._queue_of(frame) if self.kept else self._common).append(frame)

    def remove(self, place: int) -> None:
        """Somebody refers to a cached block again, or it goes."""
        if not self._units.is_unit(place):
            self.remove_whole(place)
        elif self._units.wake(place):
            self.remove_whole(self._units.frame_of(place))

    def remove_all(self, places: Sequence[int]) -> None:
        """As `remove`, for each of these places, each named once."""
        if self.kept or self._units:
            for place in places:
                self.remove(place)
        else:
            self._common.remove_all(places)

    def remove_whole(self, frame: int) -> None:
        """Take a frame out of its queue."""
        if not self.kept:
            self._common.remove(frame)
            return
        self._queue_of(frame).remove(frame)
        if (retention := self.retention_of(frame)) is not None:
            self._close_if_empty(retention.priority)

    def pop(self) -> int:
        """Take out the frame to be evicted first."""
        for priority in sorted(self._queues):
            if self._queues[priority]:
                frame = self._queues[priority].pop()
                self._close_if_empty(priority)
                return frame
        raise InvariantError("a block is evicted while none can be")

    def keep(self, frame: int, retention: Retention | None) -> None:
        """Give a block, which is in no queue now, this retention and no other."""
        if (former := self.kept.pop(frame, None)) is not None:
            self.num_pinned_kept -= former.pinned
        if retention is not None:
            self.kept[frame] = retention
            self.num_pinned_kept += retention.pinned

    def _queue_of(self, frame: int) -> FrameQueue:
        retention = self.retention_of(frame)
        if retention is None:
            return self._queues[0]
        if retention.pinned:
            return self._pinned
        if retention.priority not in self._queues:
            self._queues[retention.priority] = self._spare.pop() if self._spare else FrameQueue(self._links)
        return self._queues[retention.priority]

    def _close_if_empty(self, priority: int) -> None:
        if priority and not self._queues.get(priority, True):
            self._spare.append(self._queues.pop(priority))  # its place among the links serves another priority
