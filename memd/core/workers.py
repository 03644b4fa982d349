"""Worker leases: their life.

    attach --> LIVE --stream_broken--> DETACHED --reclaim--> LIVE
                |                          |
                '---- deadline, failure ---+--> LOST --process_gone--> ended, all released
                |                          |
                '-- detach --> ended       '--process_gone--> ended, all released

A lost lease keeps its tables, because a stopped process may wake up and write: what it could write counts as
quarantined, what it had sealed stays matchable, and neither is given to anybody else.
"""

from __future__ import annotations

from memd.core import errors
from memd.core.clients import require_name
from memd.core.lease import Lease
from memd.core.state import PoolState
from memd.core.values import LeaseState
from memd.core.waiting import Waiting
from pagepool.errors import invalid_field


class WorkerLeases:
    """Leases that live by an Attach stream."""

    def __init__(self, state: PoolState, waiting: Waiting) -> None:
        self._state = state
        self._waiting = waiting

    def attach(self, worker_name: str, lock_file: str, timeout_s: float, now: float) -> Lease:
        """A new lease. The pool must have been cut, and no lost lease have this lock file.

        For what that one held comes back when the lock is free, and a worker that goes on with it keeps it locked.
        """
        require_name("hello.worker_name", worker_name)
        if not lock_file:
            raise invalid_field("hello.lock_file", "empty", "the name of a locked file", "create and lock one")
        self._state.cut_store()
        for one in self._state.leases.values():
            if one.lock_file == lock_file and (one.state is LeaseState.LOST or one.is_late(now)):
                raise errors.lock_file_of_lost(lock_file, one.lease_id, one.lost_because or one.why_late(now))
        lease = Lease(self._state.new_id(), worker_name, timeout_s, now + timeout_s, lock_file, stepped=now)
        self._state.leases[lease.lease_id] = lease
        return lease

    def reclaim(self, epoch: int, lease_id: int, lock_file: str, now: float) -> Lease | None:
        """The lease taken up again with all that it holds, or None if it cannot be.

        It must be in time, and of the process that has the same lock file. Step ids continue. Steps whose answers went
        down with the old stream may be sent again, same contents, before the first new one: they are answered as before
        and not applied twice.
        """
        lease = self._state.leases.get(lease_id)
        if lease is None or epoch != self._state.epoch or not lease.is_worker or lease.lock_file != lock_file:
            return None
        if lease.is_late(now):
            self.lose(lease, lease.why_late(now), now)
        if lease.state is LeaseState.LOST:
            return None
        lease.state = LeaseState.LIVE
        lease.replaying = True
        self._waiting.tell_again(lease_id)
        return lease

    def find(self, lease_id: int, now: float) -> Lease:
        """A live worker lease; LEASE_LOST if it is not, or is late just now."""
        lease = self._state.leases.get(lease_id)
        if lease is None or not lease.is_worker:
            raise errors.lease_lost(lease_id, "it has ended, or never was a worker's")
        if lease.is_late(now):
            self.lose(lease, lease.why_late(now), now)
        if lease.state is LeaseState.LOST:
            raise errors.lease_lost(lease_id, lease.lost_because)
        if lease.state is LeaseState.DETACHED:
            raise errors.lease_lost(lease_id, "its stream is broken, and no new Hello has reclaimed it")
        return lease

    def stream_broken(self, lease_id: int) -> None:
        """The stream ended without Detach: the lease can be reclaimed until its deadline."""
        lease = self._state.leases.get(lease_id)
        if lease is not None and lease.is_worker and lease.state is LeaseState.LIVE:
            lease.state = LeaseState.DETACHED

    def lose(self, lease: Lease, why: str, now: float) -> None:
        """Make a lease LOST."""
        self._state.abandon_recodes(lease, f"worker {lease.holder!r} was lost meanwhile: {why}", now)
        lease.state = LeaseState.LOST
        lease.lost_because = why
        lease.answers.clear()
        for table_id in lease.tables:
            self._state.promises.drop(table_id)
        self._waiting.forget(lease.lease_id)
        self._state.counters.lost_leases += 1
        self._state.version += 1

    def fail(self, lease_id: int, now: float) -> None:
        """Make a lease LOST, if it is not yet, because its worker cannot be believed."""
        lease = self._state.leases.get(lease_id)
        if lease is not None and lease.is_worker and lease.state is not LeaseState.LOST:
            self.lose(lease, "it broke the protocol", now)

    def end(self, lease: Lease, now: float) -> None:
        """End a lease whose process has let go of the pool: everything is released."""
        self._waiting.forget(lease.lease_id)
        self._state.end_lease(lease, now)

    def process_gone(self, lease_id: int, now: float) -> None:
        """The lock file was found free. Ignored if the lease has ended or was reclaimed since it was probed."""
        lease = self._state.leases.get(lease_id)
        if lease is None or not lease.is_worker or lease.state is LeaseState.LIVE:
            return
        if lease.state is LeaseState.DETACHED:
            self.lose(lease, "its process ended", now)
        self.end(lease, now)

    def waiting(self) -> list[tuple[int, str]]:
        """Leases whose process may be gone, and the lock files that tell."""
        leases = self._state.leases.values()
        return [(one.lease_id, one.lock_file) for one in leases if one.is_worker and one.state is not LeaseState.LIVE]

    def tick(self, now: float) -> None:
        """Wake those who wait for prefixes that nobody works on any more."""
        self._state.promises.tick(lambda table_id: self._state.keeps_up(table_id, now))
