"""A pool over time: observations one after the other become frames with rates and a history. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagepool.inferd.v1.generation_service_pb2 import GetModelResponse
from pagepool.memd.v1.types_pb2 import BlockTable, Pool
from pagepool_client.diagnosis.formats import Places, apart, places_of
from pagepool_client.diagnosis.observation import Observation

HISTORY = 200
"""Readings that are remembered: more than a terminal has columns."""


@dataclass(frozen=True, slots=True)
class TableUse:
    """What block tables say about blocks, without a look at the blocks themselves."""

    distinct: int
    """Blocks in at least one table."""
    below: int
    """Of those, blocks in the host tier."""
    shared: int
    """Of those, full ones of the device in several tables, FP8 blocks left out."""
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
    places: int
    """Places of the device that hold those in tables: several FP8 blocks may be in one."""
    split: int
    """Of those, places with FP8 blocks."""
    taken: Mapping[int, float]
    """By table id: places of the device that its blocks take, an FP8 block a part of one."""


def table_use(tables: Sequence[BlockTable], block_size: int, places: Places | None = None) -> TableUse:
    """How tables of a pool with this block size use blocks.

    `places` are the device's where blocks may be FP8 blocks or in the host tier; without, nobody looks for any.
    """
    stored, times = dict[int, int](), dict[int, int]()
    fp8, below = apart(tables, places) if places else ({}, set[int]())
    split, less = len(set(fp8.values())), 1 - 1 / places.units if places else 0.0
    special = below.union(fp8)
    for table in tables:
        for index, block_id in enumerate(table.block_ids):
            tokens = min(max(table.num_tokens - index * block_size, 0), block_size)
            stored[block_id] = max(stored.get(block_id, 0), tokens)
            times[block_id] = times.get(block_id, 0) + 1
    return TableUse(
        distinct=len(stored),
        below=len(below),
        shared=sum(times[one] > 1 for one, tokens in stored.items() if tokens == block_size and one not in special),
        filling=sum(0 < tokens < block_size for tokens in stored.values()),
        reserved=sum(not tokens for tokens in stored.values()),
        tokens=sum(stored.values()),
        saved=sum(times.values()) - len(times),
        own={table.table_id: sum(times[one] == 1 for one in table.block_ids) for table in tables},
        places=len(stored) - len(special) + split,
        split=split,
        taken={
            table.table_id: len(table.block_ids)
            - sum(less if one in fp8 else one in below for one in table.block_ids if one in special)
            for table in tables
        },
    )


def kinds_of_blocks(pool: Pool, use: TableUse) -> dict[str, int]:
    """All places of a pool's device by the kinds of blocks that the block map draws. They add up to the whole pool.

    Reserved are those that tables or workers have and that are not written to yet.
    Quarantined blocks are the unsealed ones of lost workers' tables, which are still listed, unless none was ever lost.
    Split places of no table count as cached as far as so many are, for tables do not say what leases have beside them;
    the rest are those that workers are filling.
    """
    usage = pool.usage
    # Tables and pool are read one after the other, so that the sums may miss each other by what happened in between.
    lost = usage.quarantined_blocks if pool.counters.lost_leases else 0
    unsealed = max(use.filling + use.reserved - lost, 0)
    filling = min(use.filling, unsealed, usage.held_blocks)
    reserved = min(unsealed - filling + usage.reserve_blocks, usage.held_blocks - filling)
    split = min(use.split, usage.split_blocks, usage.held_blocks - filling - reserved)
    shared = min(use.shared, usage.held_blocks - filling - reserved - split)
    split_cached = min(usage.split_blocks - split, usage.cached_blocks)
    held = usage.held_blocks - shared - split - filling - reserved
    being_filled = min(usage.split_blocks - split - split_cached, held)
    return {
        "shared": shared,
        "held": held - being_filled,
        "FP8 held": split + being_filled,
        "filling": filling,
        "reserved": reserved,
        "cached": usage.cached_blocks - split_cached,
        "FP8 cached": split_cached,
        "quarantined": usage.quarantined_blocks,
        "kept back": usage.kept_blocks,
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
        places = places_of(seen.pool) if usage.fp8_blocks or usage.host_blocks else None
        use = table_use(seen.tables, seen.pool.block_size, places)
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
