"""Time as leases live by it."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_GAP_S = 1.0


class LivenessClock:
    """Monotonic seconds, without the time in which memd itself did not run.

    memd looks at it at least ten times a second. A longer gap means that memd, or the whole host, was stopped: no
    heartbeat could be read then, so that time counts against nobody.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self._skipped = 0.0

    def __call__(self) -> float:
        """The time now."""
        now = self._monotonic()
        self._skipped += max(now - self._last - MAX_GAP_S, 0.0)
        self._last = now
        return now - self._skipped
