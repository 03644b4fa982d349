"""Which sequences wait for a prefix that another table, of this worker or another, is computing. Pure."""

from __future__ import annotations


class PrefixWaits:
    """For each request: whether it rests until memd has news, and until when it may wait in all.

    The bound counts from the first refusal. Who has waited so long is asked for without leave to wait, and computes the
    prefix too. `num_waited` counts the requests that have waited since the start, `num_overdue` those of them that have
    waited so long. Those that rested until there was news are `woken` until memd answers them once more.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s, self._now = bound_s, 0.0
        self._until: dict[int, float] = {}
        self._resting: dict[int, None] = {}
        self._woken: set[int] = set()
        self.num_waited = self.num_overdue = 0

    @property
    def num_resting(self) -> int:
        """Requests that wait for a prefix now."""
        return len(self._resting)

    def pass_to(self, now: float) -> None:
        """It is later: those that have waited long enough rest no more."""
        self._now = now
        for request in [each for each in self._resting if self._until[each] <= now]:
            del self._resting[request]
            self.num_overdue += 1

    def may_wait(self, request: int) -> bool:
        """Whether memd may refuse it for the sake of a prefix."""
        return self._bound_s > 0 and (request not in self._until or self._now < self._until[request])

    def rests(self, request: int) -> bool:
        """Whether it is not to be asked for now."""
        return request in self._resting

    def is_woken(self, request: int) -> bool:
        """Whether it has rested, and is to be asked for again because there was news."""
        return request in self._woken

    def answered(self, request: int) -> None:
        """Memd has said something about it."""
        self._woken.discard(request)

    def refused(self, request: int) -> None:
        """Memd wants it to wait: it rests."""
        self.num_waited += request not in self._until
        self._until.setdefault(request, self._now + self._bound_s)
        self._resting[request] = None

    def wake(self) -> None:
        """Memd has news: all may be asked for again."""
        self._woken.update(self._resting)
        self._resting.clear()

    def forget(self, request: int) -> None:
        """It waits no more, for whatever reason."""
        self._until.pop(request, None)
        self._resting.pop(request, None)
        self._woken.discard(request)

    @property
    def next_end(self) -> float | None:
        """When the first of those that rest will have waited long enough; None if none rests."""
        return min((self._until[request] for request in self._resting), default=None)
