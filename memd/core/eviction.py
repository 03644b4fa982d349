"""The order in which the cached frames of one tier are evicted: by priority, and least recently used first."""

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


class EvictionOrder:
    """Frames in queues, by how they are kept. Pinned ones are not evicted at all."""

    __slots__ = ("_links", "_pinned", "_queues", "_spare", "common")

    def __init__(self, links: Links) -> None:
        self._links = links
        self.common = FrameQueue(links)  # of those that are like all others
        self._queues = {0: self.common}  # by priority, none empty but the common one
        self._spare: list[FrameQueue] = []
        self._pinned = FrameQueue(links)

    def __iter__(self) -> Iterator[int]:
        yield from self.evictable()
        yield from self._pinned

    def __len__(self) -> int:
        return self.num_evictable + self.num_pinned

    def evictable(self) -> Iterator[int]:
        """Those that are not pinned, the next to be evicted first."""
        for priority in sorted(self._queues):
            yield from self._queues[priority]

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
        """Frames that cannot be popped."""
        return len(self._pinned)

    def append(self, frame: int, retention: Retention | None) -> None:
        """Put a frame that is kept like this at the end of its queue."""
        self._queue_of(retention).append(frame)

    def remove(self, frame: int, retention: Retention | None) -> None:
        """Take out a frame that is kept like this."""
        self._queue_of(retention).remove(frame)
        if retention is not None:
            self._close_if_empty(retention.priority)

    def remove_common(self, frames: Sequence[int]) -> None:
        """Take out frames that are like all others, each named once."""
        self.common.remove_all(frames)

    def pop(self) -> int:
        """Take out the frame to be evicted first."""
        for priority in sorted(self._queues):
            if self._queues[priority]:
                frame = self._queues[priority].pop()
                self._close_if_empty(priority)
                return frame
        raise InvariantError("a block is evicted while none can be")

    def _queue_of(self, retention: Retention | None) -> FrameQueue:
        if retention is None:
            return self.common
        if retention.pinned:
            return self._pinned
        if retention.priority not in self._queues:
            self._queues[retention.priority] = self._spare.pop() if self._spare else FrameQueue(self._links)
        return self._queues[retention.priority]

    def _close_if_empty(self, priority: int) -> None:
        if priority and not self._queues.get(priority, True):
            self._spare.append(self._queues.pop(priority))  # its place among the links serves another priority
