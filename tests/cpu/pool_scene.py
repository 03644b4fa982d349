"""Pools as plain values, made block by block and table by table, for the tests of `doctor` and `top`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pagekernels.layout import Format, pack_entry, unpack_entry
from pagepool.inferd.v1.generation_service_pb2 import GetModelResponse
from pagepool.memd.v1.types_pb2 import (
    BLOCK_STATE_CACHED,
    BLOCK_STATE_HELD,
    TIER_HOST,
    Block,
    BlockHolder,
    BlockTable,
    Pool,
    PoolUsage,
)
from pagepool_client.diagnosis.observation import Observation, WorkerReport

EPOCH, NOW_S = 7, 100_000.0
KIB = 1 << 10
WORKER = 50
"""The lease of worker "w"; all others are clients'."""


def holder_of(lease: int, table: int) -> BlockHolder:
    return BlockHolder(lease_id=lease, table_id=table, ref_count=1, worker=lease == WORKER)


@dataclass
class Scene:
    """A pool in the making. Blocks of bf16, 1 KiB a token unless `native` and `token_bytes` say otherwise.

    `host` are the places of its host tier.
    """

    total: int = 100
    block_size: int = 16
    token_bytes: int = KIB
    slab_blocks: int = 0
    native: Format = Format.BF16
    kept: int = 0
    host: int = 0
    blocks: list[Block] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    workers: list[WorkerReport] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    uptime_s: float = 7200.0

    def block(self, state: int, num_tokens: int, holders: Sequence[tuple[int, int]] = (), idle_s: float = 0.0) -> Block:
        place = len(self.blocks)
        made = Block(
            block_id=1000 + place,
            state=state,  # type: ignore[arg-type]
            entry=pack_entry(self.native, 0, self.native.itemsize * place),
            num_tokens=num_tokens,
            sealed=num_tokens == self.block_size,
            holders=[holder_of(*holder) for holder in holders],
            ref_count=len(holders),
        )
        made.idle_time.FromMilliseconds(int(idle_s * 1000))
        self.blocks.append(made)
        return made

    def table(
        self, tokens: int, blocks: int = 0, shared: Sequence[Block] = (), idle_s: float = 0.0, lease: int = WORKER
    ) -> BlockTable:
        """A table with so many tokens, in `shared` full blocks and blocks of its own, `blocks` in all.

        It is worker "w"'s, or a client's if another lease is given.
        """
        table = BlockTable(table_id=len(self.tables) + 1, lease_id=lease, num_tokens=tokens)
        table.holder = "w" if lease == WORKER else "client"
        table.idle_time.FromMilliseconds(int(idle_s * 1000))
        for one in shared:
            one.holders.append(holder_of(lease, table.table_id))
        left = tokens - len(shared) * self.block_size
        count = max(blocks - len(shared), -(-left // self.block_size))
        own = []
        for _ in range(count):
            stored = min(max(left, 0), self.block_size)
            own.append(self.block(BLOCK_STATE_HELD, stored, [(lease, table.table_id)]))
            left -= stored
        table.block_ids.extend(one.block_id for one in (*shared, *own))
        self.tables.append(table)
        return table

    def compress(self, blocks: Sequence[Block], first_place: int) -> None:
        """Full blocks are FP8 blocks from now on, side by side from the first unit of an empty place on."""
        for unit, block in enumerate(blocks, first_place * self.native.itemsize):
            block.entry = pack_entry(Format.FP8_E4M3, 0, unit)

    def lower(self, blocks: Sequence[Block], slab: int) -> None:
        """Blocks are in the host tier from now on, in its first places: beside a GPU (slab 1), or behind the device."""
        first = 0 if slab else self.total
        for place, block in enumerate(blocks, first):
            fmt = unpack_entry(block.entry)[0]
            block.entry, block.tier = pack_entry(fmt, slab, self.native.itemsize * place), TIER_HOST

    def suspended(self, tokens: int, idle_s: float = 0.0) -> None:
        """A table of worker "w" that waits without blocks."""
        table = BlockTable(
            table_id=len(self.tables) + 1, lease_id=WORKER, holder="w", num_tokens=tokens, suspended=True
        )
        table.idle_time.FromMilliseconds(int(idle_s * 1000))
        self.tables.append(table)

    def of_lease(self, lease: int, count: int, num_tokens: int = 0, idle_s: float = 0.0) -> None:
        for _ in range(count):
            self.block(BLOCK_STATE_HELD, num_tokens, [(lease, 0)], idle_s)

    def reserve(self, count: int) -> None:
        """Blocks that worker "w" has in reserve."""
        self.of_lease(WORKER, count)

    def cached(self, count: int, *, pinned: bool = False, idle_s: float = 0.0) -> None:
        for _ in range(count):
            self.block(BLOCK_STATE_CACHED, self.block_size, idle_s=idle_s).pinned = pinned

    def worker(self, waiting: int, running: int, epoch: int = EPOCH, for_prefix: int = 0) -> None:
        """`waiting` for blocks or for the worker, and so many more for a prefix."""
        model = GetModelResponse(pool_epoch=epoch, waiting_requests=waiting + for_prefix, running_requests=running)
        model.prefix_waiting_requests = for_prefix
        self.workers.append(WorkerReport("unix:/w.sock", model))

    def seen(self, **changes: Any) -> Observation:
        entries = {block.block_id: block.entry for block in self.blocks}
        for table in self.tables:
            table.entries[:] = [entries[block_id] for block_id in table.block_ids]
        pool = Pool(epoch=EPOCH, block_size=self.block_size, device="host")
        pool.block_bytes = self.token_bytes * self.block_size
        pool.unit_bytes = pool.block_bytes // self.native.itemsize
        pool.slab_bytes = (self.slab_blocks or self.total) * pool.block_bytes
        pool.geometry.format, pool.geometry.model_name = self.native, "tiny"  # type: ignore[assignment]
        pool.usage.CopyFrom(self._usage())
        for name, count in self.counters.items():
            setattr(pool.counters, name, count)
        pool.start_time.FromMilliseconds(int((NOW_S - self.uptime_s) * 1000))
        seen = Observation(pool, self.blocks, self.tables, self.workers, NOW_S, target="unix:/memd.sock")
        return replace(seen, **changes)

    def _usage(self) -> PoolUsage:
        """A split place is in use while one of its blocks is, and cached only when all are."""
        places: dict[int, list[Block]] = {}
        here = [block for block in self.blocks if block.tier != TIER_HOST]
        below = [block.state == BLOCK_STATE_CACHED for block in self.blocks if block.tier == TIER_HOST]
        for block in here:
            places.setdefault(unpack_entry(block.entry)[2] // self.native.itemsize, []).append(block)
        states = [{block.state for block in blocks} for blocks in places.values()]
        held = sum(BLOCK_STATE_HELD in each for each in states)
        cached = sum(each == {BLOCK_STATE_CACHED} for each in states)
        pinned = [any(one.pinned for one in blocks) for blocks in places.values()]
        fp8 = [one.entry for one in here if unpack_entry(one.entry)[0] is Format.FP8_E4M3]
        return PoolUsage(
            total_blocks=self.total,
            free_blocks=self.total - len(places) - self.kept,
            held_blocks=held,
            cached_blocks=cached,
            quarantined_blocks=len(places) - held - cached,
            pinned_blocks=sum(each == {BLOCK_STATE_CACHED} and pin for each, pin in zip(states, pinned, strict=True)),
            reserve_blocks=sum(list(one.holders) == [holder_of(WORKER, 0)] for one in here),
            split_blocks=len({unpack_entry(entry)[2] // self.native.itemsize for entry in fp8}),
            fp8_blocks=len(fp8),
            kept_blocks=self.kept,
            host_blocks=self.host,
            host_free_blocks=self.host - len(below),
            host_cached_blocks=sum(below),
        )
