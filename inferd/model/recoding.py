"""Blocks from one format to the other, and copies between blocks whose formats may differ, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inferd.core.ports import BlockCopy
from pagekernels.layout import Format

Entries = npt.NDArray[np.uint32]


class BlockOps(Protocol):
    """What copies need of pagekernels' operations."""

    def copy_blocks(self, sources: Entries, targets: Entries) -> None:
        """Copy whole blocks, source entry to target entry of the same format."""

    def decompress_blocks(self, sources: Entries, targets: Entries) -> None:
        """Store FP8 blocks as blocks of the native format."""


@dataclass(frozen=True, slots=True)
class Recoded:
    """A recoding that is over before anybody asks for it; see inferd.surroundings.Recoding."""

    found: list[float] = field(default_factory=list)

    def done(self) -> bool:
        """True."""
        return True

    def errors(self) -> list[float]:
        """What compressing the blocks has cost."""
        return self.found


def entries_of(sources: Sequence[int], targets: Sequence[int]) -> tuple[Entries, Entries]:
    """The packed words as the operations want them. OverflowError if one has more than 32 bits."""
    return np.array(sources, np.uint32), np.array(targets, np.uint32)


def are_compressed(entries: Entries) -> bool:
    """Whether these are FP8 blocks, and so to be decompressed; all are of one format."""
    return len(entries) > 0 and int(entries[0] >> 29) == Format.FP8_E4M3


def copy_blocks(ops: BlockOps, copies: Sequence[BlockCopy]) -> None:
    """Make the copies of a step. From an FP8 block to a native one, which is to be written to, it is decompressed.

    All of the block then, since the tokens behind those that are wanted are written before they are read.
    """
    sources, targets = entries_of([copy.source for copy in copies], [copy.target for copy in copies])
    changes = (sources ^ targets) >> 29 != 0
    if not changes.any():
        ops.copy_blocks(sources, targets)
        return
    ops.decompress_blocks(sources[changes], targets[changes])
    if not changes.all():
        ops.copy_blocks(sources[~changes], targets[~changes])
