"""What `make sanitize` runs under compute-sanitizer: every kernel on a few shapes, beside the twin. Needs no torch."""

from __future__ import annotations

import sys

import numpy as np

from pagekernels.cuda.device import open_device
from pagekernels.layout import LAYOUT_SWIZZLED, Format, pack_entry
from pagekernels.twin import TwinOps
from tests.cpu.kernel_cases import LAYER, TOLERANCE, Case, dense_attention, with_params
from tests.gpu.gpu_ops import GpuOps, jobs_of, precompile

MIXED = ((1, 700), (20, 33), (0, 40), (1, 16), (3, 300), (0, 0), (1, 1), (1, 15))
CASES = [
    Case(MIXED, Format.F32, dims=(20, 12), heads=1, group=3, version=LAYOUT_SWIZZLED, fp8_every=2),
    with_params(Case(MIXED, Format.BF16, dims=(64, 64), group=4, version=LAYOUT_SWIZZLED), window=37, softcap=3.0),
    Case(MIXED, Format.F16, 8, heads=1, group=1, dims=(7, 3), version=LAYOUT_SWIZZLED, fp8_every=3),
]


def check(device, case: Case) -> None:
    """Append, copy, gather and attend."""
    slab, q, batch, tokens = case.build()
    got = case.attend(GpuOps(device, slab, case.layout), q, batch)
    tolerance = TOLERANCE[case.fmt]
    np.testing.assert_allclose(got, dense_attention(case, q, tokens), rtol=tolerance, atol=tolerance)
    ops, twin = GpuOps(device, slab, case.layout), TwinOps(slab.copy(), case.layout)
    k, v = (x[:3] for x in tokens[0])
    slots = np.array([1, -1, case.block_size * case.layout.units_per_block + 2])
    entries = [np.array([pack_entry(case.fmt, 0, u * case.layout.units_per_block)], np.uint32) for u in (0, 1)]
    for each in (ops, twin):
        each.append(LAYER, k, v, slots)
        each.copy_blocks(*entries)
    assert np.array_equal(ops.slab, twin.slab)
    read = [np.zeros((case.heads, 33, dim), case.dtype()) for dim in (*case.dims, *case.dims)]
    ops.gather(LAYER, batch.block_tables[1], 33, *read[:2])
    twin.gather(LAYER, batch.block_tables[1], 33, *read[2:])
    assert np.array_equal(read[0], read[2])
    assert np.array_equal(read[1], read[3])


def main() -> int:
    """Run all cases; compute-sanitizer says what it saw."""
    device = open_device(0)
    precompile(device, [job for case in CASES for job in jobs_of(case)])
    for case in CASES:
        check(device, case)
    sys.stdout.write(f"{len(CASES)} cases agree with the twin on {device.arch}\n")
    device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
