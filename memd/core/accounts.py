"""What a pool's blocks are doing now, and what has happened since it began. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks by what they are doing; the classes add up to `total`, all 0 before the pool is cut.

    `pinned` counts those of the cached ones that cannot be evicted now, `reserve` those of the held ones that workers
    have in reserve.
    """

    total: int
    free: int
    held: int
    cached: int
    quarantined: int
    pinned: int = 0
    reserve: int = 0

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
