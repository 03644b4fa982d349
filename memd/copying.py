"""The copies that a command of the core asks for, carried out in the slab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from memd.core.errors import InvariantError
from memd.core.values import BlockCopy
from pagekernels.layout import unpack_entry

Copier = Callable[[Sequence[BlockCopy], int], None]
"""Carries out copies of blocks of units of so many bytes, and returns when the bytes are there."""


class Slab(Protocol):
    """Memory whose bytes memd can copy."""

    def copy(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """Copy runs (source, target, size in bytes), in order, from one place of the slab to another."""


def copier_of(slab: Slab) -> Copier:
    """A copier of the one slab of a pool."""

    def copy(copies: Sequence[BlockCopy], unit_bytes: int) -> None:
        if not copies:
            return
        try:
            slab.copy([_run(each, unit_bytes) for each in copies])
        except Exception as error:
            # The pool says already what these blocks hold: nobody may ever match them, so memd ends.
            raise InvariantError(f"{len(copies)} blocks were not copied: {error}") from error

    return copy


def _run(copy: BlockCopy, unit_bytes: int) -> tuple[int, int, int]:
    (form, _, source), (_, _, target) = unpack_entry(copy.source), unpack_entry(copy.target)
    return source * unit_bytes, target * unit_bytes, form.itemsize * unit_bytes
