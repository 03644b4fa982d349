"""Generic attention on CUDA against a dense float64 softmax and the twin, on poisoned pools."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagekernels.layout import LAYOUT_SWIZZLED, Format
from pagekernels.ops import AttentionBatch, AttentionParams
from pagekernels.twin import TwinOps, decode, encode
from tests.cpu.kernel_cases import FORMATS, LAYER, TOLERANCE, Case, cases, dense_attention, only, with_params
from tests.gpu.gpu_ops import GpuOps, jobs_of, precompile

MIXED = Case(
    sequences=((1, 700), (90, 90), (0, 40), (1, 33), (3, 300), (0, 0), (60, 500)),
    heads=3,
    group=3,
    version=LAYOUT_SWIZZLED,
)
LARGE = [(512, 512), (192, 128), (256, 256), (128, 128), (96, 40), (7, 3)]
DRAWN = ((64, 64), (16, 8), (24, 12), (20, 80), (8, 1))
"""The dims of kernel_cases.cases."""


@pytest.fixture(scope="module", autouse=True)
def _compiled(device):
    every = [replace(MIXED, fmt=fmt, dims=dims) for fmt in FORMATS for dims in (*DRAWN, (16, 16))]
    every += [replace(MIXED, fmt=fmt, dims=dims) for fmt in (Format.F32, Format.BF16) for dims in LARGE]
    precompile(device, [job for case in every for job in jobs_of(case)])


def assert_close(got, expected, fmt):
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[fmt], atol=TOLERANCE[fmt])


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=cases(), fp8_every=st.sampled_from((0, 0, 1, 2, 3)), most=st.sampled_from((None, None, 64, 200)))
def test_equals_a_dense_softmax_and_never_reads_what_is_unused(device, case, fp8_every, most):
    case = replace(case, version=LAYOUT_SWIZZLED, fp8_every=fp8_every)
    slab, q, batch, tokens = case.build()
    got = case.attend(GpuOps(device, slab, case.layout, max_queries=most), q, batch)
    assert_close(got, dense_attention(case, q, tokens), case.fmt)


@pytest.mark.parametrize("fp8_every", [0, 2])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_equals_the_twin_on_a_mixed_batch(device, fmt, fp8_every):
    case = replace(MIXED, fmt=fmt, fp8_every=fp8_every)
    slab, q, batch, _ = case.build()
    twin = case.attend(TwinOps(slab, case.layout), q, batch)
    assert_close(case.attend(GpuOps(device, slab, case.layout), q, batch), twin, fmt)


@pytest.mark.parametrize("dims", LARGE, ids=str)
@pytest.mark.parametrize("fmt", [Format.F32, Format.BF16], ids=lambda f: f.name)
def test_heads_of_any_dimensions(device, fmt, dims):
    case = replace(MIXED, sequences=((1, 100), (20, 60), (1, 1)), dims=dims, fmt=fmt, fp8_every=3)
    case = with_params(case, scale=dims[0] ** -0.5)
    slab, q, batch, tokens = case.build()
    assert_close(case.attend(GpuOps(device, slab, case.layout), q, batch), dense_attention(case, q, tokens), fmt)


@pytest.mark.parametrize("size", [8, 16, 64, 128])
@pytest.mark.parametrize("group", [1, 5, 16, 40])
def test_every_block_size_and_group_around_the_edges_of_blocks(device, size, group):
    lengths = (0, 1, size - 1, size, size + 1)
    case = Case(
        sequences=(*((min(1, n), n) for n in lengths), (size + 1, size + 1), (2, 2 * size)),
        block_size=size,
        group=group,
        version=LAYOUT_SWIZZLED,
    )
    slab, q, batch, tokens = case.build()
    assert_close(case.attend(GpuOps(device, slab, case.layout), q, batch), dense_attention(case, q, tokens), case.fmt)


LONG = Case(sequences=((1, 5003), (1, 17), (1, 2048)), dims=(64, 64), heads=1, group=4, version=LAYOUT_SWIZZLED)
LONG = with_params(LONG, scale=0.125)
SINKS = np.linspace(-2, 3, 4, dtype=np.float32)


@pytest.mark.parametrize(
    "changes", [{}, {"window": 900}, {"window": 3}, {"chunk": 1500}, {"sinks": SINKS}, {"softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_long_contexts_are_split_and_merged(device, fmt, changes):
    case = with_params(replace(LONG, fmt=fmt, fp8_every=5), **changes)
    slab, q, batch, tokens = case.build()
    assert_close(case.attend(GpuOps(device, slab, case.layout), q, batch), dense_attention(case, q, tokens), fmt)


@pytest.mark.parametrize("case", [MIXED, LONG], ids=["mixed", "long"])
def test_running_twice_gives_the_same_bits(device, case):
    slab, q, batch, _ = case.build()
    ops = GpuOps(device, slab, case.layout)
    first = case.attend(ops, q, batch)
    for _ in range(5):
        assert first.tobytes() == case.attend(ops, q, batch).tobytes()


def test_a_sequence_is_the_same_alone_and_in_a_batch(device):
    slab, q, batch, _ = MIXED.build()
    ops = GpuOps(device, slab, MIXED.layout)
    together = MIXED.attend(ops, q, batch)
    for s in range(len(MIXED.sequences)):
        alone, rows = only(batch, q, s)
        first, last = batch.cu_q_lens[s], batch.cu_q_lens[s + 1]
        assert_close(MIXED.attend(ops, rows, alone), together[first:last], MIXED.fmt)


@pytest.mark.parametrize(("fmt", "constant"), [(Format.F32, 1.0), (Format.F16, -0.25), (Format.BF16, -0.37)])
@pytest.mark.parametrize("queries", [1, 50])
def test_a_constant_v_comes_out_as_that_constant(device, fmt, constant, queries):
    case = Case(((queries, 900),), fmt, constant_v=constant, dims=(64, 64), version=LAYOUT_SWIZZLED)
    slab, q, batch, tokens = case.build()
    got = case.attend(GpuOps(device, slab, case.layout), q, batch)
    expected = np.broadcast_to(decode(fmt, tokens[0][1][0, 0, 0]), got.shape)
    np.testing.assert_allclose(got, expected, rtol=1e-6 if fmt is Format.F32 else 0)


def test_a_sequence_without_queries_or_tokens_and_tokens_of_no_sequence_write_nothing(device):
    case = Case(sequences=((0, 30), (0, 0), (1, 5)), version=LAYOUT_SWIZZLED)
    slab, q, batch, _ = case.build()
    batch = AttentionBatch(np.array([0, 0, 2, 3], np.int32), batch.kv_lens, batch.block_tables)
    q = np.concatenate([q] * 6)
    got = case.attend(GpuOps(device, slab, case.layout), q, batch)
    assert np.isnan(got[[0, 1, 3, 4, 5]]).all()
    assert np.isfinite(got[2]).all()


def test_nan_in_a_query_stays_in_its_rows(device):
    case = Case(sequences=((1, 40), (40, 40)), version=LAYOUT_SWIZZLED)
    slab, q, batch, _ = case.build()
    ops = GpuOps(device, slab, case.layout)
    clean = case.attend(ops, q, batch)
    q[0, 0, 3] = q[11, 2, 0] = np.nan
    got = case.attend(ops, q, batch)
    hit = np.isnan(got).all(axis=2)
    assert np.argwhere(hit).tolist() == [[0, 0], [11, 2]]
    assert np.array_equal(got[~hit], clean[~hit])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_strides_of_queries_and_outputs_may_be_odd_and_what_lies_between_stays(device, fmt):
    case = replace(MIXED, sequences=((1, 40), (40, 40)), fmt=fmt)
    slab, q, batch, _ = case.build()
    ops = GpuOps(device, slab, case.layout)
    expected = case.attend(ops, q, batch)
    room = np.full((q.shape[1], len(q) + 2, 19), 77, q.dtype)
    strided = np.full((q.shape[1] + 1, len(q), 17), 55, q.dtype).transpose(1, 0, 2)[:, 1:, :16]
    strided[:] = q
    out = room.transpose(1, 0, 2)[: len(q), :, :16]
    ops.attend(LAYER, strided, out, batch, case.params)
    assert np.array_equal(decode(fmt, np.ascontiguousarray(out)), expected)
    out[:] = 77
    assert (room == 77).all()


@pytest.mark.parametrize("fmt", [Format.F16, Format.BF16], ids=lambda f: f.name)
def test_queries_and_outputs_may_be_float32_over_a_16_bit_pool(device, fmt):
    case = replace(MIXED, fmt=fmt)
    slab, q, batch, tokens = case.build()
    wide = decode(fmt, q)
    out = np.full(wide.shape, np.nan, np.float32)
    GpuOps(device, slab, case.layout).attend(LAYER, wide, out, batch, case.params)
    np.testing.assert_allclose(out, dense_attention(case, q, tokens), rtol=4e-6, atol=4e-6)


def test_scores_that_overflow_in_f16_do_not(device):
    case = with_params(replace(MIXED, fmt=Format.F16), scale=60.0)
    slab, q, batch, tokens = case.build()
    got = case.attend(GpuOps(device, slab, case.layout), q, batch)
    assert_close(got, dense_attention_stable(case, q, tokens), Format.F16)


def dense_attention_stable(case, q, tokens):
    """The twin subtracts the maximum; kernel_cases.dense_attention does not, and overflows."""
    slab, _, batch, _ = case.build()
    return case.attend(TwinOps(slab, case.layout), q, batch)


@pytest.mark.parametrize(
    ("q", "out", "complaint"),
    [
        ((2, 6, 15), (2, 6, 16), r"q has shape \(2, 6, 15\), but must be \[T, Hq, D\]"),
        ((2, 6, 16), (2, 5, 16), r"out has shape \(2, 5, 16\), but must be \[T, Hq, Dv\]"),
        ((2, 5, 16), (2, 5, 16), "Hq = 5 heads, but must have a multiple of H = 2"),
    ],
)
def test_attend_refuses_what_does_not_fit_and_says_why(device, q, out, complaint):
    case = Case(sequences=((2, 9),), version=LAYOUT_SWIZZLED)
    slab, _, batch, _ = case.build()
    ops = GpuOps(device, slab, case.layout)
    with pytest.raises(ValueError, match=complaint):
        ops.attend(LAYER, np.zeros(q, np.float32), np.zeros(out, np.float32), batch, AttentionParams(1.0))


def test_a_linear_pool_is_refused(device):
    case = Case(sequences=((2, 9),))
    with pytest.raises(ValueError, match=r"layout.version is 1, but the CUDA kernels read version 2 only"):
        GpuOps(device, encode(Format.F32, np.zeros(case.layout.block_bytes)).view(np.uint8), case.layout)
