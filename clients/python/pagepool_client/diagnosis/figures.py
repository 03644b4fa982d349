"""How a pool's memory is used, in figures: what lies in its blocks, what holds them, and what sharing saves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagekernels.layout import Format, unpack_entry
from pagepool.durations import to_seconds
from pagepool.memd.v1.types_pb2 import BLOCK_STATE_HELD, Block, BlockTable, PoolUsage
from pagepool_client.diagnosis.formats import is_fp8
from pagepool_client.diagnosis.observation import Observation
from pagepool_client.diagnosis.tiers import is_below


@dataclass(frozen=True, slots=True)
class Holder:
    """What holds blocks: a block table, or a lease directly (`table_id` 0), which at a `worker` is its reserve.

    `own_blocks` are those of the device that nothing else holds: what comes back when it lets go. They take
    `own_places`, an FP8 block a part of one. `idle_s` is the time since the table, or the most recent of the lease's
    blocks, was touched. `name` may be empty for a lease without a table.
    """

    lease_id: int
    table_id: int
    name: str
    blocks: int
    own_blocks: int
    own_places: float
    tokens: int
    idle_s: float
    worker: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """Blocks and tokens of a pool. "Held" leaves out what is quarantined, and what is in the host tier.

    FP8 blocks count like others.
    """

    available: int
    """Blocks that can be granted now; see available_blocks."""
    least_available: int
    """The same, at its lowest while the pool was watched."""
    sealed: int
    """Sealed blocks of either tier, held or cached: what a prompt can find."""
    held_blocks: int
    """Held blocks: more than the places that are held, where some of these are split."""
    tokens: int
    """Tokens stored in held blocks."""
    tail_slots: int
    """Slots without a token in held blocks that are written to in part: waste inside blocks."""
    reserved_blocks: int
    """Blocks of tables that hold no token yet."""
    reserve_blocks: int
    """Blocks that workers have in reserve, in no table yet."""
    direct_blocks: int
    """Held blocks that only clients' leases hold, and no table."""
    saved_blocks: int
    """Blocks that tables would need in addition if none, of either tier, were shared between them."""
    stray_units: int
    """Free units beside used ones in places for a whole block: fragmentation, which only smaller formats can make."""
    mean_table_blocks: float
    """Blocks of a table that is not suspended, on average; 0 without such tables."""
    holders: Sequence[Holder]
    """Those with most blocks of their own first."""


def measure(observation: Observation) -> Figures:
    """The figures of a pool that is cut into blocks. Blocks and tables may stem from slightly different moments."""
    size, tables = observation.pool.block_size, observation.tables_with_blocks
    native = Format(observation.pool.geometry.format)
    used = [block for block in observation.blocks if block.state == BLOCK_STATE_HELD and not _is_being_filled(block)]
    held = [block for block in used if not is_below(block)]
    usages = [pool.usage for pool in (*observation.earlier, observation.pool)]
    available = [available_blocks(usage) for usage in usages]
    pairs = [(block, _in_tables(block)) for block in held]
    return Figures(
        available=available[-1],
        least_available=min(available),
        sealed=sum(block.sealed for block in observation.blocks),
        held_blocks=len(held),
        tokens=sum(block.num_tokens for block in held),
        tail_slots=sum(size - block.num_tokens for block in held if block.num_tokens),
        reserved_blocks=sum(not block.num_tokens for block, refs in pairs if refs),
        reserve_blocks=sum(not refs and _is_workers(block) and not block.sealed for block, refs in pairs),
        direct_blocks=sum(not refs and not _is_workers(block) for block, refs in pairs),
        saved_blocks=sum(sum(refs) + block.more_holders - 1 for block in used if (refs := _in_tables(block))),
        stray_units=stray_units(observation.blocks, native),
        mean_table_blocks=sum(len(table.block_ids) for table in tables) / len(tables) if tables else 0.0,
        holders=holders(used, tables, native),
    )


def _in_tables(block: Block) -> list[int]:
    """References by each of the tables that are listed."""
    return [holder.ref_count for holder in block.holders if holder.table_id]


def _is_being_filled(block: Block) -> bool:
    """Whether another block is being compressed, or moved down, into this one: both are listed until it is done."""
    return not block.sealed and (is_fp8(block.entry) or is_below(block))


def _is_workers(block: Block) -> bool:
    return all(holder.worker for holder in block.holders)


def available_blocks(usage: PoolUsage) -> int:
    """Blocks that can be granted: free ones, and cached ones that are not pinned, which are evicted for it."""
    return usage.free_blocks + usage.cached_blocks - usage.pinned_blocks


def tail_slots_at(block_size: int, tables: Iterable[BlockTable]) -> int:
    """Slots without a token in the last written block of each table, if blocks had this size."""
    return sum(-table.num_tokens % block_size for table in tables)


def stray_units(blocks: Iterable[Block], native: Format) -> int:
    """Free units in places of the device for a block of the native format that hold smaller blocks."""
    used = Counter[int]()
    for block in blocks:
        if is_below(block):
            continue
        fmt, _, unit = unpack_entry(block.entry)
        used[unit // native.itemsize] += fmt.itemsize
    # Blocks that are listed while they move may share a place.
    return sum(max(native.itemsize - units, 0) for units in used.values())


def holders(held: Iterable[Block], tables: Sequence[BlockTable], native: Format) -> list[Holder]:
    """Who holds these blocks of a pool with this native format, those with most blocks of their own first."""
    by_id = {table.table_id: table for table in tables}
    names = {table.lease_id: table.holder for table in tables}
    blocks, own, units = Counter[tuple[int, int]](), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    idle = dict[tuple[int, int], float]()
    workers = set[int]()
    for block in held:
        for holder in block.holders:
            key = holder.lease_id, holder.table_id
            blocks[key] += 1
            if holder.worker:
                workers.add(holder.lease_id)
            if len(block.holders) == 1 and not is_below(block):  # and no others, since many are listed
                own[key] += 1
                units[key] += unpack_entry(block.entry)[0].itemsize
            idle[key] = min(idle.get(key, float("inf")), to_seconds(block.idle_time))
    found = []
    for key, count in blocks.items():
        table = by_id.get(key[1], BlockTable())
        idle_s = to_seconds(table.idle_time) if table.table_id else idle[key]
        has = len(table.block_ids) or count  # of a block that very many hold, not all are listed
        of_worker = key[0] in workers
        owned = own[key], units[key] / native.itemsize
        found.append(Holder(*key, names.get(key[0], ""), has, *owned, table.num_tokens, idle_s, of_worker))
    return sorted(found, key=lambda holder: (-holder.own_blocks, -holder.blocks, holder.table_id, holder.lease_id))
