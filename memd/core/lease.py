"""Leases: who holds blocks and tables, and for how long."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from memd.core.recodes import Recode
from memd.core.replay import Answers
from memd.core.table import Table
from memd.core.values import LeaseState, LeaseView

MIN_TTL_S, MAX_TTL_S = 1.0, 3600.0
MAX_NAME_BYTES = 128
MAX_CLIENT_LEASES = 4096
"""Leases of clients at a time: each is looked at whenever time passes, and a client needs but one."""
MAX_KEPT_BYTES = 256 << 20
"""Token ids that a worker's suspended tables may keep: enough for 512 contexts of 128 Ki tokens."""
MAX_TABLES = 16_384
"""Tables of one lease: many more than one holder works with at a time."""


@dataclass(frozen=True, slots=True)
class Remap:
    """News to a worker: block `block_id`, packed as `entry`, replaces `old_block_id` wherever its tables have that.

    At first that is at `index` of table `table_id`. Sequences rise by one with each Remap of a lease, from 1.
    """

    sequence: int
    table_id: int
    index: int
    old_block_id: int
    block_id: int
    entry: int


@dataclass(frozen=True, slots=True)
class Unread:
    """A Remap that a worker has not acknowledged, and the place that it may still read, with the block that is there.

    Where a block itself has moved, what it left behind has another id.
    """

    remap: Remap
    frame: int
    block_id: int


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
    kept_bytes: int = 0  # in its suspended tables
    last_step: int = 0
    answers: Answers = field(default_factory=Answers)
    lost_because: str = ""
    replaying: bool = False  # reclaimed, and no new step yet
    takes_remaps: bool = False
    remaps: deque[Unread] = field(default_factory=deque)
    last_remap: int = 0  # its sequence
    last_told: int = 0  # of the Remaps, on this stream
    ack_deadline: float = float("inf")  # for the first of `remaps`
    is_fenced: bool = False
    takes_recodes: bool = False
    recodes: deque[Recode] = field(default_factory=deque)
    last_recode: int = 0  # its sequence
    last_recode_told: int = 0  # on this stream
    recode_deadline: float = float("inf")  # for the first of `recodes`
    stepped: float = 0.0  # when its last step came, or it attached

    @property
    def is_worker(self) -> bool:
        """Whether it lives by an Attach stream."""
        return bool(self.lock_file)

    @property
    def num_reserved(self) -> int:
        """Blocks that a worker has in reserve."""
        return len(self.references) if self.is_worker else 0

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed and nobody has drawn the consequence yet."""
        return now >= self.due and self.state is not LeaseState.LOST

    @property
    def due(self) -> float:
        """When it is late unless it is heard; without a stream nothing can be acknowledged."""
        if self.state is not LeaseState.LIVE:
            return self.deadline
        return min(self.deadline, self.ack_deadline, self.recode_deadline)

    def why_late(self, now: float) -> str:
        """What it has failed to do."""
        if now >= self.deadline:
            return f"nothing was heard from its worker for {self.ttl_s:g} s"
        if now >= self.ack_deadline:
            waiting = f"Remap {self.remaps[0].remap.sequence} was not acknowledged within --ack-timeout"
        else:
            waiting = f"Recode {self.recodes[0].sequence} was not answered within --ack-timeout"
        return f"{waiting}, so its worker hangs in a step; give memd a longer one if its steps take so long"

    def renew(self, now: float) -> None:
        """Set the deadline to a full time-to-live from now."""
        self.deadline = now + self.ttl_s

    def view(self) -> LeaseView:
        """A snapshot."""
        return LeaseView(
            self.lease_id, self.holder, self.state, self.ttl_s, self.deadline, self.lock_file, self.lost_because
        )
