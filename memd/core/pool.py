"""The pool's facade: every command and query that the service has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from memd.core import check, errors, views
from memd.core.accounts import Counters, Usage
from memd.core.admission import Admission
from memd.core.clients import ClientLeases
from memd.core.compression import Compression
from memd.core.deadlines import Deadlines
from memd.core.extent import DEVICE_ONLY, PoolMemory, Tiers
from memd.core.geometry import Geometry, require_device, require_equal
from memd.core.pins import PrefixPins
from memd.core.policy import Compressor
from memd.core.remaps import Remaps
from memd.core.sharing import Sharing
from memd.core.state import PoolState
from memd.core.stepping import Stepper
from memd.core.tiering import Tiering
from memd.core.values import (
    Attached,
    BlockRun,
    BlockState,
    BlockView,
    LeaseView,
    Step,
    StepOutcome,
    TableRequest,
    TableView,
)
from memd.core.victims import Victims
from memd.core.waiting import Waiting
from memd.core.workers import WorkerLeases
from pagekernels.layout import LAYOUT_LINEAR

T = TypeVar("T")


class Pool:
    """All blocks of one model geometry on one device, and who holds them.

    Single writer; not thread-safe. Every command is all or nothing: it returns values, or raises PagepoolError with a
    reason that the protos list for it and changes nothing but counters and what time has ended. `now` is seconds on one
    monotonic clock of the caller. Ids rise and are never used twice; leases and tables share one sequence of ids.
    Allocation takes blocks never used, then the one freed longest ago, then evicts the cached one released longest ago,
    by priority. `layout_version` is the byte order of the slab's memory. InvariantError means a bug: stop the daemon.
    """

    def __init__(
        self,
        epoch: int,
        block_size: int,
        slab_bytes: int,
        max_num_blocks: int | None = None,
        layout_version: int = LAYOUT_LINEAR,
        *,
        tiers: Tiers = DEVICE_ONLY,
    ) -> None:
        self.memory = PoolMemory(slab_bytes, max_num_blocks, tiers)
        self.layout_version = layout_version
        self._state = PoolState(epoch, block_size)
        self.waiting = Waiting(self._state)
        self.victims = Victims(self._state)
        self._clients = ClientLeases(self._state, self.waiting)
        self.sharing = Sharing(self._state, self._clients)
        self.prefixes = PrefixPins(self._state)
        self._workers = WorkerLeases(self._state, self.waiting)
        self.deadlines = Deadlines(self._state, self._clients, self._workers)
        self.remaps = Remaps(self._state)
        self.compression = Compression(self._state, self._clients, self.remaps, is_on=tiers.fp8 is not None)
        self.compressor = Compressor(self._state, self.waiting, self.compression, tiers.fp8)
        self.tiering = Tiering(self._state, self.compression)
        admission = Admission(self._state, self.waiting, self.victims)
        self._stepper = Stepper(self._state, admission, self.remaps, self.compression)

    # -- what it is

    @property
    def epoch(self) -> int:
        """The random number of this memd life."""
        return self._state.epoch

    @property
    def block_size(self) -> int:
        """Token positions in a block."""
        return self._state.block_size

    @property
    def geometry(self) -> Geometry | None:
        """What the pool was cut for; None until it is."""
        return self._state.geometry

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit; 0 until the pool is cut."""
        return self._state.layout.unit_bytes if self._state.layout else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the native format; 0 until the pool is cut."""
        return self._state.layout.block_bytes if self._state.layout else 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the native format in the whole pool; 0 until it is cut."""
        return self._state.num_blocks

    @property
    def num_leases(self) -> int:
        """Leases that are not lost."""
        return self._state.num_leases

    @property
    def num_tables(self) -> int:
        """Block tables, those of lost leases included."""
        return len(self._state.tables)

    @property
    def counters(self) -> Counters:
        """What has happened; not to be changed by the caller."""
        return self._state.counters

    @property
    def version(self) -> int:
        """Rises with each change that a query could show, times and deadlines apart."""
        return self._state.version

    def require_epoch(self, epoch: int) -> None:
        """EPOCH_MISMATCH unless an id with this epoch is of this memd life."""
        if epoch != self.epoch:
            raise errors.epoch_mismatch(epoch, self.epoch)

    def declare(self, geometry: Geometry) -> None:
        """Cut the pool for this geometry, or be content if it is cut for the same; GEOMETRY_MISMATCH else.

        DEVICE_MISMATCH if it has the byte order of other memory than the slab is.
        """
        require_device(self.layout_version, geometry)
        if self._state.geometry is not None:
            require_equal(self._state.geometry, geometry)
        else:
            self._state.cut(geometry, self.memory)

    # -- client leases

    def create_lease(self, holder: str, ttl_s: float, now: float) -> LeaseView:
        """A lease; between 1 second and 1 hour of the time-to-live asked for are granted."""
        return self._changed(self._clients.create(holder, ttl_s, now).view())

    def renew_lease(self, lease_id: int, now: float) -> LeaseView:
        """Extend a lease by its time-to-live from now."""
        lease = self._clients.find(lease_id, now)
        lease.renew(now)
        return lease.view()

    def release_lease(self, lease_id: int, now: float) -> None:
        """End a lease and release what it holds; no error if it has ended already."""
        self._clients.release(lease_id, now)
        self._state.version += 1

    def allocate_blocks(self, lease_id: int, num_blocks: int, now: float) -> BlockRun:
        """New unsealed blocks, each with one reference of the lease."""
        return self._changed(self._clients.allocate(lease_id, num_blocks, now))

    def free_blocks(self, lease_id: int, block_ids: Sequence[int], now: float) -> None:
        """Drop one direct reference of the lease for each listed id."""
        self._clients.free(lease_id, block_ids, now)
        self._state.version += 1

    def share_blocks(self, lease_id: int, block_ids: Sequence[int], now: float) -> None:
        """Add one direct reference of the lease for each listed id."""
        self._clients.share(lease_id, block_ids, now)
        self._state.version += 1

    def create_table(self, lease_id: int, request: TableRequest, now: float) -> TableView:
        """Match the longest sealed prefix, pin it, add blocks up to num_blocks, create the table."""
        table = self._clients.create_table(lease_id, request, now)
        return self._changed(views.table_view(self._state, table, now))

    def extend_table(self, lease_id: int, table_id: int, num_blocks: int, now: float) -> BlockRun:
        """New blocks at the end of a table of the lease."""
        return self._changed(self._clients.extend_table(lease_id, table_id, num_blocks, now))

    def release_table(self, lease_id: int, table_id: int, now: float) -> None:
        """End a table: its sealed blocks stay cached unless somebody else holds them, the rest is free."""
        self._clients.release_table(lease_id, table_id, now)
        self._state.version += 1

    # -- worker leases

    def attach(
        self, worker_name: str, lock_file: str, timeout_s: float, now: float, reclaim: tuple[int, int] | None = None
    ) -> Attached:
        """A worker's lease: the one of `reclaim` (epoch, lease id) if that can be, else a new one.

        A lease can be reclaimed until its deadline, by the process with the same lock file. Its step ids continue.
        """
        lease = self._workers.reclaim(*reclaim, lock_file, now) if reclaim else None
        reclaimed = lease is not None
        if lease is None:
            lease = self._workers.attach(worker_name, lock_file, timeout_s, now)
        lease.ttl_s = timeout_s
        lease.renew(now)
        self.victims.tell_again(lease.tables.values())
        return self._changed(Attached(lease.view(), reclaimed))

    def heartbeat(self, lease_id: int, now: float) -> None:
        """Renew a worker's lease; LEASE_LOST if it is too late."""
        self._workers.find(lease_id, now).renew(now)

    def step(self, lease_id: int, step: Step, now: float) -> StepOutcome:
        """Apply a batch and renew the lease. After a PROTOCOL_VIOLATION call `fail_lease`; nothing was applied."""
        lease = self._workers.find(lease_id, now)
        lease.renew(now)
        num_unread, outcome = len(lease.remaps), self._stepper.apply(lease, step, now)
        if step.recodings or len(lease.remaps) < num_unread:
            self.compressor.run(now)
        self.tiering.run(now)
        if lease.replaying:
            self.victims.tell_granted_again(lease, outcome.grants)
        return self._changed(outcome)

    def stream_broken(self, lease_id: int) -> None:
        """The worker's stream ended without Detach: DETACHED until its deadline, then LOST. Ignored if it has ended."""
        self._workers.stream_broken(lease_id)
        self._state.version += 1

    def detach(self, lease_id: int, now: float) -> None:
        """The worker has closed its mapping: release all that its lease holds."""
        self._workers.end(self._workers.find(lease_id, now), now)
        self._state.version += 1

    def fail_lease(self, lease_id: int, now: float) -> None:
        """Make a worker's lease LOST because it broke the protocol. Ignored if it has ended."""
        self._workers.fail(lease_id, now)

    def process_gone(self, lease_id: int, now: float) -> None:
        """The lock of a DETACHED or LOST lease was found free: release all that it holds. Ignored if it is LIVE."""
        self._workers.process_gone(lease_id, now)
        self._state.version += 1

    def waiting_for_process(self) -> list[tuple[int, str]]:
        """(lease id, lock file) of the workers whose process may be gone: probe these."""
        return self._workers.waiting()

    # -- time

    def tick(self, now: float) -> list[LeaseView]:
        """End leases, pins, claims and waits whose time is over. Of the leases, returned, workers' are LOST now."""
        self.prefixes.tick(now)
        self._workers.tick(now)
        self.waiting.expire(now)
        self.compressor.run(now)
        self.tiering.run(now)
        return self.deadlines.end_late(now)

    # -- queries: never change anything

    def usage(self) -> Usage:
        """Blocks by what they are doing."""
        return views.usage(self._state)

    def lease(self, lease_id: int) -> LeaseView:
        """A lease, a worker's too; LEASE_NOT_FOUND if it has ended."""
        return views.lease(self._state, lease_id)

    def block(self, block_id: int, now: float) -> BlockView:
        """A block; BLOCK_NOT_FOUND if it was freed or evicted."""
        return views.block(self._state, block_id, now)

    def block_id_after(self, block_id: int, count: int) -> int:
        """A greater id, with at most `count` blocks up to it; 0 if there is no block with a greater one."""
        return views.block_id_after(self._state, block_id, count)

    def blocks_between(self, after: int, last: int, state: BlockState | None, now: float) -> list[BlockView]:
        """Blocks with ids greater than one, up to another, by rising id; only those in `state`, if it is given."""
        return views.blocks_between(self._state, after, last, state, now)

    def table(self, table_id: int, now: float) -> TableView:
        """A table with its token ids; TABLE_NOT_FOUND if it was released."""
        return views.table(self._state, table_id, now)

    def tables_after(self, table_id: int, limit: int, now: float) -> Iterator[TableView]:
        """Up to `limit` tables with greater ids, by rising id, without token ids; each as it is when it is reached."""
        return views.tables_after(self._state, table_id, limit, now)

    def check(self) -> None:
        """Verify the invariant that memd.core.check states; raises InvariantError."""
        check.check(self._state, self.waiting)
        self.prefixes.check()

    def _changed(self, result: T) -> T:
        self._state.version += 1
        return result
