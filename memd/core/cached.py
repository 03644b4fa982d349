"""Cached blocks in the order in which they are evicted, and what prefixes are kept for longer.

Least recently used first, but a kept prefix by its priority: whatever has a lower one goes before it. A pinned one does
not go at all. Both end with their time; then the blocks count as just used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memd.core.allocator import FrameQueue, Links
from memd.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a block stays cached. `until` is when that ends; priority 0 is everybody's."""

    priority: int
    pinned: bool
    until: float


class CachedFrames:
    """Frames of sealed blocks that nobody refers to, and the retention of those that have one, referred to or not."""

    __slots__ = ("_common", "_links", "_pinned", "_queues", "_spare", "kept", "num_pinned_kept")

    def __init__(self, links: Links) -> None:
        self._links = links
        self._common = FrameQueue(links)
        self._queues = {0: self._common}  # by priority, none empty but the common one
        self._spare: list[FrameQueue] = []
        self._pinned = FrameQueue(links)
        self.kept: dict[int, Retention] = {}
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

    def is_pinned(self, frame: int) -> bool:
        """Whether a block, cached or not, is pinned."""
        return frame in self.kept and self.kept[frame].pinned

    def append(self, frame: int) -> None:
        """A block was released just now."""
        (self._queue_of(frame) if self.kept else self._common).append(frame)

    def remove(self, frame: int) -> None:
        """Take a cached frame out, wherever it stands."""
        if not self.kept:
            self._common.remove(frame)
            return
        self._queue_of(frame).remove(frame)
        if frame in self.kept:
            self._close_if_empty(self.kept[frame].priority)

    def remove_all(self, frames: Sequence[int]) -> None:
        """As `remove`, for each of these frames, each named once."""
        if not self.kept:
            self._common.remove_all(frames)
            return
        for frame in frames:
            self.remove(frame)

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
        retention = self.kept.get(frame)
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
