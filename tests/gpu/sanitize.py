"""What `make sanitize` runs under compute-sanitizer: every kernel on a few shapes, beside the twin. Needs no torch."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import numpy as np

from pagekernels.cuda.decode import DecodeLayer
from pagekernels.cuda.device import open_device
from pagekernels.cuda.sampling import PADDING, GpuSampler, pack_head, pack_position
from pagekernels.layout import LAYOUT_SWIZZLED, Format, pack_entry
from pagekernels.twin import TwinOps
from tests.cpu.kernel_cases import LAYER, TOLERANCE, Case, dense_attention, with_params
from tests.gpu.gpu_ops import GpuOps, Strided, jobs_of, precompile

MIXED = ((1, 700), (20, 33), (0, 40), (1, 16), (3, 300), (0, 0), (1, 1), (1, 15))
CASES = [
    Case(MIXED, Format.F32, dims=(20, 12), heads=1, group=3, version=LAYOUT_SWIZZLED, fp8_every=2),
    with_params(Case(MIXED, Format.BF16, dims=(64, 64), group=4, version=LAYOUT_SWIZZLED), window=37, softcap=3.0),
    Case(MIXED, Format.F16, 8, heads=1, group=1, dims=(7, 3), version=LAYOUT_SWIZZLED, fp8_every=3),
]

DECODE = tuple((min(1, kv), kv) for _, kv in MIXED)
TUNED = [
    (with_params(Case(DECODE, Format.BF16, dims=(128, 128), group=4, version=LAYOUT_SWIZZLED), scale=0.09), 1),
    (with_params(Case(MIXED, Format.F16, dims=(64, 64), group=7, version=LAYOUT_SWIZZLED), scale=0.125), 20),
    (with_params(Case(DECODE, Format.BF16, 8, dims=(64, 64), group=2, version=LAYOUT_SWIZZLED), window=37), 1),
]


def check(device, case: Case) -> None:
    """Append, copy, gather, compress and attend."""
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
    small = np.array([pack_entry(Format.FP8_E4M3, 0, 2 * case.layout.units_per_block)], np.uint32)
    for each in (ops, twin):
        each.compress_blocks(entries[0], small)
    assert np.array_equal(ops.slab, twin.slab)
    ops.decompress_blocks(small, entries[1])


def check_tuned(device, case: Case, queries: int) -> None:
    """The tuned decode kernel and its planner, as CudaOps routes them."""
    slab, q, batch, tokens = case.build()
    layers = {LAYER: DecodeLayer(case.heads * case.group, case.params)}
    ops = GpuOps(device, slab, case.layout, layers, queries)
    np.testing.assert_allclose(case.attend(ops, q, batch), dense_attention(case, q, tokens), rtol=0.02, atol=0.02)


def check_sampling(device) -> None:
    """Three rows: the arg-max, a drawn and cut one, and padding."""
    vocab, rng = 5003, np.random.default_rng(0)
    logits = Strided(device, rng.normal(size=(3, vocab)).astype(np.float32))
    drawn = SimpleNamespace(temperature=0.7, min_p=0.01, top_k=50, top_p=0.9, seed=3, sample_index=1)
    greedy = SimpleNamespace(temperature=0.0, min_p=0.0, top_k=0, top_p=1.0, seed=0, sample_index=0)
    records = [pack_head(row) + pack_position(7) for row in (greedy, drawn)]
    rows = Strided(device, np.frombuffer(b"".join((*records, PADDING)), np.uint8).copy())
    tokens, ids = Strided(device, np.full(3, -9, np.int32)), Strided(device, np.array([-2, 11, -1], np.int64))
    sampler = GpuSampler(device, 3, vocab, "float32")
    device.synchronize()
    sampler.sample(logits, rows.data_ptr(), tokens.data_ptr())
    sampler.resolve_ids(ids.data_ptr(), 8, 3, tokens.data_ptr())
    chosen, resolved = tokens.fetch().tolist(), ids.fetch().tolist()
    assert chosen[0] == int(logits.array[0].argmax())
    assert 0 <= chosen[1] < vocab
    assert chosen[2] == -9
    assert resolved == [chosen[1], 11, chosen[0]]
    sampler.close()


def main() -> int:
    """Run all cases; compute-sanitizer says what it saw."""
    device = open_device(0)
    try:
        precompile(device, [job for case in CASES for job in jobs_of(case)])
        for case in CASES:
            check(device, case)
        for case, queries in TUNED:
            check_tuned(device, case, queries)
        check_sampling(device)
    finally:
        gc.collect()
        device.close()
    sys.stdout.write(
        f"{len(CASES) + len(TUNED)} cases agree with the twin on {device.arch}, and the sampler is right\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
