"""What the front is told about the engine itself: phase, load and counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from inferd.core.messages import Counters, EngineState
from inferd.core.ports import PoolInfo
from inferd.core.scheduler import Scheduler

INTERVAL_S = 1.0


@dataclass(slots=True)
class StateReporter:
    """Sends an EngineState at each change of phase, and when asked to, at most once per INTERVAL_S. Not thread-safe."""

    send: Callable[[EngineState], None]
    state: EngineState = EngineState("attaching")  # noqa: RUF009 (frozen)
    changed: bool = False
    sent_at: float = float("-inf")

    def enter(self, phase: str, now: float, detail: str = "", info: PoolInfo | None = None) -> None:
        """A new phase, or the same one for another reason; `info` is the pool from now on, None while there is none."""
        pool = (info.epoch, info.block_size, info.num_blocks) if info else (0, 0, 0)
        epoch, block_size, num_blocks = pool
        self.state = replace(
            self.state, phase=phase, detail=detail, pool_epoch=epoch, block_size=block_size, num_blocks=num_blocks
        )
        self._send(now)

    def note(self, scheduler: Scheduler, counters: Counters) -> None:
        """How things stand, to be sent in due time."""
        was = self.state.waiting, self.state.awaiting_prefix, self.state.running
        load = len(scheduler.waiting), scheduler.prefix_waits.num_resting, len(scheduler.running)
        if (load, counters) != (was, self.state.counters):
            waiting, resting, running = load
            self.state = replace(
                self.state, waiting=waiting, awaiting_prefix=resting, running=running, counters=counters
            )
            self.changed = True

    def send_if_due(self, now: float) -> float | None:
        """Send what has changed if the last message is old enough; else say in how many seconds to try again."""
        if not self.changed:
            return None
        if now - self.sent_at < INTERVAL_S:
            return self.sent_at + INTERVAL_S - now
        self._send(now)
        return None

    def _send(self, now: float) -> None:
        self.changed, self.sent_at = False, now
        self.send(self.state)
