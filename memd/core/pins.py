"""Keeping prefixes cached: priority, pin and time-to-live, as whoever knows the workload sets them.

A pin is no reference: it belongs to no lease, frees nothing and shows nobody anything; it says what eviction spares,
and for how long. It is known by the whole blocks of token ids, and the salt, that it was asked for with: saying it
again replaces it, and no other one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from hashlib import sha256

from memd.core import errors
from memd.core.block import TOKEN_BYTES
from memd.core.eviction import Retention
from memd.core.kept import PinTree
from memd.core.state import PoolState, pack_checked
from memd.core.store import BlockStore
from memd.core.values import KeptPrefix, PinRequest, UnpinnedPrefix
from pagepool.errors import invalid_field
from pagepool.limits import check_priority

MIN_TTL_S, MAX_TTL_S = 1.0, 24 * 3600.0
PINNED_SHARE = 2
"""At most one in so many blocks of the pool may be pinned: the others are for whoever computes."""
MAX_PINS = 16_384
"""Prefixes that may be kept at a time."""
TREE_SHARE = 2
"""The tree of pins has at most so many blocks for each one of the pool: evicted ones are forgotten before that."""


class PrefixPins:
    """The commands that keep prefixes, and the passing of their time. `tree_share`: TREE_SHARE."""

    def __init__(self, state: PoolState) -> None:
        self.tree_share = TREE_SHARE
        self._state = state
        self._tree = PinTree()
        self._ends: list[tuple[float, int, bytes]] = []  # a heap of (until, number, pin); old entries mean nothing
        self._numbers = itertools.count()

    def pin(self, request: PinRequest, now: float) -> KeptPrefix:
        """Keep the longest sealed prefix of the token ids, its last block included.

        Blocks that other pins cover too are kept by the strongest word and for the longest time.
        """
        store = self._state.cut_store()
        check_priority("priority", request.priority)
        if not MIN_TTL_S <= request.ttl_s <= MAX_TTL_S:
            limit = f"from {MIN_TTL_S:g} s to {MAX_TTL_S:g} s"
            raise invalid_field("ttl", f"{request.ttl_s:g} s", limit, "pin again before it ends")
        key, frames = self._find(store, request.token_ids, request.salt)
        if not frames:
            raise errors.prefix_not_found(len(request.token_ids), self._state.block_size)
        if self._tree.get(key) is None and len(self._tree) >= MAX_PINS:
            self._tree.forget_evicted(store.blocks.frame_of)
        if self._tree.get(key) is None and len(self._tree) >= MAX_PINS:
            raise errors.too_many_pins(len(self._tree), MAX_PINS)
        if request.pinned:
            pinned = store.cached.num_pinned_kept + sum(not store.cached.is_pinned(frame) for frame in frames)
            most = store.num_blocks // PINNED_SHARE
            if pinned > most:
                raise errors.pin_limit(pinned, most, store.num_blocks)
        # Without the evicted ones it has no more than the pool, and so many at most are added.
        if self._tree.num_blocks + len(frames) > self.tree_share * store.num_blocks:
            self._tree.forget_evicted(store.blocks.frame_of)
        retention = Retention(request.priority, request.pinned, now + request.ttl_s)
        self._tree.drop(key)
        self._tree.add(key, [store.blocks.ids[frame] for frame in frames], retention)
        self._settle(store, now)
        self._note_end(key, retention.until)
        return KeptPrefix(len(frames) * self._state.block_size, len(frames), retention.until)

    def unpin(self, token_ids: Sequence[int], salt: bytes, now: float) -> UnpinnedPrefix:
        """End the pin of these token ids; no error if there is none, or nothing of its prefix is found any more.

        Other pins of the same blocks stay. PREFIX_NOT_FOUND if there is no pin and nothing is found.
        """
        store = self._state.cut_store()
        key, frames = self._find(store, token_ids, salt)
        was_kept = self._tree.get(key) is not None
        if not (frames or was_kept):
            raise errors.prefix_not_found(len(token_ids), self._state.block_size)
        self._tree.drop(key)
        self._settle(store, now)
        return UnpinnedPrefix(len(frames) * self._state.block_size, len(frames), was_kept)

    def tick(self, now: float) -> None:
        """End what has lasted its time."""
        ended = False
        while self._ends and self._ends[0][0] <= now:
            until, _, key = heapq.heappop(self._ends)
            retention = self._tree.get(key)
            if retention is not None and retention.until == until:
                self._tree.drop(key)
                ended = True
        if ended:
            self._settle(self._state.cut_store(), now)

    def check(self) -> None:
        """InvariantError unless every block is kept as the pins say."""
        if self._state.store is not None:
            ids = self._state.store.blocks.ids
            self._tree.check((ids[frame], kept) for frame, kept in self._state.store.cached.kept.items())

    def _find(self, store: BlockStore, token_ids: Sequence[int], salt: bytes) -> tuple[bytes, list[int]]:
        """The key of a pin, and the frames of what there is of its prefix; none if there is nothing."""
        # What no pool of this size can hold is not looked at. One token more, so that the last block is found too.
        size = self._state.block_size
        packed = pack_checked(token_ids[: min(store.num_blocks, len(token_ids) // size) * size], salt)
        frames = store.index.match(packed + bytes(TOKEN_BYTES), salt)
        return sha256(len(salt).to_bytes(1, "big") + salt + packed).digest(), frames

    def _settle(self, store: BlockStore, now: float) -> None:
        """Keep blocks as the pins say; the last blocks of a prefix first, as a table's are released."""
        for block_id, retention in self._tree.settle():
            frame = store.blocks.frame_of.get(block_id)
            if frame is not None:
                store.keep(frame, retention, now)
        self._state.version += 1

    def _note_end(self, key: bytes, until: float) -> None:
        heapq.heappush(self._ends, (until, next(self._numbers), key))
        if len(self._ends) > 2 * len(self._tree) + 8:  # mostly of prefixes that were pinned anew
            self._ends = [(kept.until, next(self._numbers), key) for key, kept in self._tree.items()]
            heapq.heapify(self._ends)
