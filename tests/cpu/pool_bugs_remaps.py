"""Bugs in how blocks are merged and moved, which random command sequences must find."""

from __future__ import annotations

import pytest

from memd.core.lease import Lease
from memd.core.remaps import Remaps
from memd.core.state import PoolState


def gives_a_moved_block_away_at_once(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for workers that still read the old block."""

    def start(self: PoolState, lease: Lease, frame: int, now: float) -> None:
        lease.remaps.pop()

    patch.setattr(PoolState, "start_reading", start)


def moves_blocks_of_who_does_not_listen(patch: pytest.MonkeyPatch) -> None:
    """A worker that knows no Remaps finds its table changed."""

    def move(self: Remaps, source: int, target: int, index: int, now: float) -> bool:
        for holder in self._state.cut_store().blocks.holders[source]:
            self._state.leases[self._state.tables[holder].lease_id].takes_remaps = True
        return original(self, source, target, index, now)

    original = Remaps.move
    patch.setattr(Remaps, "move", move)
