"""One block table of a worker. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from inferd.core.ports import BlockCopy
from pagekernels.layout import Format


@dataclass(slots=True, eq=False)
class BlockTable:
    """One table. Token positions [0, num_tokens) are committed, [num_tokens, num_prepared) are being written.

    `entries` are the packed words of its blocks; another object whenever they change. Positions below num_writable that
    are not prepared lie in blocks that no other table has: to prepare them is to count num_prepared up. `copy` is one
    that has to be made before anything is written to the table or read from it.
    """

    table_id: int
    block_ids: list[int]
    entries: array[int]
    num_tokens: int = 0
    num_prepared: int = 0
    cached_tokens: int = 0
    num_writable: int = 0
    copy: BlockCopy | None = None
    block_size: int = 0

    @property
    def num_lossy(self) -> int:
        """Token positions in FP8 blocks, which are full."""
        return self.block_size * sum(entry >> 29 == Format.FP8_E4M3 for entry in self.entries)
