"""Keeping prefixes cached: priority, pin and time-to-live, as whoever knows the workload sets them.

A pin is no reference: it belongs to no lease, frees nothing and shows nobody anything; it says what eviction spares,
and for how long.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from memd.core import errors
from memd.core.block import TOKEN_BYTES
from memd.core.cached import Retention
from memd.core.state import PoolState, pack_checked
from memd.core.store import BlockStore
from memd.core.values import KeptPrefix, PinRequest
from pagepool.errors import invalid_field

MAX_PRIORITY = 100
MIN_TTL_S, MAX_TTL_S = 1.0, 24 * 3600.0
PINNED_SHARE = 2
"""At most one in so many blocks of the pool may be pinned: the others are for whoever computes."""


class PrefixPins:
    """The commands that keep prefixes, and the passing of their time."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        # A heap of (until, number, block id); old entries mean nothing. Of one prefix its last block has the least
        # number, so that it ends, and may be evicted, first.
        self._ends: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()

    def pin(self, request: PinRequest, now: float) -> KeptPrefix:
        """Keep the longest sealed prefix of the token ids, its last block included; replaces what was said before."""
        store = self._state.cut_store()
        if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
            limit = f"from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            raise invalid_field("priority", request.priority, limit, "0 is what every block has")
        if not MIN_TTL_S <= request.ttl_s <= MAX_TTL_S:
            limit = f"from {MIN_TTL_S:g} s to {MAX_TTL_S:g} s"
            raise invalid_field("ttl", f"{request.ttl_s:g} s", limit, "pin again before it ends")
        frames = self._matched(store, request.token_ids, request.salt)
        if request.pinned:
            pinned = store.cached.num_pinned_kept + sum(not store.cached.is_pinned(frame) for frame in frames)
            most = store.num_blocks // PINNED_SHARE
            if pinned > most:
                raise errors.pin_limit(pinned, most, store.num_blocks)
        retention = Retention(request.priority, request.pinned, now + request.ttl_s)
        for frame in reversed(frames):  # as a table's are released: tails are evicted before heads
            store.keep(frame, retention, now)
        self._note_ends(store, frames, retention.until)
        self._state.version += 1
        return KeptPrefix(len(frames) * self._state.block_size, len(frames), retention.until)

    def unpin(self, token_ids: Sequence[int], salt: bytes, now: float) -> KeptPrefix:
        """End what keeps the longest sealed prefix of the token ids; no error if nothing does."""
        store = self._state.cut_store()
        frames = self._matched(store, token_ids, salt)
        for frame in reversed(frames):
            if frame in store.cached.kept:
                store.keep(frame, None, now)
        self._state.version += 1
        return KeptPrefix(len(frames) * self._state.block_size, len(frames), now)

    def tick(self, now: float) -> None:
        """End what has lasted its time."""
        while self._ends and self._ends[0][0] <= now:
            until, _, block_id = heapq.heappop(self._ends)
            store = self._state.cut_store()
            frame = store.blocks.frame_of.get(block_id)
            retention = None if frame is None else store.cached.kept.get(frame)
            if frame is not None and retention is not None and retention.until == until:
                store.keep(frame, None, now)
                self._state.version += 1

    def _matched(self, store: BlockStore, token_ids: Sequence[int], salt: bytes) -> list[int]:
        # What no pool of this size can hold is not looked at. One token more, so that the last block is found too.
        packed = pack_checked(token_ids[: store.num_blocks * self._state.block_size], salt)
        frames = store.index.match(packed + bytes(TOKEN_BYTES), salt)
        if not frames:
            raise errors.prefix_not_found(len(token_ids), self._state.block_size)
        return frames

    def _note_ends(self, store: BlockStore, frames: Sequence[int], until: float) -> None:
        for frame in reversed(frames):
            heapq.heappush(self._ends, (until, next(self._numbers), store.blocks.ids[frame]))
        if len(self._ends) > 2 * store.num_blocks:  # mostly of prefixes that were pinned anew
            ends = ((kept.until, store.blocks.ids[frame]) for frame, kept in store.cached.kept.items())
            self._ends = [(until, next(self._numbers), block_id) for until, block_id in ends]
            heapq.heapify(self._ends)
