"""Matchable blocks by the prefix that they follow and the tokens that they begin with, so that a part can be reused.

A prompt that parts from a cached one inside a block has the KV of the tokens up to there in common with it, at the same
positions and after the same prefix: a copy of that block is its own, up to where they part.
"""

from __future__ import annotations

from array import array
from itertools import takewhile

from memd.core.allocator import NOWHERE
from memd.core.block import TOKEN_BYTES, Blocks

MIN_RUN = 4
"""Tokens that a block must share to be copied: fewer are computed in hardly more time than the copy takes."""
MAX_LOOKED_AT = 64
"""Blocks that one search compares, those that became matchable last: a bound, not a target."""


class Beginnings:
    """Chains of frames, the newest first, by (prefix before the block, its first MIN_RUN tokens).

    A hash table in columns, with as many chains as frames: no object per block. What chains have in common by chance is
    told apart by comparison.
    """

    __slots__ = ("_after", "_before", "_blocks", "_heads")

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._heads, self._after, self._before = (array("i", [NOWHERE]) * len(blocks.ids) for _ in range(3))

    def add(self, frame: int) -> None:
        """A sealed block can be matched from now on."""
        chain = self._chain_of(frame)
        second = self._heads[chain]
        self._heads[chain], self._after[frame], self._before[frame] = frame, second, NOWHERE
        if second != NOWHERE:
            self._before[second] = frame

    def remove(self, frame: int) -> None:
        """A block that was added cannot be matched any more; it is still sealed."""
        before, after = self._before[frame], self._after[frame]
        if before == NOWHERE:
            self._heads[self._chain_of(frame)] = after
        else:
            self._after[before] = after
        if after != NOWHERE:
            self._before[after] = before

    def longest(self, parent: int, salt: bytes, packed: bytes) -> tuple[int, int]:
        """The frame of a block after the prefix `parent` (0: none, but the salt) that begins most like these tokens.

        And how many tokens it has in common with them, at least MIN_RUN; (NOWHERE, 0) if there is none.
        """
        blocks, best, common = self._blocks, NOWHERE, (MIN_RUN - 1) * TOKEN_BYTES
        if len(packed) <= common:
            return NOWHERE, 0
        frame = self._heads[self._chain(parent, salt, packed)]
        for _ in range(MAX_LOOKED_AT):
            if frame == NOWHERE or len(packed) == common:
                break
            start = frame * blocks.block_size * TOKEN_BYTES
            longer = common + TOKEN_BYTES
            if blocks.tokens[start : start + longer] == packed[:longer] and self._follows(frame, parent, salt):
                best, common = frame, _common(blocks.packed_tokens(frame), packed)
            frame = self._after[frame]
        return (NOWHERE, 0) if best == NOWHERE else (best, common // TOKEN_BYTES)

    def chains(self) -> list[list[int]]:
        """All chains that have a frame, each from its head."""
        return [self._walk(head) for head in self._heads if head != NOWHERE]

    def is_in_place(self, chain: list[int]) -> bool:
        """Whether frames that were found in one chain belong there, and know it both ways."""
        heads = {self._heads[self._chain_of(frame)] for frame in chain}
        return heads == {chain[0]} and [self._before[frame] for frame in chain] == [NOWHERE, *chain[:-1]]

    def _walk(self, frame: int) -> list[int]:
        chain: list[int] = []
        while frame != NOWHERE and len(chain) <= len(self._heads):
            chain.append(frame)
            frame = self._after[frame]
        return chain

    def _follows(self, frame: int, parent: int, salt: bytes) -> bool:
        blocks = self._blocks
        return blocks.parents[frame] == parent and (parent != 0 or blocks.salts.get(frame, b"") == salt)

    def _chain_of(self, frame: int) -> int:
        blocks = self._blocks
        return self._chain(blocks.parents[frame], blocks.salts.get(frame, b""), blocks.packed_tokens(frame))

    def _chain(self, parent: int, salt: bytes, packed: bytes) -> int:
        return hash((parent or salt, packed[: MIN_RUN * TOKEN_BYTES])) % len(self._heads)


def _common(one: bytes, other: bytes) -> int:
    """Bytes of the tokens that both begin with."""
    starts = range(0, min(len(one), len(other)), TOKEN_BYTES)
    same = takewhile(lambda at: one[at : at + TOKEN_BYTES] == other[at : at + TOKEN_BYTES], starts)
    return TOKEN_BYTES * sum(1 for _ in same)
