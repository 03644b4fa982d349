"""Leases: who holds blocks and tables, and for how long."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from memd.core.table import Table
from memd.core.values import LeaseState, LeaseView, StepOutcome

MIN_TTL_S, MAX_TTL_S = 1.0, 3600.0
MAX_NAME_BYTES = 128
MAX_KEPT_BYTES = 256 << 20
"""Token ids that a worker's suspended tables may keep: enough for 512 contexts of 128 Ki tokens."""
MAX_TABLES = 16_384
"""Tables of one lease: many more than one holder works with at a time."""
MAX_REPLAYED_STEPS = 1024
"""Answers kept per worker lease, for a worker that lost them with its stream: more than any keeps in flight."""


@dataclass(slots=True, eq=False)
class Lease:
    """A client's lease, or with a `lock_file` a worker's."""

    lease_id: int
    holder: str
    ttl_s: float
    deadline: float
    lock_file: str = ""
    state: LeaseState = LeaseState.LIVE
    tables: dict[int, Table] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)  # frame: references held directly; a worker's reserve
    reserved_ids: set[int] = field(default_factory=set)  # of tables to come: a worker's
    # By table: the frame of a sealed block that the worker has yet to copy into it; one reference of the lease.
    copy_sources: dict[int, int] = field(default_factory=dict)
    last_step: int = 0
    answers: deque[StepOutcome] = field(default_factory=lambda: deque(maxlen=MAX_REPLAYED_STEPS))
    lost_because: str = ""
    replaying: bool = False  # reclaimed, and no new step yet

    @property
    def is_worker(self) -> bool:
        """Whether it lives by an Attach stream."""
        return bool(self.lock_file)

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed and nobody has drawn the consequence yet."""
        return now >= self.deadline and self.state is not LeaseState.LOST

    def renew(self, now: float) -> None:
        """Set the deadline to a full time-to-live from now."""
        self.deadline = now + self.ttl_s

    def view(self) -> LeaseView:
        """A snapshot."""
        return LeaseView(self.lease_id, self.holder, self.state, self.ttl_s, self.deadline, self.lock_file)
