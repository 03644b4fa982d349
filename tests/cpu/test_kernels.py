"""The CPU kernels and their twin against each other and against a plain dense softmax."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import pagekernels
from pagekernels.cpu import configure
from pagekernels.layout import Format
from pagekernels.ops import AttentionBatch, AttentionParams
from pagekernels.twin import TwinOps, decode
from tests.cpu.kernel_cases import FORMATS, LAYER, TOLERANCE, Case, cases, dense_attention, only, with_params


@pytest.fixture(scope="module", autouse=True)
def _threads():
    configure(2)


def open_cpu(slab, layout):
    return pagekernels.open_ops(slab, layout)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_kernels_equal_a_dense_softmax_and_never_read_what_is_unused(case):
    slab, q, batch, tokens = case.build()
    expected = dense_attention(case, q, tokens)
    got = case.attend(open_cpu(slab, case.layout), q, batch)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[case.fmt], atol=TOLERANCE[case.fmt])


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_the_twin_equals_a_dense_softmax(case):
    slab, q, batch, tokens = case.build()
    got = case.attend(TwinOps(slab, case.layout), q, batch)
    tolerance = 1e-6 if case.fmt is Format.F32 else TOLERANCE[case.fmt]
    np.testing.assert_allclose(got, dense_attention(case, q, tokens), rtol=tolerance, atol=tolerance)


MIXED = Case(sequences=((1, 700), (90, 90), (0, 40), (1, 33), (3, 300), (0, 0), (60, 500)), heads=3, group=3)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_kernels_equal_the_twin_on_a_mixed_batch(fmt):
    case = replace(MIXED, fmt=fmt)
    slab, q, batch, _ = case.build()
    twin = case.attend(TwinOps(slab, case.layout), q, batch)
    got = case.attend(open_cpu(slab, case.layout), q, batch)
    np.testing.assert_allclose(got, twin, rtol=TOLERANCE[fmt], atol=TOLERANCE[fmt])


@pytest.mark.parametrize("dims", [(512, 512), (192, 128)], ids=str)
def test_large_heads_equal_a_dense_softmax(dims):
    case = Case(sequences=((1, 100), (20, 60)), dims=dims, params=AttentionParams(dims[0] ** -0.5))
    slab, q, batch, tokens = case.build()
    got = case.attend(open_cpu(slab, case.layout), q, batch)
    np.testing.assert_allclose(got, dense_attention(case, q, tokens), rtol=4e-6, atol=4e-6)


def test_running_twice_gives_the_same_bits():
    slab, q, batch, _ = MIXED.build()
    ops = open_cpu(slab, MIXED.layout)
    first = MIXED.attend(ops, q, batch)
    for _ in range(5):
        assert first.tobytes() == MIXED.attend(ops, q, batch).tobytes()


def test_the_number_of_threads_changes_no_bit():
    slab, q, batch, _ = MIXED.build()
    many = MIXED.attend(open_cpu(slab, MIXED.layout), q, batch)
    configure(1)
    one = MIXED.attend(open_cpu(slab, MIXED.layout), q, batch)
    configure(2)
    assert many.tobytes() == one.tobytes()


@pytest.mark.parametrize("changes", [{}, {"window": 300}, {"softcap": 5.0}], ids=str)
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(changes):
    case = with_params(MIXED, **changes)
    slab, q, batch, _ = case.build()
    ops = open_cpu(slab, case.layout)
    together = case.attend(ops, q, batch)
    for s in range(len(case.sequences)):
        alone, rows = only(batch, q, s)
        first, last = batch.cu_q_lens[s], batch.cu_q_lens[s + 1]
        assert together[first:last].tobytes() == case.attend(ops, rows, alone).tobytes()


def test_a_chunked_prefill_gets_the_same_bits_as_a_whole_one():
    case = Case(sequences=((200, 200),), heads=1, group=3)
    slab, q, batch, _ = case.build()
    ops = open_cpu(slab, case.layout)
    whole = case.attend(ops, q, batch)
    chunks = []
    for first, last in ((0, 77), (77, 130), (130, 200)):
        chunk = AttentionBatch(np.array([0, last - first], np.int32), np.array([last], np.int32), batch.block_tables)
        chunks.append(case.attend(ops, q[first:last], chunk))
    assert whole.tobytes() == np.concatenate(chunks).tobytes()


@pytest.mark.parametrize(("fmt", "constant"), [(Format.F32, 1.0), (Format.F32, -0.25), (Format.BF16, -0.37)])
@pytest.mark.parametrize("queries", [1, 50])
def test_a_constant_v_comes_out_as_exactly_that_constant(fmt, constant, queries):
    """A power of two in float32: weights are summed for the numerator and the denominator in the same order."""
    case = Case(sequences=((queries, 900),), fmt=fmt, constant_v=constant, dims=(64, 64))
    slab, q, batch, tokens = case.build()
    got = case.attend(open_cpu(slab, case.layout), q, batch)
    assert np.all(got == decode(fmt, tokens[0][1][0, 0, 0]))


def test_a_sequence_without_queries_or_without_tokens_writes_nothing():
    case = Case(sequences=((0, 30), (0, 0), (1, 5)))
    slab, q, batch, _ = case.build()
    batch = AttentionBatch(np.array([0, 0, 2, 3], np.int32), batch.kv_lens, batch.block_tables)
    q = np.concatenate([q, q, q])
    for ops in (open_cpu(slab, case.layout), TwinOps(slab, case.layout)):
        got = case.attend(ops, q, batch)
        assert np.isnan(got[:2]).all()
        assert np.isfinite(got[2]).all()


def test_nan_in_a_query_stays_in_its_rows():
    case = Case(sequences=((1, 40), (40, 40)))
    slab, q, batch, _ = case.build()
    clean = case.attend(open_cpu(slab, case.layout), q, batch)
    q[0, 0, 3] = q[11, 2, 0] = np.nan
    got = case.attend(open_cpu(slab, case.layout), q, batch)
    hit = np.isnan(got).all(axis=2)
    assert np.argwhere(hit).tolist() == [[0, 0], [11, 2]]
    assert np.array_equal(got[~hit], clean[~hit])


def test_queries_of_any_strides_are_taken():
    case = Case(sequences=((1, 40), (40, 40)))
    slab, q, batch, _ = case.build()
    expected = case.attend(open_cpu(slab, case.layout), q, batch)
    strided = np.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2)
    out = np.zeros((4, 41, 16), np.float32).transpose(1, 0, 2)
    open_cpu(slab, case.layout).attend(LAYER, strided, out, batch, case.params)
    assert np.array_equal(out, expected)
