"""The prefix index: sealed blocks by the digest of everything up to their end.

A digest is SHA-256 over (digest of the block before, token ids); that of the block before the first is over (model,
salt). A match compares token ids and the identity of the block before too, so a collision cannot give a wrong block.
"""

from __future__ import annotations

from hashlib import sha256

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

    __slots__ = ("_blocks", "frames", "model_digest")

    def __init__(self, blocks: Blocks, model_digest: bytes) -> None:
        self._blocks = blocks
        self.model_digest = model_digest
        self.frames: dict[bytes, int] = {}

    def digest_of(self, parent: int | None, packed: bytes, salt: bytes) -> bytes:
        """The digest of a block with these packed token ids after the sealed block in frame `parent` (None: first)."""
        before = root_digest(self.model_digest, salt) if parent is None else self._blocks.digests[parent]
        return chained_digest(before, packed)

    def match(self, packed: bytes, salt: bytes) -> list[int]:
        """Frames of the longest indexed prefix of these packed token ids; never includes the last token."""
        blocks, size = self._blocks, self._blocks.block_size * TOKEN_BYTES
        # What `holds` asks is asked here without a call: a long prompt has hundreds of blocks, and its user waits.
        frame_with, tokens, parents, prefixes = self.frames.get, blocks.tokens, blocks.parents, blocks.prefixes
        digest, parent, found = root_digest(self.model_digest, salt), 0, list[int]()
        for start in range(0, len(packed) - size, size):
            piece = packed[start : start + size]
            digest = sha256(digest + piece).digest()
            frame = frame_with(digest)
            if frame is None or parents[frame] != parent or tokens[frame * size : (frame + 1) * size] != piece:
                break
            if parent == 0 and blocks.salts.get(frame, b"") != salt:
                break
            found.append(frame)
            parent = prefixes[frame]
        return found

    def holds(self, frame: int, parent: int, packed: bytes, salt: bytes) -> bool:
        """Whether the sealed block in a frame really is these tokens after the prefix with identity `parent`."""
        blocks = self._blocks
        return (
            blocks.parents[frame] == parent
            and blocks.packed_tokens(frame) == packed
            and (parent != 0 or blocks.salts.get(frame, b"") == salt)
        )
