"""What becomes of moves between the tiers: on the event loop, in their order, and never unheard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from memd.core.errors import InvariantError
from memd.core.recodes import Recode
from memd.core.values import BlockCopy
from memd.moving import Mover


class Sessions:
    def __init__(self) -> None:
        self.published, self.failures = 0, list[Exception]()

    def publish(self) -> None:
        self.published += 1

    def on_failure(self, error: Exception) -> None:
        self.failures.append(error)


class Pool:
    """One with these moves to make, which contradicts itself if it is `broken`."""

    def __init__(self, count: int, *, broken: bool = False) -> None:
        self.unit_bytes, self.broken, self.tiering = 1, broken, self
        self.moves = [Recode(one, 1, [], [], to_units=False) for one in range(count)]
        self.ended: list[tuple[int, bool]] = []

    def take_hurried(self) -> list[BlockCopy]:
        return []

    def take_copies(self) -> list[tuple[Recode, list[BlockCopy]]]:
        taken, self.moves = self.moves, []
        return [(move, [BlockCopy(move.sequence, 0)]) for move in taken]

    def done(self, move: Recode, now: float, *, failed: bool) -> None:
        self.ended.append((move.sequence, failed))
        if self.broken:
            raise InvariantError("a count is wrong")


def run(pool: Any, copier: Any) -> Sessions:
    async def play() -> Sessions:
        sessions: Any = Sessions()
        mover = Mover(pool, copier, lambda: 1.0, sessions)
        mover.begin()
        await mover.close()
        await asyncio.sleep(0)
        return sessions

    return asyncio.run(play())


def test_moves_end_in_their_order_and_a_copy_that_failed_is_said() -> None:
    def copier(copies: Sequence[BlockCopy], unit_bytes: int) -> None:
        if copies and copies[0].source == 1:
            raise InvariantError("no such memory")

    pool = Pool(3)
    sessions = run(pool, copier)
    assert pool.ended == [(0, False), (1, True), (2, False)]
    assert (sessions.published, sessions.failures) == (3, [])


def test_a_pool_that_contradicts_itself_is_told_of() -> None:
    sessions = run(Pool(1, broken=True), lambda copies, unit_bytes: None)
    assert [str(error) for error in sessions.failures] == ["a count is wrong"]
