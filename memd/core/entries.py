"""Packed block-table words of a pool's places."""

from __future__ import annotations

from collections.abc import Sequence

from memd.core.block import span_of
from memd.core.extent import Extent
from memd.core.units import SplitFrames
from pagekernels.layout import Format, PagedLayout, pack_entry


class Entries:
    """Which format the block in a place has, and its packed entry."""

    __slots__ = ("_base", "_extent", "_format", "_step", "_units")

    def __init__(self, layout: PagedLayout, units: SplitFrames, extent: Extent) -> None:
        self._units, self._extent = units, extent
        self._format = layout.format
        self._base = pack_entry(layout.format, 0, 0)
        self._step = layout.units_per_block

    def format_of(self, place: int) -> Format:
        """The format of the block in a place."""
        return Format.FP8_E4M3 if self._units.is_unit(place) else self._format

    def entry(self, place: int) -> int:
        """The packed entry of the block in a place."""
        if self._units.is_unit(place):
            return self._packed(Format.FP8_E4M3, place - self._units.first)
        if place >= self._extent.num_blocks:
            return self._packed(self._format, place * self._step)
        return self._base | place * self._step

    def entries(self, places: Sequence[int]) -> list[int]:
        """The packed entries of the blocks in these places."""
        base, step = self._base, self._step
        if self._units or (places and max(places) >= self._extent.num_blocks):
            return list(map(self.entry, places))
        if (span := span_of(places)) is not None:
            return list(range(base + span.start * step, base + span.stop * step, step))
        return [base | place * step for place in places]

    def _packed(self, form: Format, unit: int) -> int:
        """The entry of a block that begins at a unit, counted over both tiers."""
        beyond = unit - self._extent.num_blocks * self._step
        if beyond < 0:
            return pack_entry(form, 0, unit)
        return pack_entry(form, self._extent.host_slab, self._extent.host_unit + beyond)
