"""Penalties, bias and logprobs on the GPU: what the CPU engine says of the same logits, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inferd.adjust import adjusted
from inferd.core.ports import Target
from inferd.logprobs import logprobs_of, score
from inferd.model.cuda_graphs import Graphs
from inferd.model.cuda_logits import LogitsWork, rows_at_once
from inferd.model.row_adjust import adjust_
from inferd.model.row_logprobs import packed_logprobs, unpacked
from inferd.sampler import Row, sample
from pagekernels.cuda.device import CudaDevice
from pagekernels.cuda.sampling import GpuSampler
from tests.cpu.test_adjust import SETTINGS, extras, histories
from tests.cpu.test_row_logits import expect_equal, mixed_rows, rows_of, some_extras

QWEN = 152064
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def stream(device: CudaDevice) -> Iterator[torch.cuda.Stream]:
    """The device's stream as torch's current one, as the runner has it."""
    ours = torch.cuda.ExternalStream(device.stream_handle)
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.stream(ours):
        yield ours


@pytest.mark.parametrize("vocab", [60, 700, QWEN])
def test_each_row_becomes_bit_for_bit_what_the_cpu_makes_of_it(stream: torch.cuda.Stream, vocab: int) -> None:
    logits, asked = rows_of(40, vocab, step=0.5), some_extras(40, vocab)
    logits[3, ::2] = -torch.inf
    wanted = np.stack([adjusted(row, each) for row, each in zip(logits.numpy(), asked, strict=True)])
    scores = logits.cuda()
    adjust_(scores, asked)
    stream.synchronize()
    assert np.array_equal(scores.cpu().numpy().view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize(("scale", "step"), [(0.1, 0.0), (3.0, 0.5), (40.0, 0.0), (3.0, 3.0)])
@pytest.mark.parametrize("vocab", [1, 2, 60, QWEN, 262144])
def test_logprobs_are_those_of_the_cpu(stream: torch.cuda.Stream, vocab: int, scale: float, step: float) -> None:
    logits = rows_of(9, vocab, scale, step)
    tokens = [7 * index % vocab for index in range(8)] + [-1]
    tops = [20, 0, 1, 5, 16, 2, 3, 4, 5]
    found = packed_logprobs(logits.cuda(), torch.tensor(tokens, device="cuda"), 20)
    stream.synchronize()
    values = unpacked(found.tolist(), tops)
    for each, row, token, top in zip(values, logits.numpy(), tokens, tops, strict=True):
        expect_equal(each, logprobs_of(row, token, top))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_have_no_logprobs(stream: torch.cuda.Stream, bad: float) -> None:
    logits = rows_of(3, 60)
    logits[1, slice(None) if bad < 0 else 5] = bad
    found = packed_logprobs(logits.cuda(), torch.tensor([4, 4, 4], device="cuda"), 2)
    stream.synchronize()
    assert [each is None for each in unpacked(found.tolist(), [2, 2, 2])] == [False, True, False]


def on_gpu(device: CudaDevice, vocab: int, most: int, plain: list[int]) -> tuple[LogitsWork, torch.Tensor]:
    """The work behind a step that has sampled these tokens, and where they are."""
    tokens = torch.full((most,), -7, dtype=torch.int32, device="cuda")
    tokens[: len(plain)] = torch.tensor(plain, dtype=torch.int32, device="cuda")
    sampler = GpuSampler(device, min(rows_at_once(vocab), most), vocab, "float32")
    return LogitsWork(sampler, tokens, vocab, most), tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [300, 20001, QWEN])
def test_tokens_and_logprobs_of_a_step_are_those_of_the_cpu_engine(
    device: CudaDevice, stream: torch.cuda.Stream, vocab: int, dtype: torch.dtype
) -> None:
    """Of the largest vocabulary more rows than are worked on at once."""
    most, count = 70, 61
    rows = mixed_rows(count, vocab)
    targets = [Target(0, 7 * index % vocab, index % 3) for index in range(20)]
    logits = rows_of(most + len(targets), vocab).to(dtype)
    values = logits.float()
    work, tokens = on_gpu(device, vocab, most, sample(values[:count], [row._replace(extras=None) for row in rows]))
    asked = work.launch(logits.cuda(), rows, targets)
    stream.synchronize()
    said, expected = tokens[:count].tolist(), sample(values[:count], rows)
    others = [row for row, ours, theirs in zip(rows, said, expected, strict=True) if ours != theirs]
    # exp is rounded otherwise there, which may decide which token is the last that top_p keeps.
    assert len(others) <= 1
    assert all(row.sampling.top_p < 1 for row in others)
    assert tokens[count:].tolist() == [-7] * (most - count)
    wanted = score(torch.cat([values[:count], values[most:]]), targets, rows, said)
    assert asked is not None
    assert wanted is not None
    found = asked.scores()
    for ours, theirs in zip(found.sampled + found.prompt, wanted.sampled + wanted.prompt, strict=True):
        expect_equal(ours, theirs)
    work.close()


def test_histories_that_grow_behind_the_launch_do_not_change_it(device: CudaDevice, stream: torch.cuda.Stream) -> None:
    """The copy is still to come when the host goes on: what it was told is in pinned memory of its own."""
    prompt, generated = histories(1, QWEN)[0]
    asked = extras(SETTINGS["all"], prompt, generated)
    logits = rows_of(1, QWEN)
    row = Row(mixed_rows(1, QWEN)[0].sampling, 9, asked)
    (expected,) = sample(logits, [row])
    work, tokens = on_gpu(device, QWEN, 2, [0])
    there = logits.cuda()
    torch.cuda._sleep(50_000_000)
    work.launch(there, [row], [])
    assert asked.history is not None
    for _ in range(100):
        asked.history.add(expected)
    for _ in range(20):  # other uses of pinned memory meanwhile
        torch.empty(1 << 12, dtype=torch.uint8, pin_memory=True).fill_(255)
    stream.synchronize()
    assert tokens[0] == expected
    work.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_graph_made_can_be_read_behind_each_replay(stream: torch.cuda.Stream, dtype: torch.dtype) -> None:
    """Graphs of several sizes that share their memory, and other allocations of this process between them."""
    graphs = Graphs(stream)
    given = torch.zeros(32, 64, dtype=dtype, device="cuda")
    sizes = (2, 8, 32)
    made = [graphs.capture(lambda size=size: (given[:size] * 2).sin().add(1)) for size in sizes]
    for trial in range(12):
        given.copy_(torch.randn(32, 64, device="cuda"))
        graph, found = made[trial % 3]
        graph.replay()
        noise = [torch.full((32, 64), 7.0, dtype=dtype, device="cuda") for _ in range(4)]
        torch.testing.assert_close(found, (given[: sizes[trial % 3]] * 2).sin().add(1))
        assert found.dtype is dtype
        del noise
    graphs.drop()
