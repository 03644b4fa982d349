"""What a pool's blocks are doing now, and what has happened since it began. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks by what they are doing; the classes add up to `total`, all 0 before the pool is cut.

    `pinned` counts those of the cached ones that cannot be evicted now, `reserve` those of the held ones that workers
    have in reserve. `split` of all these places are split, and have `fp8` FP8 blocks in them. `kept`
    of them are kept back, to compress to: a class like the first ones. All this is of the device; the host tier has
    `host_total` more, free, cached, or held.
    """

    total: int
    free: int
    held: int
    cached: int
    quarantined: int
    pinned: int = 0
    reserve: int = 0
    split: int = 0
    fp8: int = 0
    kept: int = 0
    host_total: int = 0
    host_free: int = 0
    host_cached: int = 0

    @property
    def available(self) -> int:
        """Blocks that can be granted, if nobody claims them: free ones, and cached ones that are not pinned."""
        return self.free + self.cached - self.pinned


@dataclass(slots=True)
class Counters:
    """What has happened since the pool began."""

    allocated_blocks: int = 0
    freed_blocks: int = 0
    evicted_blocks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    refused_requests: int = 0
    attach_steps: int = 0
    lost_leases: int = 0
    merged_blocks: int = 0
    remaps: int = 0
    prefix_pending_requests: int = 0
    compressed_blocks: int = 0
    decompressed_blocks: int = 0
    blocks_over_error: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    host_hit_tokens: int = 0
