"""What a worker does to its tables with what it has in reserve: plain values, part of a Step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fork:
    """A new table that shares all blocks of another one; its id is one of the lease's reserve."""

    table_id: int
    new_table_id: int


@dataclass(frozen=True, slots=True)
class CopyOnWrite:
    """A table's blocks from `first_index` on are replaced by copies in these blocks of the reserve."""

    table_id: int
    first_index: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Take:
    """Blocks of the reserve are added to the end of a table."""

    table_id: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Truncate:
    """A table's committed tokens are dropped from a length on.

    `block_id` is a block of the reserve with a copy of the one that the new end lies in, or 0 where none is needed.
    """

    table_id: int
    num_tokens: int
    block_id: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """A table is released among the operations, not after them."""

    table_id: int


@dataclass(frozen=True, slots=True)
class Suspend:
    """A table's blocks are released; its committed tokens are kept and, after them, these, which have no KV yet."""

    table_id: int
    token_ids: Sequence[int]


TableOperation = Fork | CopyOnWrite | Take | Truncate | Release | Suspend


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Blocks and table ids to have ahead, for operations to come.

    `for_table_id` is the table that cannot go on without the blocks; 0 if nobody waits.
    """

    num_blocks: int
    num_tables: int
    ref: int = 0
    for_table_id: int = 0
