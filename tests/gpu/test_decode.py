"""The tuned decode kernel against float64, on pools whose unused memory is NaN and whose tables end absurdly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("pycuda", reason="PyCUDA is not installed")

from pagekernels.cuda.decode import DecodeLayer, TunedDecode, Tuning  # noqa: E402
from pagekernels.cuda.device import open_device  # noqa: E402
from pagekernels.layout import Format  # noqa: E402
from pagekernels.ops import AttentionParams  # noqa: E402
from tests.gpu.decode_cases import Case, Pool, build, oracle  # noqa: E402

LAYER = 1
TOLERANCE = {Format.BF16: 6e-3, Format.F16: 1e-3}
"""Relative L2 error of a row: bf16 rounds weights and result to 8 bits, f16 to 11."""


def edges(size: int) -> tuple[tuple[int, int], ...]:
    """Lengths around a block, empty ones between, and some of any length."""
    lengths = (1, 0, size - 1, size, size + 1, 0, 2 * size, 333, 1023, 2, 0)
    return tuple((n, 1 if n else 0) for n in lengths)


def queries(size: int, most: int) -> tuple[tuple[int, int], ...]:
    """Sequences with several query tokens, among them whole prompts."""
    lengths = (
        (most, most),
        (size, 1),
        (0, 0),
        (size + 1, 2),
        (700, most),
        (90, min(most, 5)),
        (1, 1),
        (517, most // 2),
    )
    return tuple((n, max(min(q, n), 0)) for n, q in lengths)


def spread(seed: int, count: int, most: int) -> tuple[tuple[int, int], ...]:
    """Very unequal lengths."""
    lengths = (np.random.default_rng(seed).random(count) ** 4 * most).astype(int) + 1
    return tuple((int(n), 1) for n in lengths)


SINKS = np.linspace(-3.0, 6.0, 32, dtype=np.float32)
CASES = {
    "edges": Case(edges(16)),
    "one short": Case(((5, 1),)),
    "one long": Case(((4097, 1),)),
    "one long, 7 of 4": Case(((9001, 1),), heads=4, group=7),
    "unequal": Case(spread(1, 100, 3000)),
    "many": Case(spread(2, 1000, 60), heads=2),
    **{f"dim {d}": Case(edges(16), head_dim=d) for d in (64, 80, 96, 192, 256)},
    **{f"group {g}": Case(edges(16), heads=2, group=g) for g in (1, 2, 3, 5, 8, 12, 16)},
    **{f"block {b}": Case(edges(b), block_size=b) for b in (8, 32, 64, 128)},
    "f16": Case(edges(16), native=Format.F16),
    "f16, block 8, dim 64": Case(edges(8), native=Format.F16, block_size=8, head_dim=64),
    **{f"{q} queries": Case(queries(16, q)) for q in (2, 4, 7, 16, 64)},
    "64 queries, 16 heads a group": Case(queries(16, 64), heads=2, group=16),
    "33 queries, 7 heads, dim 256, block 32": Case(queries(32, 33), heads=2, group=7, head_dim=256, block_size=32),
    "9 queries, dim 80, block 8": Case(queries(8, 9), head_dim=80, block_size=8),
    "window": Case(edges(16), params=AttentionParams(0.0, window=100)),
    "window, queries": Case(queries(16, 64), params=AttentionParams(0.0, window=37)),
    "chunk": Case(edges(16), params=AttentionParams(0.0, chunk=96)),
    "chunk, queries": Case(queries(16, 40), params=AttentionParams(0.0, chunk=50)),
    "softcap": Case(edges(16), params=AttentionParams(0.3, softcap=5.0)),
    "sinks": Case(edges(16), params=AttentionParams(0.0, sinks=SINKS)),
    "sinks, one long": Case(((5000, 1),), params=AttentionParams(0.0, window=4500, sinks=SINKS)),
    "fp8": Case(edges(16), fp8=1.0),
    "fp8 among bf16": Case(edges(16), fp8=0.5),
    "fp8 among f16": Case(edges(16), fp8=0.5, native=Format.F16),
    "fp8, long": Case(((6000, 1), (100, 1)), fp8=0.7),
    "fp8, queries": Case(queries(16, 20), fp8=0.5),
    **{f"fp8, dim {d}": Case(edges(16), fp8=0.5, head_dim=d) for d in (64, 80, 96, 192, 256)},
    **{f"fp8, block {b}": Case(edges(b), fp8=0.5, block_size=b) for b in (8, 64)},
    **{f"fp8, group {g}": Case(edges(16), heads=2, group=g, fp8=0.5) for g in (1, 8, 12)},
    # An FP8 block's scale of V reaches the kernel's f16 weights, which have but 30 exponents.
    **{f"fp8, V of 2^{e}": Case(edges(16), fp8=0.5, exponents=(e, e)) for e in (-60, -30, 20)},
    "fp8, V of 2^-30, group 12": Case(edges(16), heads=2, group=12, fp8=0.5, exponents=(-30, -30)),
    "fp8 among f16, V of 2^-8": Case(edges(16), native=Format.F16, fp8=0.5, exponents=(-8, -8)),
    "fp8 among f16, V of 2^-8, queries": Case(queries(16, 20), native=Format.F16, fp8=0.5, exponents=(-8, -8)),
    "fp8, V of 2^-20 to 1": Case(edges(16), fp8=0.7, exponents=(-20, 0)),
    "fp8, V of 2^-20 to 1, queries": Case(queries(16, 20), fp8=0.7, exponents=(-20, 0)),
}


@pytest.fixture(scope="module")
def device():
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    opened = open_device(0)
    yield opened
    opened.close()


def attention(device, pool: Pool, tuning: Tuning | None = None) -> TunedDecode:
    """The kernel for a pool's case."""
    case = pool.case
    params = replace(case.params, scale=case.scale)
    layer = DecodeLayer(case.heads * case.group, params)
    most = max(q_len for _, q_len in case.sequences)
    tuning = tuning or Tuning(mixed=case.fp8 > 0)
    return TunedDecode(device, case.layout, [pool.slab.data_ptr()], {LAYER: layer}, most, tuning)


def run(device, kernel: TunedDecode, pool: Pool):
    """(out, lse) of a fresh plan and call."""
    out = torch.full(pool.q.shape, torch.nan, dtype=pool.q.dtype, device="cuda")
    lse = torch.full(pool.q.shape[:2], torch.nan, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    kernel.plan(pool.step)
    kernel.attend(LAYER, pool.q, out, pool.step, lse.data_ptr())
    device.synchronize()
    return out, lse


def check(pool: Pool, out, lse) -> float:
    """The worst row's error; fails where the kernel wrote what it must not."""
    expected, expected_lse = oracle(pool)
    inside = ~expected.isnan()
    assert out.double().isnan().logical_not().equal(inside), "NaN in a row, or a row of no sequence was written"
    rows = inside[..., 0]
    error = (out[rows].double() - expected[rows]).norm(dim=-1) / expected[rows].norm(dim=-1)
    assert float(error.max()) < TOLERANCE[pool.case.native]
    assert float((lse[rows] - expected_lse[rows]).abs().max()) < 2e-3
    return float(error.max())


@pytest.mark.parametrize("name", CASES)
def test_as_float64_and_twice_the_same_bits(device, name: str) -> None:
    pool = build(CASES[name], LAYER)
    kernel = attention(device, pool)
    out, lse = run(device, kernel, pool)
    print(f"{name}: {check(pool, out, lse):.2e}")
    again, _ = run(device, kernel, pool)
    assert torch.equal(again.view(torch.int16), out.view(torch.int16))
    kernel.close()


@pytest.mark.parametrize("ctas", [1, 3, 50, 131])
def test_any_number_of_ctas(device, ctas: int) -> None:
    for case in (Case(spread(1, 20, 900)), Case(((2500, 1),)), Case(spread(3, 20, 900), fp8=0.5)):
        pool = build(case, LAYER)
        kernel = attention(device, pool, Tuning(ctas=ctas, min_items=4, mixed=case.fp8 > 0))
        check(pool, *run(device, kernel, pool))
        kernel.close()


def test_a_very_long_sequence_among_short_ones(device) -> None:
    sequences = ((3, 1), (0, 0), (560_000, 1), (700, 1))
    pool = build(Case(sequences, heads=1, group=2, head_dim=64, fp8=0.3), LAYER)
    kernel = attention(device, pool, Tuning(mixed=True))
    check(pool, *run(device, kernel, pool))
    kernel.close()


def test_a_captured_graph_follows_lengths_and_tables(device) -> None:
    pool = build(Case(spread(5, 30, 2000)), LAYER)
    kernel = attention(device, pool)
    out = torch.zeros(pool.q.shape, dtype=pool.q.dtype, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(device.stream_handle)):
        kernel.plan(pool.step)
        kernel.attend(LAYER, pool.q, out, pool.step)
    for seed in range(4):
        shuffle(pool, seed)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected, _ = oracle(pool)
        rows = ~expected[..., 0].isnan()
        error = (out[rows].double() - expected[rows]).norm(dim=-1) / expected[rows].norm(dim=-1)
        assert float(error.max()) < TOLERANCE[Format.BF16]
    kernel.close()


def shuffle(pool: Pool, seed: int) -> None:
    """Other sequences in other rows, all but the longest cut short, in the same buffers."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(pool.k))
    lengths = [max(1, int(pool.k[s].shape[1] * rng.random())) for s in order]
    pool.k = [pool.k[s][:, :n] for s, n in zip(order, lengths, strict=True)]
    pool.v = [pool.v[s][:, :n] for s, n in zip(order, lengths, strict=True)]
    pool.case = replace(pool.case, sequences=tuple((n, 1) for n in lengths))
    tables = pool.step.block_tables.view(torch.int32)
    tables.copy_(tables[torch.from_numpy(order).cuda()])
    pool.step.kv_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
