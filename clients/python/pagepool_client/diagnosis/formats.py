"""In which formats the blocks of a pool are, and in which of its places they lie. Pure.

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
    """Blocks, places and bytes of a pool by format, as its usage has them."""

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
    """The blocks of a pool that is cut, by format."""
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


def place_of(entry: int, units: int) -> int:
    """The place that the block of a packed word is in, where each has so many units."""
    return unpack_entry(entry)[2] // units


def fp8_places(tables: Iterable[BlockTable], units: int) -> dict[int, int]:
    """By id, the places of the FP8 blocks in these tables."""
    return {
        block_id: place_of(entry, units)
        for table in tables
        for block_id, entry in zip(table.block_ids, table.entries, strict=True)
        if is_fp8(entry)
    }
