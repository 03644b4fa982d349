"""Paged-attention kernels: the block layout, the operations, and their implementations. Knows nothing of services.

Importing this package imports no kernels; `open_ops` does, for the device asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagekernels.layout import PagedLayout

if TYPE_CHECKING:
    from pagekernels.ops import PagedOps


def open_ops(slab: memoryview, layout: PagedLayout, device: str = "cpu") -> PagedOps:
    """The operations on a slab: "cpu" (numba) or "twin" (the NumPy oracle). The slab must outlive the result.

    Import torch and call `pagekernels.cpu.configure` first. Raises ValueError for another device.
    """
    if device == "cpu":
        from pagekernels.cpu.ops import CpuOps

        return CpuOps(slab, layout)
    if device == "twin":
        from pagekernels.twin import TwinOps

        return TwinOps(slab, layout)
    raise ValueError(f'device is "{device}", but must be "cpu" or "twin"')
