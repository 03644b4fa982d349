"""Frames that are split into units: the places of FP8 blocks.

Places are numbered like frames and behind them: of a pool with F frames place F + u is unit u of them, so that the
columns of Blocks have one index for either kind. The frames of the host tier follow those of the device. A frame that
is split has no block itself. It is split when a unit is wanted and no split frame has one left, and whole again when
its last block is gone.

Some frames are kept back for that: a block can be stored as an FP8 block also when every other frame holds something,
and what becomes free by it fills up those kept back first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memd.core.allocator import Allocator
from memd.core.errors import InvariantError


class SplitFrames:
    """Which frames are split, where blocks are in them, and to which of these nobody refers.

    With one unit a frame, or without room for the columns of units, nothing is ever split.
    """

    __slots__ = (
        "_blocks",
        "_first_host",
        "_idle",
        "_open",
        "first",
        "kept",
        "num_blocks",
        "num_kept",
        "num_split",
        "per_frame",
    )

    def __init__(self, num_frames: int, per_frame: int, first_host: int) -> None:
        self.first, self.per_frame, self._first_host = num_frames, per_frame, first_host
        self._blocks: dict[int, list[int]] = {}  # by split frame: its places with blocks
        self._idle: dict[int, int] = {}  # by split frame: how many of these nobody refers to
        # Split frames with room, of the device and of the host, by their number of blocks.
        self._open: tuple[list[dict[int, None]], ...] = tuple([{} for _ in range(per_frame)] for _ in range(2))
        self.kept: list[int] = []  # frames that are kept back
        self.num_kept = 0  # as many as there should be
        self.num_split, self.num_blocks = 0, 0  # split frames of the device, and blocks in their units

    def __len__(self) -> int:
        """Split frames."""
        return len(self._blocks)

    def __contains__(self, frame: int) -> bool:
        return frame in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def is_unit(self, place: int) -> bool:
        """Whether a place is a unit, and not a whole frame."""
        return place >= self.first

    def frame_of(self, place: int) -> int:
        """The frame that a unit is a part of."""
        return (place - self.first) // self.per_frame

    def frame_at(self, place: int) -> int:
        """The frame that a place is, or is a part of."""
        return self.frame_of(place) if place >= self.first else place

    def blocks_in(self, frame: int) -> list[int]:
        """The places of the blocks in a split frame, in the order in which they came."""
        return self._blocks[frame]

    @property
    def has_host(self) -> bool:
        """Whether there is a host tier."""
        return self._first_host < self.first

    def is_host(self, place: int) -> bool:
        """Whether a place is in the host tier."""
        return (place if place < self.first else self.frame_of(place)) >= self._first_host

    @property
    def num_holes(self) -> int:
        """Units of split frames of the device that have no block."""
        return self.num_holes_of(host=False)

    def num_holes_of(self, *, host: bool) -> int:
        """Units of split frames of a tier that have no block."""
        return sum(len(frames) * (self.per_frame - count) for count, frames in enumerate(self._open[host]) if count)

    def fullest(self, *, host: bool = False) -> int | None:
        """The split frame of a tier with the most blocks of those that have a unit left; None if there is none."""
        return next((next(iter(frames)) for frames in reversed(self._open[host][1:]) if frames), None)

    def keep(self, count: int, allocator: Allocator) -> None:
        """Keep so many free frames back from now on."""
        self.num_kept, self.kept = count, allocator.take(count)

    def put_back(self, frame: int, allocator: Allocator) -> None:
        """A frame is empty: if it is the device's, it is kept back if there are too few of these, else it is free."""
        if len(self.kept) < self.num_kept and frame < self._first_host:
            self.kept.append(frame)
        else:
            allocator.give_back(frame)

    def frames_for(self, count: int) -> int:
        """How many available frames so many units would take: free ones, and split ones that can be emptied now.

        Those that are kept back are none of these, and cover a part.
        """
        frames = -len(self.kept)
        for filled in range(self.per_frame - 1, 0, -1):
            for frame in self._open[False][filled]:
                if count <= 0:
                    return max(frames, 0)
                count -= self.per_frame - filled
                frames += self.is_idle(frame)
        return max(frames - (-max(count, 0) // self.per_frame), 0)

    def take(self, allocator: Allocator, *, host: bool = False) -> int:
        """A unit for a block: in the fullest frame that has one left, else in a free one, or one that is kept back.

        The block counts as one that somebody refers to, so its frame must be in no queue.
        """
        if (frame := self.fullest(host=host)) is None:
            (frame,) = allocator.take(1) if allocator.num_free else [self.kept.pop()]
            self._blocks[frame], self._idle[frame] = [], 0
            self.num_split += not host
        taken = self._blocks[frame]
        first = self.first + frame * self.per_frame
        place = next(place for place in range(first, first + self.per_frame) if place not in taken)
        taken.append(place)
        self.num_blocks += not host
        self._recount(frame, len(taken) - 1)
        return place

    def give_back(self, place: int, allocator: Allocator) -> None:
        """The block in a unit, to which nobody refers, is gone. Its frame must be in no queue."""
        frame = self.frame_of(place)
        if place not in self._blocks.get(frame, ()) or not self._idle[frame]:
            raise InvariantError(f"unit {place - self.first} is given back, but has no block that nobody refers to")
        self._idle[frame] -= 1
        self._blocks[frame].remove(place)
        self.num_blocks -= frame < self._first_host
        self._recount(frame, len(self._blocks[frame]) + 1)
        if not self._blocks[frame]:
            del self._blocks[frame], self._idle[frame]
            self.num_split -= frame < self._first_host
            self.put_back(frame, allocator)

    def rest(self, place: int) -> bool:
        """Nobody refers to the block in a unit any more; whether the same is true of all blocks of its frame now."""
        frame = self.frame_of(place)
        self._idle[frame] += 1
        return self.is_idle(frame)

    def wake(self, place: int) -> bool:
        """Somebody refers to the block in a unit again; whether nobody did to any block of its frame until now."""
        frame = self.frame_of(place)
        was_idle = self.is_idle(frame)
        self._idle[frame] -= 1
        return was_idle

    def is_idle(self, frame: int) -> bool:
        """Whether nobody refers to any block of a split frame, so that it can be emptied."""
        return self._idle[frame] == len(self._blocks[frame])

    def idle_frames_of(self, places: Iterable[int]) -> set[int]:
        """The frames, each once, that some of these units are in and that can be emptied."""
        frames = {self.frame_of(place) for place in places if place >= self.first}
        return {frame for frame in frames if self.is_idle(frame)}

    def check(self, idle: set[int]) -> None:
        """Verify the counts, where nobody refers to the blocks in these places; raises InvariantError."""
        for frame, places in self._blocks.items():
            counted = sum(place in idle for place in places)
            if counted != self._idle[frame] or not 0 < len(places) <= self.per_frame:
                found = f"blocks in {places}, {counted} idle, counted {self._idle[frame]}"
                raise InvariantError(f"frame {frame} has {found}")
        of_device = [len(places) for frame, places in self._blocks.items() if frame < self._first_host]
        if (self.num_split, self.num_blocks) != (len(of_device), sum(of_device)):
            found = f"{len(of_device)} with {sum(of_device)} blocks, counted {self.num_split} and {self.num_blocks}"
            raise InvariantError(f"split frames of the device are {found}")
        for count, frames in (pair for tier in self._open for pair in enumerate(tier)):
            if any(len(self._blocks[frame]) != count for frame in frames):
                raise InvariantError(f"frames {list(frames)} are thought to have {count} blocks")
        partly = [frame for frame, places in self._blocks.items() if len(places) < self.per_frame]
        if sorted(partly) != sorted(frame for tier in self._open for frames in tier for frame in frames):
            raise InvariantError(f"frames {partly} have room for blocks, but others are looked into")

    def _recount(self, frame: int, before: int) -> None:
        """A split frame had so many blocks before."""
        frames = self._open[frame >= self._first_host]
        if 0 < before < self.per_frame:
            del frames[before][frame]
        after = len(self._blocks[frame])
        if 0 < after < self.per_frame:
            frames[after][frame] = None
