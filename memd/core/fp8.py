"""What an operator says about FP8 blocks: memd's --fp8 and the flags beside it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Policy(StrEnum):
    """Which blocks are compressed without being named by anybody."""

    MANUAL = "manual"
    """None."""
    COLD = "cold"
    """Those that nobody refers to, and those of tables that have done nothing for `idle_s`."""
    PRESSURE = "pressure"
    """Where less than a share of 1 - `watermark` of the pool is free, those that nobody refers to; where so little is
    free or could be evicted, those of running tables too, what was sealed first before the rest."""
    ALWAYS = "always"
    """All that are sealed."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """How a pool has FP8 blocks. Without one it has none.

    No policy compresses a first block, which every later token attends to most, nor the newest `keep_recent` full
    blocks of any table that refers to them. A worker has at most `step_bytes` of blocks to compress at a time, so much
    longer one of its steps can take. `kept_share` of the pool, one block at least, is kept back as room to compress to.
    """

    policy: Policy = Policy.MANUAL
    idle_s: float = 60.0
    keep_recent: int = 4
    watermark: float = 0.9
    step_bytes: int = 4 << 20
    kept_share: float = 0.02

    def num_kept(self, num_blocks: int) -> int:
        """Blocks to keep back of a pool of so many."""
        if not self.kept_share or num_blocks < 2:
            return 0
        return max(int(num_blocks * self.kept_share), 1)
