"""The pool's facade: every command and query that the service has."""

from __future__ import annotations

from collections.abc import Sequence

from memd.core.geometry import Geometry
from memd.core.values import (
    Attached,
    BlockRun,
    BlockState,
    BlockView,
    Counters,
    LeaseView,
    Step,
    StepOutcome,
    TableRequest,
    TableView,
    Usage,
)


class Pool:
    """All blocks of one model geometry on one device, and who holds them.

    Single writer; not thread-safe. Every command is all or nothing: it returns values or raises PagepoolError with the
    reason that the protos list for it. `now` is seconds on one monotonic clock of the caller.
    """

    def __init__(self, epoch: int, block_size: int, slab_bytes: int, max_num_blocks: int | None = None) -> None: ...

    epoch: int
    block_size: int
    slab_bytes: int
    geometry: Geometry | None
    unit_bytes: int  # 0 until the pool is cut, like the next two
    block_bytes: int
    num_blocks: int
    num_leases: int
    num_tables: int
    available_blocks: int  # free and cached
    version: int  # rises with each change
    counters: Counters

    # -- the memd life and its geometry
    def require_epoch(self, epoch: int) -> None: ...
    def declare(self, geometry: Geometry) -> None: ...

    # -- client leases
    def create_lease(self, holder: str, ttl_s: float, now: float) -> LeaseView: ...
    def renew_lease(self, lease_id: int, now: float) -> LeaseView: ...
    def release_lease(self, lease_id: int, now: float) -> None: ...
    def allocate_blocks(self, lease_id: int, num_blocks: int, now: float) -> BlockRun: ...
    def free_blocks(self, lease_id: int, block_ids: Sequence[int], now: float) -> None: ...
    def share_blocks(self, lease_id: int, block_ids: Sequence[int], now: float) -> None: ...
    def create_table(self, lease_id: int, request: TableRequest, now: float) -> TableView: ...
    def extend_table(self, lease_id: int, table_id: int, num_blocks: int, now: float) -> BlockRun: ...
    def release_table(self, lease_id: int, table_id: int, now: float) -> None: ...

    # -- worker leases
    def attach(
        self, worker_name: str, lock_file: str, timeout_s: float, now: float, reclaim: tuple[int, int] | None = None
    ) -> Attached: ...
    def heartbeat(self, lease_id: int, now: float) -> None: ...  # LEASE_LOST when too late
    def step(self, lease_id: int, step: Step, now: float) -> StepOutcome: ...
    def stream_broken(self, lease_id: int, now: float) -> None: ...  # DETACHED until its deadline
    def detach(self, lease_id: int, now: float) -> None: ...  # in order: releases everything
    def fail_lease(self, lease_id: int, now: float) -> None: ...  # LOST, after a protocol violation
    def process_gone(self, lease_id: int, now: float) -> None: ...  # the lock file is free: releases everything
    def waiting_for_process(self) -> list[tuple[int, str]]: ...  # (lease_id, lock_file) to probe
    def take_capacity_news(self) -> list[tuple[int, int]]: ...  # (worker lease_id, available_blocks) to be told

    # -- time
    def tick(self, now: float) -> list[LeaseView]: ...  # leases that were late: workers' became LOST, clients' ended
    def next_deadline(self) -> float | None: ...  # when tick has something to do

    # -- queries: never change anything; ids that are not there raise *_NOT_FOUND
    def usage(self) -> Usage: ...
    def lease(self, lease_id: int) -> LeaseView: ...
    def block(self, block_id: int, now: float) -> BlockView: ...
    def blocks_after(self, block_id: int, limit: int, state: BlockState | None, now: float) -> list[BlockView]: ...
    def table(self, table_id: int, now: float) -> TableView: ...
    def tables_after(self, table_id: int, limit: int, now: float) -> list[TableView]: ...

    def check(self) -> None: ...  # verifies the whole invariant; raises InvariantError
