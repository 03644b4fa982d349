"""The GPU takes the token that the CPU takes, whatever the logits, the settings and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from inferd.core.messages import Sampling
from inferd.sampler import Row, sample
from pagekernels.cuda.device import CudaDevice
from pagekernels.cuda.sampling import MAX_VOCAB, PADDING, GpuSampler, pack_head, pack_position

MAX_ROWS = 128
QWEN, GEMMA = 152064, 262144
KINDS = ("plain", "tied", "flat", "two values", "peaked", "mostly -inf", "broken", "close")


def packed(rows: Sequence[Row | None]) -> torch.Tensor:
    """The records on the device; None is padding."""
    records = [pack_head(row.sampling) + pack_position(row.position) if row else PADDING for row in rows]
    return torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).cuda()


class Rig:
    """A sampler and what a step leaves."""

    def __init__(self, device: CudaDevice, vocab: int, dtype: torch.dtype) -> None:
        self._device = device
        self.sampler = GpuSampler(device, MAX_ROWS, vocab, str(dtype).removeprefix("torch."))

    def tokens(self, logits: torch.Tensor, rows: Sequence[Row | None]) -> list[int]:
        records = packed(rows)
        out = torch.full((len(rows),), -7, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        self.sampler.sample(logits, records.data_ptr(), out.data_ptr())
        self._device.synchronize()
        return [int(token) for token in out.tolist()]


def logits_of(kind: str, shape: tuple[int, int], generator: np.random.Generator) -> torch.Tensor:
    drawn = torch.from_numpy(generator.standard_normal(shape, np.float32)) * float(generator.choice([0.1, 1, 3, 8]))
    some = torch.from_numpy(generator.random(shape, np.float32)) < 0.7
    match kind:
        case "tied":
            return (drawn / 0.5).round() * 0.5
        case "flat":
            return torch.zeros(shape)
        case "two values":
            return some * 3.0
        case "peaked":
            drawn[:, int(generator.integers(shape[1]))] += 12
        case "mostly -inf":
            drawn[some] = -torch.inf
            drawn[:, 0] = 1
        case "broken":
            for row, bad in enumerate([torch.nan, torch.inf, -torch.nan, -torch.inf][: shape[0]]):
                drawn[row, int(generator.integers(shape[1]))] = bad
            drawn[-1] = -torch.inf
        case "close":
            return drawn * 1e-7 + 1
    return drawn


def some_row(generator: np.random.Generator) -> Row:
    sampling = Sampling(
        temperature=float(generator.choice([0, 1e-45, 1e-3, 0.1, 0.3, 0.7, 1, 1, 1.3, 2.5, 50])),
        top_k=int(generator.choice([0, 0, 1, 2, 20, 50, 300, 1999, 2049, 40000, 10**6])),
        top_p=float(generator.choice([1, 1, 0.999, 0.97, 0.8, 0.618, 0.05, 1e-6])),
        min_p=float(generator.choice([0, 0, 0, 0.0123, 0.1, 0.7, 1])),
        seed=int(generator.integers(1 << 63)) * 2 + 1,
        sample_index=int(generator.integers(4)),
    )
    return Row(sampling, int(generator.integers(1 << 20)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 33, 5000, 20001, QWEN, GEMMA])
def test_every_token_is_that_of_the_cpu(device: CudaDevice, vocab: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(vocab)
    rig = Rig(device, vocab, dtype)
    count, others = 0, []
    for trial in range(16 if vocab > 100_000 else 64):
        kind = KINDS[trial % len(KINDS)]
        num_rows = int(generator.choice([1, 3, 8, 20]))
        logits = logits_of(kind, (num_rows, vocab), generator).to(dtype)
        rows = [some_row(generator) for _ in range(num_rows)]
        pairs = zip(rig.tokens(logits.cuda(), rows), sample(logits.float(), rows), strict=True)
        count += num_rows
        others += [(kind, row, gpu, cpu) for row, (gpu, cpu) in zip(rows, pairs, strict=True) if gpu != cpu]
    print(f"{count} rows of {vocab} {dtype}, {len(others)} with another token")
    # exp is rounded otherwise there, which may decide which token is the last that top_p keeps.
    assert all(row.sampling.top_p < 1 for _, row, _, _ in others), others
    assert len(others) <= max(1, count // 100), others


def test_a_row_gets_the_same_token_alone_in_any_batch_and_again(device: CudaDevice) -> None:
    generator = np.random.default_rng(0)
    rig = Rig(device, QWEN, torch.bfloat16)
    logits = logits_of("plain", (MAX_ROWS, QWEN), generator).bfloat16().cuda()
    rows = [some_row(generator) for _ in range(MAX_ROWS)]
    together = rig.tokens(logits, rows)
    assert together == rig.tokens(logits, rows)
    for size in (1, 2, 5, 32):
        assert rig.tokens(logits[7 : 7 + size], rows[7 : 7 + size]) == together[7 : 7 + size]


def test_rows_may_be_strided_and_start_anywhere(device: CudaDevice) -> None:
    generator = np.random.default_rng(1)
    rig = Rig(device, 4999, torch.float16)
    wide = torch.full((8, 5200), 60000.0, dtype=torch.float16, device="cuda")
    logits = logits_of("plain", (8, 4999), generator).half()
    rows = [some_row(generator) for _ in range(8)]
    for start in (0, 1, 8, 13):
        wide.fill_(60000.0)
        wide[:, start : start + 4999] = logits
        assert rig.tokens(wide[:, start : start + 4999], rows) == sample(logits.float(), rows)


def test_padding_is_left_alone_and_greedy_rows_need_one_kernel_only(device: CudaDevice) -> None:
    generator = np.random.default_rng(2)
    rig = Rig(device, QWEN, torch.bfloat16)
    logits = logits_of("tied", (4, QWEN), generator).bfloat16()
    greedy = Row(Sampling(temperature=0), 5)
    first, second, third, fourth = rig.tokens(logits.cuda(), [greedy, None, Row(Sampling(seed=4), 9), None])
    assert (second, fourth) == (-7, -7)
    assert [first, third] == sample(logits[::2].float(), [greedy, Row(Sampling(seed=4), 9)])
    on_gpu, records = logits.cuda(), packed([greedy, None, greedy, greedy])
    out = torch.full((4,), -7, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    rig.sampler.sample(on_gpu, records.data_ptr(), out.data_ptr(), greedy_only=True)
    device.synchronize()
    wanted = logits.float().argmax(-1).tolist()
    assert out.tolist() == [wanted[0], -7, *wanted[2:]]


def test_a_captured_graph_samples_what_its_buffers_hold_now(device: CudaDevice) -> None:
    generator = np.random.default_rng(3)
    rig = Rig(device, QWEN, torch.bfloat16)
    logits = torch.zeros(8, QWEN, dtype=torch.bfloat16, device="cuda")
    records, out = packed([None] * 8), torch.zeros(8, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(device.stream_handle)):
        rig.sampler.sample(logits, records.data_ptr(), out.data_ptr())
    for kind in KINDS:
        drawn = logits_of(kind, (8, QWEN), generator).bfloat16()
        rows = [some_row(generator)._replace(position=step) for step in range(8)]
        rows = [Row(replace(row.sampling, top_p=1.0), row.position) for row in rows]
        logits.copy_(drawn)
        records.copy_(packed(rows))
        graph.replay()
        torch.cuda.synchronize()
        assert out.tolist() == sample(drawn.float(), rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_the_step_before_are_resolved(device: CudaDevice, dtype: torch.dtype) -> None:
    rig = Rig(device, 33, torch.float32)
    tokens = torch.tensor([11, 12, -1, 14], dtype=torch.int32, device="cuda")
    ids = torch.tensor([5, -1, -4, 0, -3, 7] + [-2] * 300, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    rig.sampler.resolve_ids(ids.data_ptr(), ids.element_size(), 305, tokens.data_ptr())
    device.synchronize()
    assert ids.tolist() == [5, 11, 14, 0, 0, 7] + [12] * 299 + [-2]


def test_what_the_kernels_cannot_take_is_refused(device: CudaDevice) -> None:
    with pytest.raises(ValueError, match=f"{MAX_VOCAB + 1} tokens"):
        GpuSampler(device, 1, MAX_VOCAB + 1)
    rig = Rig(device, 33, torch.float32)
    narrow, many, wide = torch.zeros(2, 32), torch.zeros(MAX_ROWS + 1, 33), torch.zeros(2, 66)
    for logits in (narrow.cuda(), many.cuda(), wide.cuda()[:, ::2]):
        with pytest.raises(ValueError, match="the sampler was made for"):
            rig.tokens(logits, [None] * len(logits))
