"""What a worker does to its tables with what it has in reserve: plain values, part of a Step.

The operations are those that workers speak in, since memd repeats each as it was done.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagepool.pool_values import CopyOnWrite, Fork, Release, Suspend, TableOperation, Take, Truncate

__all__ = ["CopyOnWrite", "Fork", "Release", "ReserveRequest", "Suspend", "TableOperation", "Take", "Truncate"]


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Blocks and table ids to have ahead, for operations to come.

    `for_table_id` is the table that cannot go on without the blocks; 0 if nobody waits.
    """

    num_blocks: int
    num_tables: int
    ref: int = 0
    for_table_id: int = 0
