"""Packed block-table words of a pool's places."""

from __future__ import annotations

from collections.abc import Sequence

from memd.core.block import span_of
from memd.core.units import SplitFrames
from pagekernels.layout import Format, PagedLayout, pack_entry


class Entries:
    """Which format the block in a place has, and its packed entry."""

    __slots__ = ("_base", "_format", "_step", "_units")

    def __init__(self, layout: PagedLayout, units: SplitFrames) -> None:
        self._units = units
        self._format = layout.format
        self._base = pack_entry(layout.format, 0, 0)
        self._step = layout.units_per_block

    def format_of(self, place: int) -> Format:
        """The format of the block in a place."""
        return Format.FP8_E4M3 if self._units.is_unit(place) else self._format

    def entry(self, place: int) -> int:
        """The packed entry of the block in a place."""
        if self._units.is_unit(place):
            return pack_entry(Format.FP8_E4M3, 0, place - self._units.first)
        return self._base | place * self._step

    def entries(self, places: Sequence[int]) -> list[int]:
        """The packed entries of the blocks in these places."""
        base, step = self._base, self._step
        if self._units:
            return list(map(self.entry, places))
        if (span := span_of(places)) is not None:
            return list(range(base + span.start * step, base + span.stop * step, step))
        return [base | place * step for place in places]
