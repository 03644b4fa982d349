"""Bytes on their way between the tiers: copied off the event loop, and made true one move after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from memd.copying import Copier
from memd.core.errors import InvariantError
from memd.core.pool import Pool
from memd.core.recodes import Recode
from memd.core.values import BlockCopy
from memd.sessions import Sessions

_log = structlog.get_logger("memd.moving")


class Mover:
    """Carries out what the pool's tiering begins. Everything here but the copying runs on the event loop.

    `sessions` are told when something has moved, and at once of an error that memd cannot go on with. A copy that fails
    leaves the blocks where they were, and is logged.
    """

    def __init__(self, pool: Pool, copier: Copier, clock: Callable[[], float], sessions: Sessions) -> None:
        self._pool = pool
        self._copier = copier
        self._clock = clock
        self._sessions = sessions
        self._moving: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Copy what is in a hurry, and start with the rest."""
        self._copier(self._pool.tiering.take_hurried(), self._pool.unit_bytes)
        if self._is_closed:
            return
        for move, copies in self._pool.tiering.take_copies():
            task = self._last = asyncio.get_running_loop().create_task(self._move(move, copies, self._last))
            self._moving.add(task)
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Wait for what is being copied: the memory must not go away under it."""
        self._is_closed = True
        if self._moving:
            await asyncio.wait(self._moving)

    async def _move(self, move: Recode, copies: Sequence[BlockCopy], before: asyncio.Task[None] | None) -> None:
        """One move; over when the one before it is."""
        failed = False
        try:
            await asyncio.to_thread(self._copier, copies, self._pool.unit_bytes)
        except InvariantError:
            _log.exception("blocks were not moved between the tiers, and stay where they are", blocks=len(copies))
            failed = True
        if before is not None:
            await asyncio.wait([before])
        self._pool.tiering.done(move, self._clock(), failed=failed)
        self._sessions.publish()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody awaits a move: what it fails with is told here, or a pool that contradicts itself would go on."""
        self._moving.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._sessions.on_failure(error)
