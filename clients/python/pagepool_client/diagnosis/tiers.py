"""What the host tier of a pool has, and how much of it. Pure.

Its places are beside those of the device, and nothing that is counted of the device counts them: their blocks are
sealed, can be found, and are read where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagepool.memd.v1.types_pb2 import TIER_HOST, Block, Pool
from pagepool_client.diagnosis.words import count, share, size


@dataclass(frozen=True, slots=True)
class HostTier:
    """Places of the host tier, each with room for a block of the native format, and their bytes."""

    places: int
    free_places: int
    taken_places: int
    """Places with at least one block."""
    cached_places: int
    """Of the taken ones, those with nothing but blocks that nobody refers to."""
    bytes: int
    taken_bytes: int

    @property
    def is_full(self) -> bool:
        """Whether less than a twentieth is free."""
        return 20 * self.free_places < self.places

    def words(self) -> str:
        """How much of it is taken."""
        unused = f" ({self.cached_places:,} in use by nobody)" if self.cached_places else ""
        return f"{self.taken_places:,} of {count(self.places, 'place')}{unused}, {size(self.taken_bytes)}"


def host_tier(pool: Pool) -> HostTier | None:
    """The host tier of a pool; None if there is none, or the pool is not cut."""
    usage = pool.usage
    if not usage.host_blocks:
        return None
    taken = usage.host_blocks - usage.host_free_blocks
    return HostTier(
        places=usage.host_blocks,
        free_places=usage.host_free_blocks,
        taken_places=taken,
        cached_places=usage.host_cached_blocks,
        bytes=usage.host_blocks * pool.block_bytes,
        taken_bytes=taken * pool.block_bytes,
    )


def is_below(block: Block) -> bool:
    """Whether a block is in the host tier."""
    return block.tier == TIER_HOST


def found_below(below: int, found: int) -> str:
    """Which part of the tokens that were found was found in the host tier; nothing if none was found at all."""
    return f"{share(below, found)} of the tokens found were there" if found else ""
