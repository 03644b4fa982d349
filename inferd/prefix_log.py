"""The log's word about requests that wait for prefixes which others compute."""

from __future__ import annotations

import structlog

from inferd.core.prefix_waits import PrefixWaits

INTERVAL_S = 1.0
"""The least time between two lines: a burst of requests is one event."""

log = structlog.get_logger(__name__)


class PrefixWaitLog:
    """Tells what is new of the waits, at most once an interval. Not thread-safe."""

    def __init__(self) -> None:
        self._waited = self._overdue = 0
        self._next_at = float("-inf")

    def note(self, waits: PrefixWaits, now: float) -> None:
        """How the waits stand."""
        began, overdue = waits.num_waited - self._waited, waits.num_overdue - self._overdue
        if not (began or overdue) or now < self._next_at:
            return
        self._waited, self._overdue, self._next_at = waits.num_waited, waits.num_overdue, now + INTERVAL_S
        if began:
            log.info("requests wait for a prefix that another one computes", more=began, waiting=waits.num_resting)
        if overdue:
            log.warning("a prefix did not come within --prefix-wait and is computed once more", requests=overdue)
