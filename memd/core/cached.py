"""Cached blocks in the order in which they are evicted, tier by tier, and what prefixes are kept for longer.

Least recently used first, but a kept prefix by its priority: whatever has a lower one goes before it. A pinned one does
not go at all. Both end with their time; then the blocks count as just used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memd.core.allocator import Links
from memd.core.eviction import EvictionOrder, Retention
from memd.core.units import SplitFrames


class CachedFrames:
    """Frames of sealed blocks that nobody refers to, and the retention of those that have one, referred to or not.

    Blocks are named by their places. A split frame is queued when nobody refers to any block in it, from then on, and
    as strongly kept as any of these; it is emptied as a whole. Frames from `first_host` on are those of the host tier;
    what is said of no tier is said of the device.
    """

    __slots__ = ("_append_common", "_device", "_first_host", "_units", "host", "kept", "num_pinned_kept")

    def __init__(self, links: Links, units: SplitFrames, first_host: int) -> None:
        self._units, self._first_host = units, first_host
        self._device, self.host = EvictionOrder(links), EvictionOrder(links)
        self._append_common = self._device.common.append
        self.kept: dict[int, Retention] = {}  # by place
        self.num_pinned_kept = 0

    def __len__(self) -> int:
        return self.num_evictable + self.num_pinned

    def __iter__(self) -> Iterator[int]:
        yield from self._device
        yield from self.host

    def orders(self) -> tuple[EvictionOrder, EvictionOrder]:
        """Those of the device and of the host."""
        return self._device, self.host

    @property
    def num_evictable(self) -> int:
        """Frames that can be popped."""
        return self._device.num_evictable

    @property
    def num_pinned(self) -> int:
        """Cached frames that cannot be popped."""
        return self._device.num_pinned

    def evictable(self) -> Iterator[int]:
        """Frames that can be popped, in this order."""
        return self._device.evictable()

    def is_pinned(self, place: int) -> bool:
        """Whether a block, cached or not, is pinned."""
        return place in self.kept and self.kept[place].pinned

    def retention_of(self, frame: int) -> Retention | None:
        """How a frame is kept: as its block is, or as strongly as any of those in it."""
        if not self.kept:
            return None
        if frame not in self._units:
            return self.kept.get(frame)
        said = [self.kept[place] for place in self._units.blocks_in(frame) if place in self.kept]
        if not said:
            return None
        until = max(one.until for one in said)
        return Retention(max(one.priority for one in said), any(one.pinned for one in said), until)

    def append(self, place: int) -> None:
        """A block was released just now."""
        if place < self._first_host and not self.kept:  # mostly: thousands of a table are released at once
            self._append_common(place)
        elif not self._units.is_unit(place):
            self.append_whole(place)
        elif self._units.rest(place):
            self.append_whole(self._units.frame_of(place))

    def append_whole(self, frame: int) -> None:
        """Nobody refers to what is in a frame, which is in no queue."""
        self._order_of(frame).append(frame, self.retention_of(frame))

    def remove(self, place: int) -> None:
        """Somebody refers to a cached block again, or it goes."""
        if not self._units.is_unit(place):
            self.remove_whole(place)
        elif self._units.wake(place):
            self.remove_whole(self._units.frame_of(place))

    def remove_all(self, places: Sequence[int]) -> None:
        """As `remove`, for each of these places, each named once."""
        if self.kept or self._units or (places and max(places) >= self._first_host):
            for place in places:
                self.remove(place)
        else:
            self._device.remove_common(places)

    def remove_whole(self, frame: int) -> None:
        """Take a frame out of its queue."""
        self._order_of(frame).remove(frame, self.retention_of(frame))

    def pop(self) -> int:
        """Take out the frame to be evicted first."""
        return self._device.pop()

    def keep(self, frame: int, retention: Retention | None) -> None:
        """Give a block, which is in no queue now, this retention and no other."""
        if (former := self.kept.pop(frame, None)) is not None:
            self.num_pinned_kept -= former.pinned
        if retention is not None:
            self.kept[frame] = retention
            self.num_pinned_kept += retention.pinned

    def _order_of(self, frame: int) -> EvictionOrder:
        return self.host if frame >= self._first_host else self._device
