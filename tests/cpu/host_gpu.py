"""A GPU whose memory is the host's and whose kernels are the CPU's, each done as soon as it is launched.

So the whole CudaRunner runs where there is no GPU: what it stages, pads, launches, replays and reads back. What the
kernels themselves compute, and when, only tests/gpu can say.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inferd.model import cuda_runner
from inferd.model.cuda_runner import CudaRunner, DevicePool, RunnerLimits, compiled
from inferd.model.load import ServedModel
from pagekernels.cpu.ops import CpuOps
from pagekernels.cuda.arrays import DeviceArray
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.decode_shape import Tuning
from pagekernels.layout import PagedLayout
from pagekernels.ops import AttentionBatch, AttentionParams
from tests.cpu.logits_work import TwinSampler


class HostApi:
    """The calls of pycuda.driver that a runner makes."""

    event_flags = SimpleNamespace(BLOCKING_SYNC=1, DISABLE_TIMING=2)
    pagelocked_empty = staticmethod(np.empty)

    def mem_alloc(self, size: int) -> Memory:
        return Memory(size)

    def memset_d8_async(self, address: Any, value: int, size: int, _stream: Any) -> None:
        ctypes.memset(int(address), value, size)

    def memcpy_htod_async(self, address: int, source: npt.NDArray[Any], _stream: Any) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def memcpy_dtoh_async(self, target: npt.NDArray[Any], address: int, _stream: Any) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def Event(self, _flags: int) -> Any:  # noqa: N802 pycuda's name
        return SimpleNamespace(
            record=lambda _stream: None,
            synchronize=lambda: None,
            query=lambda: True,
            time_since=lambda _event: 0.1,
        )


class Memory:
    """pycuda.driver.DeviceAllocation."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, np.uint8)

    def __int__(self) -> int:
        return int(self._bytes.ctypes.data)


@dataclass
class HostDevice:
    api: HostApi = field(default_factory=HostApi)
    index: int = 0
    stream: str = "stream"
    stream_handle: int = 1

    def synchronize(self) -> None:
        """Everything has been done already."""


def host(array: DeviceArray) -> npt.NDArray[Any]:
    buffer = (ctypes.c_uint8 * array.nbytes).from_address(array.data_ptr())
    return np.frombuffer(buffer, array.dtype).reshape(array.shape)


class HostOps:
    """pagekernels.cuda.ops.CudaOps by the CPU's kernels."""

    def __init__(
        self, _device: Any, addresses: Sequence[int], layout: PagedLayout, _layers: Any, tuning: Tuning
    ) -> None:
        size = layout.block_bytes * HostGraphs.num_blocks
        self._ops = CpuOps(np.frombuffer((ctypes.c_uint8 * size).from_address(addresses[0]), np.uint8), layout)
        self.tuning, self.is_loaded = tuning, False

    def plan(self, batch: DeviceBatch) -> None:
        """Nothing to plan."""

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: DeviceBatch) -> None:
        self._ops.append(layer, array_of(k), array_of(v), host(batch.slots)[: len(k)].copy())

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, batch: DeviceBatch, params: AttentionParams
    ) -> None:
        """Rows of no sequence, which the CPU's kernel does not have, become 0."""
        cu_q_lens = host(batch.cu_q_lens).copy()
        count = int(cu_q_lens[-1])
        found = np.zeros((count, *out.shape[1:]), np.float32)
        where = AttentionBatch(cu_q_lens, host(batch.kv_lens).copy(), host(batch.block_tables).copy())
        self._ops.attend(layer, array_of(q)[:count], found, where, params)
        out.zero_()
        out[:count] = torch.from_numpy(found)

    def copy_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        self._ops.copy_blocks(sources, targets)

    def compress_blocks(
        self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32], errors: torch.Tensor
    ) -> None:
        errors.copy_(torch.from_numpy(self._ops.compress_blocks(sources, targets)))

    def decompress_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        self._ops.decompress_blocks(sources, targets)

    def load_compression(self) -> None:
        self.is_loaded = True

    def close(self) -> None:
        """Nothing to give back."""


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.contiguous().numpy()
    return array


class HostSampler(TwinSampler):
    """GpuSampler, with its checks and its `resolve_ids`."""

    def __init__(self, _device: Any, max_rows: int, vocab: int, dtype: str) -> None:
        super().__init__(max_rows)
        self._vocab, self._dtype = vocab, dtype

    def sample(self, logits: torch.Tensor, rows: int, tokens: int, *, greedy_only: bool = False) -> None:
        assert logits.shape[1] == self._vocab
        assert str(logits.dtype) == f"torch.{self._dtype}"
        super().sample(logits, rows, tokens, greedy_only=greedy_only)

    def resolve_ids(self, ids: int, id_bytes: int, num_ids: int, tokens: int) -> None:
        assert id_bytes == 8
        there = np.frombuffer((ctypes.c_int64 * num_ids).from_address(ids), np.int64)
        for at in np.flatnonzero(there < 0).tolist():
            row = -1 - int(there[at])
            there[at] = max(ctypes.c_int32.from_address(tokens + 4 * row).value, 0)


@dataclass
class HostGraph:
    """A captured step: run again, over what its buffers hold now, into where it was captured."""

    run: Callable[[], torch.Tensor]
    made: torch.Tensor
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.made.copy_(self.run())


class HostGraphs:
    """inferd.model.cuda_graphs.Graphs. All graphs leave their results in one memory, as those of one pool may."""

    num_blocks = 0
    _memory: torch.Tensor | None = None

    def __init__(self, _stream: Any) -> None:
        self.captured: list[HostGraph] = []

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[HostGraph, torch.Tensor]:
        made = run()
        if self._memory is None:
            self._memory = torch.empty(4096, made.shape[1], dtype=made.dtype)
        place = self._memory[: len(made)]
        self.captured.append(HostGraph(run, place))
        return self.captured[-1], place

    def drop(self) -> None:
        self.captured.clear()


@contextmanager
def host_runner(
    served: ServedModel,
    block_size: int,
    num_blocks: int,
    limits: RunnerLimits,
    patch: pytest.MonkeyPatch,
    *,
    fp8: bool = False,
) -> Iterator[CudaRunner]:
    """A CudaRunner over a pool of so many blocks, full of NaN, in this process's memory."""
    as_tensor = torch.as_tensor

    def as_host_tensor(data: Any, **options: Any) -> torch.Tensor:
        return torch.from_numpy(host(data)) if isinstance(data, DeviceArray) else as_tensor(data, **options)

    patch.setattr(torch, "as_tensor", as_host_tensor)
    patch.setattr(torch.cuda, "ExternalStream", lambda *_, **__: SimpleNamespace(synchronize=lambda: None))
    patch.setattr(torch.cuda, "stream", nullcontext)
    patch.setattr(cuda_runner, "CudaOps", HostOps)
    patch.setattr(cuda_runner, "GpuSampler", HostSampler)
    patch.setattr(cuda_runner, "Graphs", HostGraphs)
    patch.setattr(HostGraphs, "num_blocks", num_blocks)
    layout = served.layout(block_size)
    slab = np.full(layout.block_bytes * num_blocks, 0xFF, np.uint8)
    pool = DevicePool((int(slab.ctypes.data),), layout, fp8)
    device: Any = HostDevice()
    runner = CudaRunner(served, compiled(served, compile_=False), device, pool, limits)
    try:
        runner.capture(lambda _line: None)
        yield runner
    finally:
        runner.close()
