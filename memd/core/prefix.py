"""The prefix index: sealed blocks by the digest of everything up to their end.

A digest is SHA-256 over (digest of the block before, token ids); that of the block before the first is over (model,
salt). A match compares token ids and the identity of the block before too, so a collision cannot give a wrong block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import sha256
from operator import eq

from memd.core.allocator import NOWHERE
from memd.core.beginnings import Beginnings
from memd.core.block import TOKEN_BYTES, Blocks, span_of

ROOT = b"pagepool prefix 1\0"
"""Separates these digests from all others, and from those of another scheme."""


def root_digest(model_digest: bytes, salt: bytes) -> bytes:
    """What stands before the first block of a table."""
    return sha256(ROOT + model_digest + salt).digest()


def chained_digest(parent: bytes, packed: bytes) -> bytes:
    """The digest of a block with these packed token ids after a block with digest `parent`."""
    return sha256(parent + packed).digest()


class PrefixIndex:
    """At most one sealed block per digest: the one that a match finds."""

    __slots__ = ("_blocks", "_followers", "_found", "beginnings", "frames", "model_digest")

    def __init__(self, blocks: Blocks, model_digest: bytes) -> None:
        self._blocks = blocks
        self.model_digest = model_digest
        self.frames: dict[bytes, int] = {}  # changed by add and remove alone
        self.beginnings = Beginnings(blocks)
        self._found = bytearray(len(blocks.ids))  # by frame: whether its digest finds it
        # By frame: where the block after this one was sealed or found last. A guess, to be checked: blocks come and go.
        self._followers = array("i", [NOWHERE]) * len(blocks.ids)

    def add(self, frame: int) -> None:
        """Have matches find the sealed block in a frame, and no other one with its digest."""
        digest = self._blocks.digests[frame]
        if (other := self.frames.get(digest)) is not None:
            self.beginnings.remove(other)
            self._found[other] = False
        self.frames[digest] = frame
        self._found[frame] = True
        self.beginnings.add(frame)

    def remove(self, frame: int) -> bool:
        """Have no match find the sealed block in a frame any more; whether one could."""
        if self.frames.get(self._blocks.digests[frame]) != frame:
            return False
        del self.frames[self._blocks.digests[frame]]
        self._found[frame] = False
        self.beginnings.remove(frame)
        return True

    def finds(self, frame: int) -> bool:
        """Whether a match can find the block in a frame, as `match` knows it without its digest."""
        return bool(self._found[frame])

    def expect(self, before: int, frame: int) -> None:
        """Guess that matches find the block in `frame` after the one in `before`: no digests are made for it then."""
        self._followers[before] = frame

    def digest_of(self, parent: int | None, packed: bytes, salt: bytes) -> bytes:
        """The digest of a block with these packed token ids after the sealed block in frame `parent` (None: first)."""
        before = root_digest(self.model_digest, salt) if parent is None else self._blocks.digests[parent]
        return chained_digest(before, packed)

    def match(self, packed: bytes, salt: bytes) -> list[int]:
        """Frames of the longest indexed prefix of these packed token ids; never includes the last token."""
        size = self._blocks.block_size * TOKEN_BYTES
        found = self._first(packed[:size], salt) if len(packed) > size else []
        most, guessed = (len(packed) - 1) // size, 1
        while 0 < len(found) < most:
            # Many blocks at once: a long prompt has hundreds of them, and its user waits. Guesses that are wrong cost
            # a comparison with at most some three times the blocks that were found.
            frames, at = self._guesses(found[-1], min(guessed, most - len(found))), len(found) * size
            if frames and self._follow(found[-1], frames, packed[at : at + len(frames) * size]):
                found += frames
                guessed *= 4
                continue
            guessed = 1
            if (frame := self._after(found[-1], packed[at : at + size])) == NOWHERE:
                break
            found.append(frame)
        return found

    def _guesses(self, frame: int, count: int) -> list[int]:
        """Where the next so many blocks after this one are, as far as that can be guessed."""
        followers, frames = self._followers, list[int]()
        in_a_row = range(frame + 1, frame + 1 + count)  # as a prompt's blocks lie in a pool that was not full
        if followers[frame : frame + count] == array("i", in_a_row):
            return list(in_a_row)
        for _ in range(count):
            if (frame := followers[frame]) == NOWHERE:
                break
            frames.append(frame)
        return frames

    def _follow(self, before: int, frames: list[int], packed: bytes) -> bool:
        """Whether blocks with these tokens, one after the other behind `before`, are in these frames, and found there.

        A block with these tokens after this prefix, which its own digest finds, is what a digest made anew would find.
        """
        blocks, size = self._blocks, self._blocks.block_size * TOKEN_BYTES
        prefixes, parents, found = blocks.prefixes, blocks.parents, self._found
        if (span := span_of(frames)) is not None:
            return (
                parents[span] == prefixes[before : before + 1] + prefixes[span][:-1]
                and blocks.tokens[span.start * size : span.stop * size] == packed
                and all(found[span])
            )
        return (
            all(map(eq, map(parents.__getitem__, frames), map(prefixes.__getitem__, [before, *frames])))
            and b"".join([blocks.tokens[frame * size : (frame + 1) * size] for frame in frames]) == packed
            and all(map(found.__getitem__, frames))
        )

    def _after(self, before: int, piece: bytes) -> int:
        """The frame of the block with these tokens after the one in `before`; NOWHERE if the index has none."""
        frame = self.frames.get(sha256(self._blocks.digests[before] + piece).digest(), NOWHERE)
        if frame == NOWHERE or not self.holds(frame, self._blocks.prefixes[before], piece, b""):
            return NOWHERE
        self._followers[before] = frame
        return frame

    def following(self, matched: list[int], packed: bytes, salt: bytes, most: int) -> Iterator[bytes]:
        """Digests of up to so many full blocks of these packed tokens that come after a match, made when asked for."""
        size = self._blocks.block_size * TOKEN_BYTES
        digest = self._blocks.digests[matched[-1]] if matched else root_digest(self.model_digest, salt)
        first = len(matched) * size
        for start in range(first, min(len(packed) - size + 1, first + most * size), size):
            digest = sha256(digest + packed[start : start + size]).digest()
            yield digest

    def partial(self, matched: list[int], packed: bytes, salt: bytes) -> tuple[int, int]:
        """After a match, the block that begins with the most of the tokens that follow; (frame, tokens in common).

        Never counts the last token; (NOWHERE, 0) if no block has enough in common (see Beginnings).
        """
        size = self._blocks.block_size * TOKEN_BYTES
        first = len(matched) * size
        parent = self._blocks.prefixes[matched[-1]] if matched else 0
        return self.beginnings.longest(parent, salt, packed[first : min(first + size, len(packed) - TOKEN_BYTES)])

    def _first(self, piece: bytes, salt: bytes) -> list[int]:
        frame = self.frames.get(self.digest_of(None, piece, salt))
        return [] if frame is None or not self.holds(frame, 0, piece, salt) else [frame]

    def holds(self, frame: int, parent: int, packed: bytes, salt: bytes) -> bool:
        """Whether the sealed block in a frame really is these tokens after the prefix with identity `parent`."""
        blocks = self._blocks
        return (
            blocks.parents[frame] == parent
            and blocks.packed_tokens(frame) == packed
            and (parent != 0 or blocks.salts.get(frame, b"") == salt)
        )
