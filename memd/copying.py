"""The copies that a command of the core asks for, carried out in the slab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from memd.core.errors import InvariantError
from memd.core.values import BlockCopy
from memd.runs import Place, Run
from pagekernels.layout import unpack_entry

Copier = Callable[[Sequence[BlockCopy], int], None]
"""Carries out copies of blocks of units of so many bytes, and returns when the bytes are there."""


class Slab(Protocol):
    """Memory whose bytes memd can copy: one slab, or several."""

    def copy(self, runs: Sequence[Run]) -> None:
        """Carry out these copies, in order."""


def copier_of(slab: Slab) -> Copier:
    """A copier of a pool's memory."""

    def copy(copies: Sequence[BlockCopy], unit_bytes: int) -> None:
        if not copies:
            return
        try:
            slab.copy([_run(each, unit_bytes) for each in copies])
        except Exception as error:
            # After a command the pool says already what these blocks hold: nobody may ever match them, so memd ends.
            raise InvariantError(f"{len(copies)} blocks were not copied: {error}") from error

    return copy


def _run(copy: BlockCopy, unit_bytes: int) -> Run:
    (form, source_slab, source), (_, target_slab, target) = unpack_entry(copy.source), unpack_entry(copy.target)
    places = Place(source_slab, source * unit_bytes), Place(target_slab, target * unit_bytes)
    return Run(*places, form.itemsize * unit_bytes)
