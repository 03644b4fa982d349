"""Which frames are free, and the queues that frames wait in.

A frame is the place of one block of the native format: its aligned run of units. With n units a block, frame i is the
units from i * n to i * n + n - 1. A frame costs no Python object, only array elements.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from memd.core.block import span_of
from memd.core.errors import InvariantError

NOWHERE = -1


class Links:
    """Neighbours of frames in circular doubly linked queues. A frame is in at most one queue at a time."""

    __slots__ = ("after", "before")

    def __init__(self, num_frames: int) -> None:
        self.after = array("i", [NOWHERE]) * num_frames
        self.before = array("i", [NOWHERE]) * num_frames


class FrameQueue:
    """Frames in order of arrival; every operation but iteration takes constant time."""

    __slots__ = ("_after", "_before", "_head", "_length")

    def __init__(self, links: Links) -> None:
        self._after, self._before = links.after, links.before
        self._head = len(self._after)  # an element of its own that links last to first
        self._after.append(self._head)
        self._before.append(self._head)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        frame = self._after[self._head]
        while frame != self._head:
            yield frame
            frame = self._after[frame]

    def append(self, frame: int) -> None:
        """Put a frame, which must be in no queue, at the end."""
        if self._after[frame] != NOWHERE:
            raise InvariantError(f"frame {frame} is put into a queue while it is in one")
        last = self._before[self._head]
        self._after[last] = self._before[self._head] = frame
        self._before[frame], self._after[frame] = last, self._head
        self._length += 1

    def remove(self, frame: int) -> None:
        """Take a frame of this queue out of it, wherever it stands."""
        before, after = self._before[frame], self._after[frame]
        if after == NOWHERE:
            raise InvariantError(f"frame {frame} is taken out of a queue while it is in none")
        self._after[before], self._before[after] = after, before
        self._after[frame] = self._before[frame] = NOWHERE
        self._length -= 1

    def remove_all(self, frames: Sequence[int]) -> None:
        """As `remove`, for each of these frames, each named once; fastest where they stand side by side."""
        befores, afters, i, count = self._before, self._after, 0, len(frames)
        span = span_of(frames)
        if span is not None and befores[span][:-1] == array("i", range(span.start + 1, span.stop)):
            before, after = befores[span.stop - 1], afters[span.start]
            befores[span] = afters[span] = array("i", [NOWHERE]) * count
            afters[before], befores[after], i = after, before, count
        while i < count:  # a prefix was released from its end, so its frames stand in a row, the last one first
            frame = frames[i]
            before, after = befores[frame], afters[frame]
            if after == NOWHERE:
                raise InvariantError(f"frame {frame} is taken out of a queue while it is in none")
            befores[frame] = afters[frame] = NOWHERE
            i += 1
            while i < count and (frame := frames[i]) == before:
                before = befores[frame]
                befores[frame] = afters[frame] = NOWHERE
                i += 1
            afters[before], befores[after] = after, before
        self._length -= count

    def pop(self) -> int:
        """Take out the frame that has waited longest."""
        frame = self._after[self._head]
        if frame == self._head:
            raise InvariantError("a frame is taken out of an empty queue")
        second = self._after[frame]
        self._after[self._head], self._before[second] = second, self._head
        self._after[frame] = self._before[frame] = NOWHERE
        self._length -= 1
        return frame


class Allocator:
    """Free frames of a tier. Policy: frames never used by rising index, then the one given back longest ago.

    So a freed block's bytes stay as they were for as long as possible. The first frame is `first`.
    """

    __slots__ = ("_end", "_returned", "_unused", "num_frames")

    def __init__(self, num_frames: int, links: Links, first: int = 0) -> None:
        self.num_frames = num_frames
        self._unused, self._end = first, first + num_frames
        self._returned = FrameQueue(links)

    @property
    def num_free(self) -> int:
        """Frames that can be taken."""
        return self._end - self._unused + len(self._returned)

    def take(self, count: int) -> list[int]:
        """That many free frames; there must be so many."""
        fresh = min(count, self._end - self._unused)
        frames = list(range(self._unused, self._unused + fresh))
        self._unused += fresh
        frames.extend(self._returned.pop() for _ in range(count - fresh))
        return frames

    def give_back(self, frame: int) -> None:
        """Make a taken frame free."""
        if frame >= self._unused:
            raise InvariantError(f"frame {frame} is given back, but was never taken")
        self._returned.append(frame)

    def free_frames(self) -> Iterator[int]:
        """All free frames, in the order in which they will be taken."""
        yield from range(self._unused, self._end)
        yield from self._returned
