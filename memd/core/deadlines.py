"""What time ends: leases that nobody has renewed, and workers that owe an answer."""

from __future__ import annotations

from memd.core.clients import ClientLeases
from memd.core.state import PoolState
from memd.core.values import LeaseState, LeaseView
from memd.core.workers import WorkerLeases


class Deadlines:
    """The deadlines of all leases."""

    def __init__(self, state: PoolState, clients: ClientLeases, workers: WorkerLeases) -> None:
        self._state = state
        self._clients = clients
        self._workers = workers

    def end_late(self, now: float) -> list[LeaseView]:
        """End the leases that are late, and return them: workers' are LOST now."""
        late = [lease for lease in self._state.leases.values() if lease.is_late(now)]
        for lease in late:
            if lease.is_worker:
                self._workers.lose(lease, lease.why_late(now), now)
            else:
                self._clients.expire(lease, now)
        return [lease.view() for lease in late]

    def next(self) -> float | None:
        """When a lease is late, if nobody renews before; None if none can be."""
        return min((one.due for one in self._state.leases.values() if one.state is not LeaseState.LOST), default=None)
