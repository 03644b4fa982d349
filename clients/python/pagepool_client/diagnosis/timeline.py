"""A pool over time: observations one after the other become frames with rates and a history. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagepool.inferd.v1.generation_service_pb2 import GetModelResponse
from pagepool.memd.v1.types_pb2 import BlockTable, Pool
from pagepool_client.diagnosis.observation import Observation

HISTORY = 200
"""Readings that are remembered: more than a terminal has columns."""


@dataclass(frozen=True, slots=True)
class TableUse:
    """What block tables say about blocks, without a look at the blocks themselves."""

    distinct: int
    """Blocks in at least one table."""
    shared: int
    """Of those, full ones in several tables."""
    filling: int
    """Of those, written in part."""
    reserved: int
    """Of those, without a token yet."""
    tokens: int
    """Tokens in them, those in shared blocks counted once."""
    saved: int
    """Blocks that the tables would need in addition if they shared none."""
    own: Mapping[int, int]
    """By table id: blocks that are in no other table."""


def table_use(tables: Sequence[BlockTable], block_size: int) -> TableUse:
    """How tables of a pool with this block size use blocks."""
    stored, times = dict[int, int](), dict[int, int]()
    for table in tables:
        for index, block_id in enumerate(table.block_ids):
            tokens = min(max(table.num_tokens - index * block_size, 0), block_size)
            stored[block_id] = max(stored.get(block_id, 0), tokens)
            times[block_id] = times.get(block_id, 0) + 1
    return TableUse(
        distinct=len(stored),
        shared=sum(times[one] > 1 for one, tokens in stored.items() if tokens == block_size),
        filling=sum(0 < tokens < block_size for tokens in stored.values()),
        reserved=sum(not tokens for tokens in stored.values()),
        tokens=sum(stored.values()),
        saved=sum(times.values()) - len(times),
        own={table.table_id: sum(times[one] == 1 for one in table.block_ids) for table in tables},
    )


def kinds_of_blocks(pool: Pool, use: TableUse) -> dict[str, int]:
    """All blocks of a pool by the kinds that the block map draws. They add up to the whole pool.

    Reserved are those that tables or workers have and that are not written to yet.
    Quarantined blocks are the unsealed ones of lost workers' tables, which are still listed.
    """
    usage = pool.usage
    # Tables and pool are read one after the other, so that the sums may miss each other by what happened in between.
    unsealed = max(use.filling + use.reserved - usage.quarantined_blocks, 0)
    filling = min(use.filling, unsealed, usage.held_blocks)
    reserved = min(unsealed - filling + usage.reserve_blocks, usage.held_blocks - filling)
    shared = min(use.shared, usage.held_blocks - filling - reserved)
    return {
        "shared": shared,
        "held": usage.held_blocks - shared - filling - reserved,
        "filling": filling,
        "reserved": reserved,
        "cached": usage.cached_blocks,
        "quarantined": usage.quarantined_blocks,
        "free": usage.free_blocks,
    }


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """What a worker did between two readings."""

    generated_per_s: float
    prefill_per_s: float
    step_s: float | None
    """Mean time of a step; None if there was none."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of a pool: an observation, and what became of the one before it."""

    seen: Observation
    use: TableUse
    elapsed_s: float | None = None
    """Since the reading before; None for the first one of a memd life: there are no rates then."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """How far each counter of PoolCounters rose in that time, or since memd's start."""
    workers: Mapping[str, WorkerRates] = field(default_factory=dict)
    """By target, for workers that answered both times and have not been restarted in between."""
    history: Sequence[float] = ()
    """The share of the pool that was held, reading by reading, oldest first."""


class Timeline:
    """Makes frames of observations, in the order of their times. Not thread-safe."""

    def __init__(self) -> None:
        self._before: Observation | None = None
        self._history: deque[float] = deque(maxlen=HISTORY)

    def frame(self, seen: Observation) -> Frame:
        """The frame of the next observation."""
        before, self._before = self._before, seen
        if before is not None and (before.pool.epoch != seen.pool.epoch or seen.at_s <= before.at_s):
            before = None
        usage = seen.pool.usage
        self._history.append(usage.held_blocks / usage.total_blocks if usage.total_blocks else 0.0)
        use = table_use(seen.tables, seen.pool.block_size)
        names = seen.pool.counters.DESCRIPTOR.fields_by_name
        now = {name: getattr(seen.pool.counters, name) for name in names}
        if before is None:
            return Frame(seen, use, counted=now, history=tuple(self._history))
        elapsed = seen.at_s - before.at_s
        rose = {name: now[name] - getattr(before.pool.counters, name) for name in names}
        earlier = {worker.target: worker.model for worker in before.workers if worker.model}
        workers = {
            worker.target: worker_rates(earlier[worker.target], worker.model, elapsed)
            for worker in seen.workers
            if worker.model and worker.target in earlier and not _restarted(earlier[worker.target], worker.model)
        }
        return Frame(seen, use, elapsed, rose, workers, tuple(self._history))


def worker_rates(before: GetModelResponse, now: GetModelResponse, elapsed_s: float) -> WorkerRates:
    """What a worker did in a time above 0."""
    was, is_now = before.counters, now.counters
    steps = is_now.steps - was.steps
    stepped_s = (is_now.step_time.ToNanoseconds() - was.step_time.ToNanoseconds()) / 1e9
    return WorkerRates(
        generated_per_s=(is_now.generated_tokens - was.generated_tokens) / elapsed_s,
        prefill_per_s=(is_now.prefill_tokens - was.prefill_tokens) / elapsed_s,
        step_s=stepped_s / steps if steps else None,
    )


def _restarted(before: GetModelResponse, now: GetModelResponse) -> bool:
    return now.counters.steps < before.counters.steps
