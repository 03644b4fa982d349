"""What a draft will do to blocks: tokens that move or are kept, then references that are added, then those dropped."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from memd.core.block import Blocks
from memd.core.store import BlockStore

Runs = list[tuple[Sequence[int], int]]
"""(frames, holder): one reference of the holder to the block in each of the frames."""


@dataclass(frozen=True, slots=True)
class Move:
    """The first tokens of a block become those of another; the rest is dropped if both are one."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Keep:
    """What a table keeps when it is suspended: the committed tokens of these blocks as they are then, and more."""

    table_id: int
    frames: array[int]
    more: bytes


def change_tokens(blocks: Blocks, changes: Iterable[Move | Keep]) -> dict[int, bytes]:
    """Carry out the changes in order; what is kept of each table that is suspended."""
    kept: dict[int, bytes] = {}
    for change in changes:
        if isinstance(change, Move):
            blocks.copy(change.source, change.target, change.num_tokens)
        else:
            kept[change.table_id] = b"".join(map(blocks.packed_tokens, change.frames)) + change.more
    return kept


class PendingReferences:
    """References to add and then those to drop, each in the order in which they were noted.

    They are noted by runs of blocks: a fork of a long table makes no object for each of its blocks.

    Additions come first, so that nothing is freed or evicted that an operation shares or copies from.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._holds: Runs = []
        self._drops: Runs = []
        self._more: Counter[int] = Counter()  # by frame, of the first so many runs of either kind
        self._fewer: Counter[int] = Counter()
        self._counted = (0, 0)

    def hold(self, frames: Sequence[int], holder: int) -> None:
        """One more reference to each block; the caller does not change `frames` afterwards."""
        self._holds.append((frames, holder))

    def drop(self, frames: Sequence[int], holder: int) -> None:
        """One reference less; blocks that nobody has then are freed or cached in this order."""
        self._drops.append((frames, holder))

    def num_holders(self, frame: int) -> int:
        """References to a block once all that is noted so far is done."""
        holds, drops = self._counted  # most steps never ask, and a table may have thousands of blocks
        for frames, _ in islice(self._holds, holds, None):
            self._more.update(frames)
        for frames, _ in islice(self._drops, drops, None):
            self._fewer.update(frames)
        self._counted = len(self._holds), len(self._drops)
        return len(self._store.blocks.holders[frame]) + self._more[frame] - self._fewer[frame]

    def apply(self, now: float) -> None:
        """Make it so."""
        for frames, holder in self._holds:
            self._store.hold(frames, (holder,), now)
        for frames, holder in self._drops:
            self._store.release_all(frames, holder, now)
