"""The prefix index: sealed blocks by the digest of everything up to their end.

A digest is SHA-256 over (digest of the block before, token ids); that of the block before the first is over (model,
salt). A match compares token ids and the identity of the block before too, so a collision cannot give a wrong block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import sha256

from memd.core.allocator import NOWHERE
from memd.core.beginnings import Beginnings
from memd.core.block import TOKEN_BYTES, Blocks

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

    __slots__ = ("_blocks", "_followers", "beginnings", "frames", "model_digest")

    def __init__(self, blocks: Blocks, model_digest: bytes) -> None:
        self._blocks = blocks
        self.model_digest = model_digest
        self.frames: dict[bytes, int] = {}  # changed by add and remove alone
        self.beginnings = Beginnings(blocks)
        # By frame: where the block after this one was found last. A guess, to be checked: blocks come and go.
        self._followers = array("i", [NOWHERE]) * len(blocks.ids)

    def add(self, frame: int) -> None:
        """Have matches find the sealed block in a frame, and no other one with its digest."""
        digest = self._blocks.digests[frame]
        if (other := self.frames.get(digest)) is not None:
            self.beginnings.remove(other)
        self.frames[digest] = frame
        self.beginnings.add(frame)

    def remove(self, frame: int) -> bool:
        """Have no match find the sealed block in a frame any more; whether one could."""
        if self.frames.get(self._blocks.digests[frame]) != frame:
            return False
        del self.frames[self._blocks.digests[frame]]
        self.beginnings.remove(frame)
        return True

    def digest_of(self, parent: int | None, packed: bytes, salt: bytes) -> bytes:
        """The digest of a block with these packed token ids after the sealed block in frame `parent` (None: first)."""
        before = root_digest(self.model_digest, salt) if parent is None else self._blocks.digests[parent]
        return chained_digest(before, packed)

    def match(self, packed: bytes, salt: bytes) -> list[int]:
        """Frames of the longest indexed prefix of these packed token ids; never includes the last token."""
        size = self._blocks.block_size * TOKEN_BYTES
        found = self._first(packed[:size], salt) if len(packed) > size else []
        # What `holds` asks is asked here without a call: a long prompt has hundreds of blocks, and its user waits.
        blocks, frame_with, followers = self._blocks, self.frames.get, self._followers
        tokens, parents, prefixes, digests = blocks.tokens, blocks.parents, blocks.prefixes, blocks.digests
        for start in range(size, len(packed) - size, size) if found else ():
            before, piece = found[-1], packed[start : start + size]
            parent, frame = prefixes[before], followers[before]
            # A block with these tokens after this prefix, which its own digest finds, is what a digest made anew would
            # find. (NOWHERE has no tokens.)
            known = parents[frame] == parent and tokens[frame * size : (frame + 1) * size] == piece
            if not known or frame_with(digests[frame]) != frame:
                frame = frame_with(sha256(digests[before] + piece).digest(), NOWHERE)
                if parents[frame] != parent or tokens[frame * size : (frame + 1) * size] != piece:
                    break
                followers[before] = frame
            found.append(frame)
        return found

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
