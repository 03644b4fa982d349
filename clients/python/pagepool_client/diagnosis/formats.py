"""In which formats the blocks of a pool are, and in which places of its device they lie. Pure.

A place is room for one block of the native format. One that is split has FP8 blocks instead, a unit each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagekernels.layout import Format, unpack_entry
from pagepool.memd.v1.types_pb2 import BlockTable, Pool
from pagepool_client.diagnosis.words import count, size


@dataclass(frozen=True, slots=True)
class Formats:
    """Blocks, places and bytes of a pool's device by format, as its usage has them."""

    native: str
    """The name of the native format, such as bf16."""
    native_blocks: int
    native_bytes: int
    fp8_blocks: int
    fp8_bytes: int
    split_places: int
    holes: int
    """Units of split places without an FP8 block: nothing else fits there."""

    def words(self) -> str:
        """Blocks and bytes of either format."""
        places = count(self.split_places, "place")
        native = f"{self.native_blocks:,} in {self.native} ({size(self.native_bytes)})"
        return f"{self.fp8_blocks:,} in FP8 ({places}, {size(self.fp8_bytes)}), {native}"


def formats(pool: Pool) -> Formats:
    """The blocks on the device of a pool that is cut, by format."""
    usage = pool.usage
    native = usage.total_blocks - usage.free_blocks - usage.kept_blocks - usage.split_blocks
    return Formats(
        native=Format(pool.geometry.format).name.lower(),
        native_blocks=native,
        native_bytes=native * pool.block_bytes,
        fp8_blocks=usage.fp8_blocks,
        fp8_bytes=usage.fp8_blocks * pool.unit_bytes,
        split_places=usage.split_blocks,
        holes=usage.split_blocks * units_per_block(pool) - usage.fp8_blocks,
    )


def had_fp8(pool: Pool) -> bool:
    """Whether there are FP8 blocks, or have been, or were to be."""
    counters = pool.counters
    return bool(pool.usage.fp8_blocks or counters.compressed_blocks or counters.blocks_over_error)


def units_per_block(pool: Pool) -> int:
    """Units of a place in a pool that is cut: so many FP8 blocks it has room for."""
    return pool.block_bytes // pool.unit_bytes


def is_fp8(entry: int) -> bool:
    """Whether a packed block-table word names an FP8 block."""
    return unpack_entry(entry)[0] is Format.FP8_E4M3


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a pool's device: how many there are, and how many units each has."""

    count: int
    units: int

    def of(self, entry: int) -> int | None:
        """The place that the block of a packed word is in; None if it is below the device, in the host tier.

        That one is another slab beside a GPU, and in shared memory what is behind the device in the same slab.
        """
        _, slab, unit = unpack_entry(entry)
        place = unit // self.units
        return None if slab or place >= self.count else place


def places_of(pool: Pool) -> Places:
    """The places of the device of a pool that is cut."""
    return Places(pool.usage.total_blocks, units_per_block(pool))


def apart(tables: Iterable[BlockTable], places: Places) -> tuple[dict[int, int], set[int]]:
    """Blocks in these tables that are no whole place of the device.

    By id, the places of its FP8 blocks; and the ids of those below.
    """
    fp8, below = dict[int, int](), set[int]()
    for table in tables:
        for block_id, entry in zip(table.block_ids, table.entries, strict=True):
            if block_id in below or block_id in fp8:
                continue
            if (place := places.of(entry)) is None:
                below.add(block_id)
            elif is_fp8(entry):
                fp8[block_id] = place
    return fp8, below
