"""How fast the queue moves, for those who have to come back later. Pure."""

from __future__ import annotations

from collections import deque

SPAN = 16
"""Requests whose ends are looked back at."""

UNKNOWN_S = 1.0
"""The answer where too few requests have ended to tell."""

MIN_S, MAX_S = 0.1, 60.0


class QueuePace:
    """When a place in a full queue comes free, from when the last requests left. Times are seconds of one clock.

    Those who were turned away are told to come one after the other: the first when one place should have come free, the
    second when two should.
    """

    def __init__(self) -> None:
        self._left: deque[float] = deque(maxlen=SPAN)
        self._turned_away = 0

    def left(self, now: float) -> None:
        """A request is over, or has been cancelled: there is a place more."""
        self._left.append(now)
        self._turned_away = max(self._turned_away - 1, 0)

    def retry_after_s(self, now: float) -> float:
        """A request is turned away; in how many seconds it should come back."""
        self._turned_away += 1
        return min(max(self._turned_away * self._interval_s(now), MIN_S), MAX_S)

    def _interval_s(self, now: float) -> float:
        """Mean time between two ends. One that is overdue counts as if it came now."""
        if len(self._left) < 2:
            return UNKNOWN_S
        first, last, count = self._left[0], self._left[-1], len(self._left)
        return max((last - first) / (count - 1), (now - first) / count)
