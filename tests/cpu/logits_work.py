"""The GPU's sampler as a twin on the CPU: what tests of cuda_logits sample with where there is no GPU."""

from __future__ import annotations

import ctypes
import math
import struct

import numpy as np
import torch

from inferd.core.messages import Sampling
from inferd.model.cuda_logits import LogitsWork
from inferd.sampler import Row, sample
from pagekernels.cuda.sampling import ROW_BYTES

_RECORD = struct.Struct("<ffiidQQQ")


class TwinSampler:
    """Reads the sampler's records at an address, as GpuSampler's kernels do, and samples as inferd.sampler does."""

    def __init__(self, max_rows: int = 1 << 20) -> None:
        self._max_rows = max_rows
        self.calls: list[int] = []

    def sample(self, logits: torch.Tensor, rows: int, tokens: int, *, greedy_only: bool = False) -> None:
        assert not greedy_only
        assert len(logits) <= self._max_rows
        assert logits.is_contiguous()
        self.calls.append(len(logits))
        records = ctypes.string_at(rows, ROW_BYTES * len(logits))
        out = np.ctypeslib.as_array((ctypes.c_int32 * len(logits)).from_address(tokens))
        for index in range(len(logits)):
            temperature, floor, top_k, _, top_p, seed, sample_index, position = _RECORD.unpack_from(
                records, ROW_BYTES * index
            )
            if temperature >= 0:
                how = Sampling(temperature, top_p, top_k, math.exp(floor), seed, sample_index)
                out[index] = sample(logits[index : index + 1].float(), [Row(how, position)])[0]

    def close(self) -> None:
        self.calls.clear()


def sampled_work(logits: torch.Tensor, rows: list[Row], most: int) -> tuple[LogitsWork, torch.Tensor, TwinSampler]:
    """The work behind a step that has sampled its rows without regard to extras, and where its tokens are."""
    tokens = torch.full((most,), -7, dtype=torch.int32)
    plain = sample(logits[: len(rows)].float(), [row._replace(extras=None) for row in rows])
    tokens[: len(rows)] = torch.tensor(plain, dtype=torch.int32)
    sampler = TwinSampler()
    return LogitsWork(sampler, tokens, logits.shape[1], most), tokens, sampler
