"""How large the tiers of a pool are, and where their units lie."""

from __future__ import annotations

from dataclasses import dataclass

from memd.core.fp8 import Fp8
from memd.core.geometry import cut
from pagekernels.layout import MAX_UNITS, PagedLayout
from pagepool.errors import invalid_field


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory for the host tier: `size_bytes` of a slab, from `offset_bytes` on; slab 0 is the device's own."""

    size_bytes: int
    slab: int = 1
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tiers:
    """What a pool has beside blocks of the native format on the device."""

    fp8: Fp8 | None = None
    host: HostMemory | None = None


DEVICE_ONLY = Tiers()


@dataclass(frozen=True, slots=True)
class Extent:
    """Frames of the device tier, and of the host tier, whose first unit in its slab is `host_unit`.

    With `fp8` frames can be split into units.
    """

    num_blocks: int
    fp8: Fp8 | None = None
    num_host: int = 0
    host_slab: int = 1
    host_unit: int = 0

    @property
    def num_frames(self) -> int:
        """Of both tiers."""
        return self.num_blocks + self.num_host

    def num_places(self, units_per_block: int) -> int:
        """Frames, and units if there may be any."""
        return self.num_frames * (1 + units_per_block if self.fp8 else 1)


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What a pool is cut from: a slab of the device, at most so many blocks of it, and memory for the host tier.

    INVALID_FIELD (--max-num-blocks) if that is none.
    """

    slab_bytes: int
    max_num_blocks: int | None = None
    tiers: Tiers = DEVICE_ONLY

    def __post_init__(self) -> None:
        most = self.max_num_blocks
        if most is not None and most < 1:
            raise invalid_field("--max-num-blocks", most, "at least 1", "leave it out for the whole slab")

    def extent(self, layout: PagedLayout) -> Extent:
        """The pool for a layout; INVALID_FIELD if not even one block fits."""
        num_blocks = cut(layout, self.slab_bytes, self.max_num_blocks)
        host, fp8 = self.tiers.host, self.tiers.fp8
        if host is None:
            return Extent(num_blocks, fp8)
        first = -(-host.offset_bytes // layout.unit_bytes)
        room = host.offset_bytes + host.size_bytes - first * layout.unit_bytes
        fitting = min(max(room, 0) // layout.block_bytes, (MAX_UNITS - first) // layout.units_per_block)
        if fitting < 1:
            least = layout.block_bytes + first * layout.unit_bytes - host.offset_bytes
            limit = f"at least {least}, for one block of this geometry"
            raise invalid_field("--host-tier", host.size_bytes, limit, "start memd with a larger one, or without")
        return Extent(num_blocks, fp8, fitting, host.slab, first)
