"""The blocks of a pool, as columns by frame: no object per block, for there may be a million of them."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat, starmap

from memd.core.errors import InvariantError

TOKEN_BYTES = 4
"""Token ids are kept and hashed as little-endian unsigned 32-bit integers."""

MANY_FRAMES = 16
"""From so many frames on it pays to look whether they stand in a row."""

FEW_HOLDERS = 8
"""So many references of a block are a tuple, which costs least; more are counted by holder, so that each costs as much
as the first, however many share a block."""


class ManyHolders:
    """More than FEW_HOLDERS references. Reads like a tuple of holders, in no order: length, membership, iteration."""

    __slots__ = ("counts", "length")

    def __init__(self, holders: Iterable[int]) -> None:
        self.counts = dict(Counter(holders))
        self.length = sum(self.counts.values())

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(starmap(repeat, self.counts.items()))  # who wants one of them waits for no copy

    def __contains__(self, holder: int) -> bool:
        return holder in self.counts

    def __repr__(self) -> str:
        return f"{self.length} references of {len(self.counts)} holders"

    def add(self, holder: int, count: int = 1) -> None:
        """So many more references of a holder."""
        self.counts[holder] = self.counts.get(holder, 0) + count
        self.length += count

    def drop(self, holder: int, count: int = 1) -> None:
        """So many references less of a holder that has as many."""
        left = self.counts.pop(holder) - count
        if left:
            self.counts[holder] = left
        self.length -= count


Holders = tuple[int, ...] | ManyHolders
"""Who refers to a block: ids of tables and of leases, one entry per reference. Both kinds draw from one counter."""


def span_of(frames: Sequence[int]) -> slice | None:
    """The frames as a slice, if they are many and stand in a row: what is done to a slice takes no loop.

    Those of a prefix mostly are, for they were granted together.
    """
    if len(frames) < MANY_FRAMES or frames[-1] - frames[0] != len(frames) - 1:
        return None
    span = slice(frames[0], frames[-1] + 1)
    return span if list(frames) == list(range(span.start, span.stop)) else None


class Blocks:
    """What is known of the block in each frame.

    ids         block id, 0 if the frame has no block
    holders     one entry per reference; empty if nobody refers to it
    touched     when it was last granted, matched, written or released
    num_tokens  committed tokens in it
    prefixes    0 until it is sealed; then the identity of all tokens up to its end: the id of the first block that was
                sealed with them. Digests stand for prefixes but could collide; these cannot.
    parents     of a sealed block: the prefix identity of the block before it, 0 for the first of a table
    digests     of a sealed block: its content digest, chained over its prefix
    salts       of a sealed first block with a salt: the salt
    lossy       whether it, or what it was computed from, was ever stored lossily: it is not exact
    k_errors    what it loses, or would lose, as an FP8 block, as far as it was tried: PagedOps.compress_blocks' errors
    v_errors    of K and of V; 0 if not

    `order` has the ids of all blocks, and some of blocks that are gone, rising: so a list can begin anywhere.
    """

    __slots__ = (
        "block_size",
        "digests",
        "frame_of",
        "holders",
        "ids",
        "k_errors",
        "lossy",
        "next_id",
        "num_lossy",
        "num_tokens",
        "order",
        "parents",
        "prefixes",
        "salts",
        "tokens",
        "touched",
        "v_errors",
    )

    def __init__(self, num_frames: int, block_size: int) -> None:
        self.block_size = block_size
        self.next_id = 1
        self.frame_of: dict[int, int] = {}  # in order of rising id
        self.order = array("Q")
        self.ids = array("Q", [0]) * num_frames
        self.holders: list[Holders] = [()] * num_frames
        self.touched = array("d", [0.0]) * num_frames
        self.num_tokens = array("B", [0]) * num_frames
        self.tokens = bytearray(num_frames * block_size * TOKEN_BYTES)
        self.prefixes = array("Q", [0]) * num_frames
        self.parents = array("Q", [0]) * num_frames
        self.digests = [b""] * num_frames
        self.salts: dict[int, bytes] = {}
        self.lossy = bytearray(num_frames)
        self.num_lossy = 0
        self.k_errors = array("f", [0.0]) * num_frames
        self.v_errors = array("f", [0.0]) * num_frames

    def occupy(self, frames: Sequence[int], holders: tuple[int, ...], now: float) -> None:
        """Begin a new, empty block in each of these frames, with these few holders."""
        ids = range(self.next_id, self.next_id + len(frames))
        for frame, block_id in zip(frames, ids, strict=True):
            if self.ids[frame]:
                raise InvariantError(f"frame {frame} is granted while block {self.ids[frame]} is in it")
            self.ids[frame] = block_id
            self.holders[frame] = holders
            self.touched[frame] = now
        self.frame_of.update(zip(ids, frames, strict=True))
        self.order.extend(ids)
        if len(self.order) > 2 * len(self.ids):  # so at most half is of blocks that are gone, and it is seldom done
            self.order = array("Q", self.frame_of)
        self.next_id = ids.stop

    def vacate(self, frame: int) -> None:
        """End the block in a frame; nobody may refer to it."""
        if self.holders[frame]:
            raise InvariantError(f"block {self.ids[frame]} is dropped while {self.holders[frame]} refer to it")
        del self.frame_of[self.ids[frame]]
        self.ids[frame] = 0
        self.num_tokens[frame] = 0
        self.note_lossy(frame, lossy=False)
        self.note_errors(frame, (0.0, 0.0))
        if self.prefixes[frame]:
            self.prefixes[frame] = self.parents[frame] = 0
            self.digests[frame] = b""
            self.salts.pop(frame, None)

    def note_lossy(self, frame: int, *, lossy: bool) -> None:
        """Say whether the block in a frame is lossy."""
        self.num_lossy += lossy - self.lossy[frame]
        self.lossy[frame] = lossy

    def note_errors(self, frame: int, errors: tuple[float, float]) -> None:
        """Say what the block in a frame loses as an FP8 block, in K and in V."""
        self.k_errors[frame], self.v_errors[frame] = errors

    def errors(self, frame: int) -> tuple[float, float]:
        """What is known of that."""
        return self.k_errors[frame], self.v_errors[frame]

    def swap_ids(self, one: int, other: int) -> None:
        """Each of two blocks is known by the other's id from now on."""
        ids = self.ids
        ids[one], ids[other] = ids[other], ids[one]
        self.frame_of[ids[one]], self.frame_of[ids[other]] = one, other

    def thin(self, waiting: deque[int]) -> None:
        """Drop the ids of blocks that are gone, and all but the first of each, where these are most of a long queue."""
        if len(waiting) > 2 * len(self.ids):
            there = list(dict.fromkeys(filter(self.frame_of.__contains__, waiting)))
            waiting.clear()
            waiting.extend(there)

    def references(self, frame: int) -> Mapping[int, int]:
        """How many references each holder of a block has; only to be read."""
        holders = self.holders[frame]
        return holders.counts if isinstance(holders, ManyHolders) else Counter(holders)

    def add_reference(self, frame: int, holder: int, count: int = 1) -> None:
        """So many more references of a holder to a block that somebody refers to."""
        holders = self.holders[frame]
        if isinstance(holders, tuple):
            if len(holders) + count <= FEW_HOLDERS:
                self.holders[frame] = holders + (holder,) * count
                return
            self.holders[frame] = holders = ManyHolders(holders)
        holders.add(holder, count)

    def drop_reference(self, frame: int, holder: int) -> bool:
        """Drop one reference of a holder; whether it was the last of all."""
        holders = self.holders[frame]
        if holders == (holder,):
            self.holders[frame] = ()
            return True
        if holder not in holders:
            raise InvariantError(f"{holder} drops a reference to block {self.ids[frame]}, which {holders} refer to")
        if isinstance(holders, tuple):
            at = holders.index(holder)
            self.holders[frame] = holders[:at] + holders[at + 1 :]
            return False
        self._drop_of_many(frame, holders, holder, 1)
        return False

    def drop_but_one(self, frame: int, holder: int, count: int) -> None:
        """Drop one reference less than these `count` of a holder: all at once, if there are many."""
        holders = self.holders[frame]
        if isinstance(holders, ManyHolders) and holders.counts.get(holder, 0) >= count:
            self._drop_of_many(frame, holders, holder, count - 1)
            return
        for _ in range(count - 1):
            self.drop_reference(frame, holder)

    def _drop_of_many(self, frame: int, holders: ManyHolders, holder: int, count: int) -> None:
        holders.drop(holder, count)
        if len(holders) <= FEW_HOLDERS // 2:  # not at FEW_HOLDERS itself: a reference more and less is no conversion
            self.holders[frame] = tuple(holders)

    def drop_references(self, frames: Iterable[int], holder: int, now: float) -> list[int]:
        """Drop one reference of a holder to each of these blocks; those that nobody refers to then, in their order."""
        held, touched, alone, dropped = self.holders, self.touched, (holder,), list[int]()
        for frame in frames:  # of a long table there are thousands, and everybody waits
            touched[frame], known = now, held[frame]
            if known == alone:
                held[frame] = ()
                dropped.append(frame)
            elif type(known) is ManyHolders and known.length > FEW_HOLDERS and holder in known.counts:
                known.drop(holder)
            elif self.drop_reference(frame, holder):
                dropped.append(frame)
        return dropped

    def write(self, frame: int, packed: bytes, now: float) -> bool:
        """Append packed token ids to an unsealed block; whether it is full now, and waits to be sealed."""
        filled = self.num_tokens[frame]
        start = (frame * self.block_size + filled) * TOKEN_BYTES
        filled += len(packed) // TOKEN_BYTES
        if filled > self.block_size or self.prefixes[frame]:
            raise InvariantError(f"block {self.ids[frame]} is written beyond its end")
        self.tokens[start : start + len(packed)] = packed
        self.num_tokens[frame] = filled
        self.touched[frame] = now
        return filled == self.block_size

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Make an unsealed block what another is in its first tokens; a sealed one whole makes a sealed copy.

        With source = target the block's later tokens are dropped; no sealed block is written.
        """
        if self.prefixes[target]:
            raise InvariantError(f"block {self.ids[target]} is sealed, but tokens are copied into it")
        first, end = source * self.block_size * TOKEN_BYTES, target * self.block_size * TOKEN_BYTES
        size = num_tokens * TOKEN_BYTES
        self.tokens[end : end + size] = self.tokens[first : first + size]
        self.num_tokens[target] = num_tokens
        if num_tokens:
            self.note_lossy(target, lossy=bool(self.lossy[source]))
        if self.prefixes[source] and num_tokens == self.block_size:
            self.prefixes[target], self.parents[target] = self.prefixes[source], self.parents[source]
            self.digests[target] = self.digests[source]
            if source in self.salts:
                self.salts[target] = self.salts[source]

    def packed_tokens(self, frame: int) -> bytes:
        """The committed token ids of a block, packed."""
        start = frame * self.block_size * TOKEN_BYTES
        return bytes(self.tokens[start : start + self.num_tokens[frame] * TOKEN_BYTES])
