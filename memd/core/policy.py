"""Which blocks are compressed without being named by anybody: memd's --fp8, carried out bit by bit.

Blocks are looked at in the order in which they were sealed, some of them at a time, and those whose time has not come
are looked at again later. A worker has one Recode at a time from here, so that none of its steps gets much longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from math import ceil

from memd.core.compression import Compression
from memd.core.fp8 import Fp8, Policy
from memd.core.lease import Lease
from memd.core.state import PoolState
from memd.core.store import BlockStore
from memd.core.table import Table
from memd.core.waiting import Waiting

MAX_LOOKED_AT = 512
"""Blocks, and references to them, that are looked at in one go: a millisecond at most."""


class Verdict(Enum):
    """What is to become of a block."""

    NOW = auto()
    LATER = auto()
    NEVER = auto()


@dataclass(slots=True)
class Need:
    """How many blocks are still to be compressed now: of those that nobody refers to, and of those of tables."""

    cached: int
    running: int


class Compressor:
    """Carries out a policy, if there is one. `run`: whenever time has passed, a worker has answered, or room is new."""

    def __init__(self, state: PoolState, waiting: Waiting, compression: Compression, fp8: Fp8 | None) -> None:
        self._state = state
        self._claims = waiting
        self._compression = compression
        self._is_on = fp8 is not None and fp8.policy is not Policy.MANUAL
        self._fp8 = fp8 or Fp8()
        self._waiting: deque[int] = deque()  # ids of sealed blocks

    def run(self, now: float) -> None:
        """Begin what there is to do, for workers that have nothing to recode."""
        store = self._state.store
        if store is None or not self._is_on:
            return
        if store.sealed is None:
            store.sealed = self._waiting
        store.blocks.thin(self._waiting)
        idle = self._compression.idle_executors() if self._waiting else []
        if not idle:
            return
        for lease, places in self._choose(store, idle, now).items():
            self._compression.begin(store, places, now, to_units=True, lease=lease)

    def _choose(self, store: BlockStore, idle: list[Lease], now: float) -> dict[Lease, list[int]]:
        """What each of these workers is to compress."""
        layout, need = self._state.layout, self._need(store)
        assert layout is not None
        most = max(self._fp8.step_bytes // layout.block_bytes, 1)
        chosen: dict[Lease, list[int]] = {lease: [] for lease in idle}
        room, looks = self._room(store), MAX_LOOKED_AT
        for _ in range(len(self._waiting)):
            if room <= 0 or not need.cached + need.running or all(len(places) >= most for places in chosen.values()):
                break
            if looks <= 0:
                break
            block_id = self._waiting.popleft()
            place = store.blocks.frame_of.get(block_id)
            looks -= 1 if place is None else 1 + len(store.blocks.holders[place])
            if place is None or (verdict := self._look(store, place, need, now)) is Verdict.NEVER:
                continue
            lease = self._compression.executor(store, [place]) if verdict is Verdict.NOW else None
            if lease is None or len(chosen.get(lease, ())) >= (most if lease in chosen else 0):
                self._waiting.append(block_id)
                continue
            chosen[lease].append(place)
            room -= 1
            need.cached -= not store.blocks.holders[place]
            need.running -= bool(store.blocks.holders[place])
        return {lease: places for lease, places in chosen.items() if places}

    def _need(self, store: BlockStore) -> Need:
        """As many as there are, or under pressure as it takes until there is enough room."""
        if self._fp8.policy is not Policy.PRESSURE:
            return Need(len(self._waiting), len(self._waiting))
        per_frame, wanted = store.units.per_frame, (1 - self._fp8.watermark) * store.num_blocks
        wanted += self._claims.claimed_before(None)
        under_way = sum(recode.to_units for recode in self._state.recoding.values())

        def blocks_for(frames: float) -> int:
            """A block that is compressed gives up a frame, and takes a part of one."""
            return max(ceil(frames * per_frame / (per_frame - 1)) - under_way, 0)

        return Need(blocks_for(wanted - store.allocator.num_free), blocks_for(wanted - store.available))

    def _room(self, store: BlockStore) -> int:
        """FP8 blocks that can be made without evicting anything."""
        frames = store.allocator.num_free + len(store.units.kept)
        return store.units.num_holes + frames * store.units.per_frame

    def _look(self, store: BlockStore, place: int, need: Need, now: float) -> Verdict:
        blocks = store.blocks
        if store.units.is_unit(place) or not blocks.prefixes[place] or not blocks.parents[place]:
            return Verdict.NEVER
        if blocks.errors(place) != (0.0, 0.0):  # tried, and over the bound
            return Verdict.NEVER
        if store.units.is_host(place) or self._compression.why_fixed(store, place, to_units=True) is not None:
            return Verdict.LATER  # in the host tier it takes nothing of the device, where it would have to come to
        holders = blocks.references(place)
        tables = [self._state.tables[holder] for holder in holders if holder in self._state.tables]
        if self._is_recent(tables, place):
            return Verdict.LATER
        if self._fp8.policy is Policy.COLD:
            idle = all(now - table.touched >= self._fp8.idle_s for table in tables)
            return Verdict.NOW if idle and len(tables) == len(holders) else Verdict.LATER
        return Verdict.NOW if (need.running if holders else need.cached) > 0 else Verdict.LATER

    def _is_recent(self, tables: Iterable[Table], place: int) -> bool:
        """Whether it is among the newest full blocks of a table."""
        size, recent = self._state.block_size, self._fp8.keep_recent
        full = ((table.frames, table.num_tokens // size) for table in tables)
        return any(place in frames[max(end - recent, 0) : end] for frames, end in full)
