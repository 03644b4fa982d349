"""Which pins cover which blocks: a tree of pinned prefixes.

A block is kept as the strongest pin says that ends with it or with a block after it. So of prefixes that begin alike
the common head is kept as long and as strongly as any of them, whoever pinned it first or last, and what ends one pin
leaves what the others said.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from memd.core.errors import InvariantError
from memd.core.eviction import Retention


@dataclass(slots=True, eq=False)
class KeptBlock:
    """The block at an index of a pinned prefix, or of several. `pins` are those that end with it, by their keys."""

    block_id: int
    index: int
    before: KeptBlock | None = None
    after: dict[int, KeptBlock] = field(default_factory=dict)  # by block id
    pins: dict[bytes, Retention] = field(default_factory=dict)
    retention: Retention | None = None

    def strongest(self) -> Retention | None:
        """What all pins together say; the blocks after it must be settled."""
        below = (block.retention for block in self.after.values() if block.retention is not None)
        said = [*self.pins.values(), *below]
        if len(said) < 2:
            return said[0] if said else None
        priority, until = max(one.priority for one in said), max(one.until for one in said)
        return Retention(priority, any(one.pinned for one in said), until)


class PinTree:
    """Pins by key, and the blocks that they cover. `settle` says what a change comes to, at most once a block."""

    def __init__(self) -> None:
        self._blocks: dict[int, KeptBlock] = {}
        self._last: dict[bytes, KeptBlock] = {}  # by pin: the last block of its prefix
        self._changed: dict[int, KeptBlock] = {}

    def __len__(self) -> int:
        """How many pins there are."""
        return len(self._last)

    @property
    def num_blocks(self) -> int:
        """Blocks of the prefixes, also those that were evicted and are not forgotten yet."""
        return len(self._blocks)

    def get(self, key: bytes) -> Retention | None:
        """What a pin says, or None if there is none."""
        return self._last[key].pins[key] if key in self._last else None

    def items(self) -> list[tuple[bytes, Retention]]:
        """All pins."""
        return [(key, last.pins[key]) for key, last in self._last.items()]

    def add(self, key: bytes, block_ids: Sequence[int], retention: Retention) -> None:
        """A new pin of a prefix of at least one block."""
        before: KeptBlock | None = None
        for index, block_id in enumerate(block_ids):
            block = self._blocks.get(block_id)
            if block is None:
                block = self._blocks[block_id] = KeptBlock(block_id, index)
            if block.before is not before and block.before is not None:
                # It was evicted while the block after it was held; another one with its tokens has taken its place.
                del block.before.after[block_id]
                self._touch(block.before)
            block.before = before
            if before is not None:
                before.after[block_id] = block
            self._changed[block_id] = block
            before = block
        if before is None:
            raise InvariantError("a prefix without blocks is pinned")
        before.pins[key] = retention
        self._last[key] = before

    def drop(self, key: bytes) -> None:
        """End a pin, if there is one."""
        last = self._last.pop(key, None)
        if last is not None:
            del last.pins[key]
            self._touch(last)

    def forget_evicted(self, there: Container[int]) -> None:
        """Forget the blocks that are not there any more, by their ids. All changes must have been settled.

        Each pin goes on with what is there of its prefix, kept as it was, and one of which nothing is there ends.
        """
        gone = [block for block in self._blocks.values() if block.block_id not in there]
        for block in sorted(gone, key=attrgetter("index")):
            before = block.before  # is there, or None: whatever was not has been taken out from between by now
            del self._blocks[block.block_id]
            for after in block.after.values():
                after.before = before
            if before is None:
                for key in block.pins:
                    del self._last[key]
                continue
            del before.after[block.block_id]
            before.after.update(block.after)
            before.pins.update(block.pins)
            self._last.update(dict.fromkeys(block.pins, before))

    def settle(self) -> list[tuple[int, Retention | None]]:
        """How the blocks of the prefixes that were added or dropped are kept now, the last blocks first."""
        # Later blocks first: how a block is kept depends on those after it.
        changed = sorted(self._changed.values(), key=lambda block: -block.index)
        self._changed = {}
        for block in changed:
            block.retention = block.strongest()
            if block.retention is None:
                del self._blocks[block.block_id]
                if block.before is not None:
                    del block.before.after[block.block_id]
        return [(block.block_id, block.retention) for block in changed]

    def check(self, kept: Iterable[tuple[int, Retention]]) -> None:
        """InvariantError unless blocks are `kept` as the pins say, none less than those after it."""
        for block in self._blocks.values():
            if block.retention is None or block.retention != block.strongest():
                raise InvariantError(f"block {block.block_id} is kept with {block.retention}, not as its pins say")
        for block_id, retention in kept:
            known = self._blocks.get(block_id)
            if known is None or known.retention != retention:
                raise InvariantError(f"block {block_id} is kept with {retention}, but no pins say so")

    def _touch(self, last: KeptBlock) -> None:
        block: KeptBlock | None = last
        while block is not None and block.block_id not in self._changed:
            self._changed[block.block_id] = block
            block = block.before
