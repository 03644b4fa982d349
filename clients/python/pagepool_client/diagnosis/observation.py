"""What a pool and its workers were like at one moment: plain values, which `pagepool_client.cli.reading` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagepool.durations import to_seconds
from pagepool.inferd.v1.generation_service_pb2 import GetModelResponse
from pagepool.memd.v1.types_pb2 import BLOCK_STATE_HELD, BLOCK_STATE_QUARANTINED, Block, BlockTable, Pool
from pagepool_client.diagnosis.formats import is_fp8, places_of
from pagepool_client.diagnosis.tiers import is_below
from pagepool_client.diagnosis.words import span


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says of itself; `model` is None if it could not say it, and `trouble` tells why.

    `asked_for` is False for a worker that was only looked for at the default place.
    """

    target: str
    model: GetModelResponse | None = None
    trouble: str = ""
    asked_for: bool = True


@dataclass(frozen=True, slots=True)
class Observation:
    """A pool with its blocks, tables and workers, read one after the other at Unix time `at_s`.

    `earlier` are states of the same memd life that were watched before it for `watched_s` seconds, oldest first.
    With them, counters are those of that time; without, those since memd's start.
    """

    pool: Pool
    blocks: Sequence[Block] = ()
    tables: Sequence[BlockTable] = ()
    workers: Sequence[WorkerReport] = ()
    at_s: float = 0.0
    earlier: Sequence[Pool] = ()
    watched_s: float = 0.0
    target: str = ""
    """Where the memd was asked."""

    @property
    def tables_with_blocks(self) -> Sequence[BlockTable]:
        """Those that are not suspended."""
        return [table for table in self.tables if not table.suspended]

    @property
    def uptime_s(self) -> float:
        """How long this memd has run."""
        return max(0.0, self.at_s - to_seconds(self.pool.start_time))

    def counted(self, name: str) -> int:
        """How far a counter of PoolCounters rose in the time that counts."""
        before: int = getattr(self.earlier[0].counters, name) if self.earlier else 0
        now: int = getattr(self.pool.counters, name)
        return now - before

    @property
    def time_that_counts(self) -> str:
        """Which time `counted` is about, for people."""
        return (
            f"in the last {span(self.watched_s)}" if self.earlier else f"since memd's start {span(self.uptime_s)} ago"
        )

    @property
    def moved(self) -> int:
        """Quarantined places that wait for no process to end, only for the step of a worker that reads them still.

        Those of the host tier are none of these. A split place is not quarantined while somebody refers to one of its
        FP8 blocks.
        """
        here = [block for block in self.blocks if not is_below(block)]
        read = [block for block in here if block.sealed and block.state == BLOCK_STATE_QUARANTINED]
        if not any(is_fp8(block.entry) for block in read):
            return len(read)
        places = places_of(self.pool)
        held = {places.of(block.entry) for block in here if block.state == BLOCK_STATE_HELD}
        return len({places.of(block.entry) for block in read} - held)

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks, or for their worker, at all workers that answered."""
        return sum(worker.model.waiting_requests for worker in self.workers if worker.model) - self.awaiting_prefix

    @property
    def awaiting_prefix(self) -> int:
        """Requests that wait for a prefix that another one is computing: that is no want of blocks."""
        return sum(worker.model.prefix_waiting_requests for worker in self.workers if worker.model)

    @property
    def running(self) -> int:
        """Requests that run, at all workers that answered."""
        return sum(worker.model.running_requests for worker in self.workers if worker.model)
