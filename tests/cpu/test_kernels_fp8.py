"""FP8 blocks: what the CPU kernels and the twin read in them, beside native blocks of one table."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagekernels.cpu import configure
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import Format, LayerShape, PagedLayout, pack_entry
from pagekernels.ops import AttentionParams
from pagekernels.twin import TwinOps, decode, decode_e4m3, encode_e4m3
from tests.cpu.kernel_cases import FORMATS, LAYER, TOLERANCE, Case, cases, dense_attention, only

MIXED = Case(
    sequences=((1, 700), (90, 90), (0, 40), (1, 33), (3, 300), (0, 0), (60, 500)),
    heads=3,
    group=3,
    fp8_every=2,
    compressed=True,
)
HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
FINITE = HALVES[np.isfinite(HALVES)].astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _threads():
    configure(2)


def assert_attends(case):
    slab, q, batch, tokens = case.build()
    got = case.attend(CpuOps(slab, case.layout), q, batch)
    expected = dense_attention(case, q, tokens)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[case.fmt], atol=TOLERANCE[case.fmt])


def test_every_float16_is_encoded_as_the_nearest_e4m3_value_or_the_even_one_of_two():
    values = decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    distance = np.abs(np.abs(FINITE.astype(np.float64))[:, None] - values)
    near = distance == distance.min(axis=1, keepdims=True)
    even = near & (np.arange(127) % 2 == 0)
    expected = np.where(even.any(axis=1), even.argmax(axis=1), near.argmax(axis=1))
    assert np.array_equal(encode_e4m3(FINITE), expected | np.signbit(FINITE) * 0x80)


def test_e4m3_is_encoded_as_torch_does_but_what_is_too_large_saturates():
    expected = torch.from_numpy(FINITE.clip(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(encode_e4m3(FINITE), expected)
    beyond = np.array([448, 463.9, 464, 480, 1e30, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    assert encode_e4m3(beyond).tolist() == [0x7E] * 6 + [0xFE, 0x7F, 0xFF]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_every_e4m3_byte_is_read_as_the_twin_reads_it(fmt):
    layout = PagedLayout(16, (LayerShape(1, 16, 20),), fmt)
    slab = np.full(8 * layout.unit_bytes, 0xFF, np.uint8)
    slab[5 * layout.unit_bytes :][:256] = np.arange(256)
    slab[5 * layout.unit_bytes :][layout.block_elements :][:8].view(np.float32)[:] = 0.3, 7.0
    slab[5 * layout.unit_bytes :][256 : layout.block_elements] = np.resize(np.arange(256), 320)
    table = np.array([pack_entry(Format.FP8_E4M3, 0, 5)], np.uint32)
    for dtype in {np.dtype(np.float32), np.dtype(np.float32 if fmt is Format.F32 else np.uint16)}:
        ours, theirs = ([np.zeros((1, 16, d), dtype) for d in (16, 20)] for _ in range(2))
        CpuOps(slab, layout).gather(0, table, 16, *ours)
        TwinOps(slab, layout).gather(0, table, 16, *theirs)
        for x, y in zip(ours, theirs, strict=True):
            assert np.array_equal(decode(fmt, x), decode(fmt, y), equal_nan=True)
            assert np.isnan(decode(fmt, x)).sum() in (2, 3)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), fp8_every=st.sampled_from((1, 2, 3)), compressed=st.booleans())
def test_attention_equals_a_dense_softmax_of_what_the_blocks_mean(case, fp8_every, compressed):
    assert_attends(replace(case, fp8_every=fp8_every, compressed=compressed))


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (20, 20), (128, 20)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_heads_of_many_sizes_are_read(fmt, dims):
    assert_attends(replace(MIXED, fmt=fmt, dims=dims, params=AttentionParams(dims[0] ** -0.5)))


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("every", [1, 3])
def test_blocks_of_many_sizes_are_read(size, every):
    assert_attends(replace(MIXED, block_size=size, fp8_every=every, fmt=Format.BF16))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_attention_to_compressed_blocks_is_within_5_percent_of_the_original(fmt):
    case = Case(((1, 1024), (128, 512)), fmt, dims=(64, 64), params=AttentionParams(0.125), fp8_every=1)
    case.compressed = True
    slab, q, batch, _ = case.build()
    got = case.attend(CpuOps(slab, case.layout), q, batch)
    expected = dense_attention(case, q, case.originals)
    for first, last in ((0, 1), (1, 129)):
        off = np.linalg.norm(got[first:last] - expected[first:last]) / np.linalg.norm(expected[first:last])
        assert 0.01 < off < 0.05


@pytest.mark.parametrize("dims", [(16, 16), (20, 12)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_gather_reads_mixed_tables_as_the_twin_does(fmt, dims):
    case = replace(MIXED, fmt=fmt, dims=dims, sequences=((0, 117),))
    slab, _, batch, tokens = case.build()
    for dtype in {np.dtype(np.float32), np.dtype(case.dtype())}:
        ours, theirs = ([np.zeros((3, 117, d), dtype) for d in dims] for _ in range(2))
        CpuOps(slab, case.layout).gather(LAYER, batch.block_tables[0], 117, *ours)
        TwinOps(slab, case.layout).gather(LAYER, batch.block_tables[0], 117, *theirs)
        for x, y, expected in zip(ours, theirs, tokens[0], strict=True):
            assert x.tobytes() == y.tobytes()
            if dtype == np.float32:
                assert np.array_equal(x, expected.transpose(1, 0, 2))


def test_a_sequence_with_fp8_blocks_gets_the_same_bits_alone_in_any_batch_and_by_any_threads():
    slab, q, batch, _ = MIXED.build()
    together = MIXED.attend(CpuOps(slab, MIXED.layout), q, batch)
    configure(1)
    ops = CpuOps(slab, MIXED.layout)
    configure(2)
    for s in range(len(MIXED.sequences)):
        alone, rows = only(batch, q, s)
        first, last = batch.cu_q_lens[s], batch.cu_q_lens[s + 1]
        assert together[first:last].tobytes() == MIXED.attend(ops, rows, alone).tobytes()
