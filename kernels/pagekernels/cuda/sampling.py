"""Sampling on the GPU: the host's side of sample.cu and sample_cut.cu.

The tokens are those of inferd's CPU sampler, except where a sum of exponentials that differs in its last bits decides
which token is the last that top_p keeps.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Protocol

import numpy as np

from pagekernels.cuda.device import CudaDevice

ROW_BYTES = 48
MAX_VOCAB = 1 << 18
THREADS, CUT_THREADS, MAX_SPLITS, WIDE = 256, 1024, 64, 8
"""As in the sources."""

_HEAD = struct.Struct("<ffiidQQ")  # temperature, floor, top_k, unused, top_p, seed, sample_index; then the position
_POSITION = struct.Struct("<Q")
_ARGUMENTS = struct.Struct("PqiiPPPPPPP")
_RESOLVE = struct.Struct("PiP")
LOGITS = {"float32": 0, "float16": 1, "bfloat16": 2}
_SCRATCH = (8 * MAX_SPLITS, 16 * MAX_SPLITS, 8, 4, 4)  # bytes a row, in the order of struct Work
_MIN_TEMPERATURE = 1e-30


class Sampling(Protocol):
    """How a token is chosen, as in inferd's API."""

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        ...

    @property
    def top_p(self) -> float:
        """Above 0; 1 keeps all."""
        ...

    @property
    def top_k(self) -> int:
        """0 keeps all."""
        ...

    @property
    def min_p(self) -> float:
        """From 0, which keeps all, to 1."""
        ...

    @property
    def seed(self) -> int:
        """Any 64 bits."""
        ...

    @property
    def sample_index(self) -> int:
        """Any 64 bits."""
        ...


class Logits(Protocol):
    """Logits on the device: [rows, vocab], the last dimension contiguous; a torch tensor is one."""

    @property
    def shape(self) -> Any:
        """(rows, vocab)."""
        ...

    def data_ptr(self) -> int:
        """The device address."""
        ...

    def stride(self) -> Any:
        """In elements."""
        ...


def pack_head(sampling: Sampling) -> bytes:
    """What of a row's record stays the same from token to token: 40 bytes, followed by pack_position's."""
    temperature = max(sampling.temperature, _MIN_TEMPERATURE) if sampling.temperature > 0 else 0.0
    return _HEAD.pack(
        temperature,
        _floor(sampling.min_p),
        min(sampling.top_k, MAX_VOCAB),
        0,
        sampling.top_p,
        sampling.seed,
        sampling.sample_index,
    )


def pack_position(position: int) -> bytes:
    """The rest of a row's record: the position, in its sequence, of the token to come."""
    return _POSITION.pack(position)


PADDING = _HEAD.pack(-1.0, 0.0, 0, 0, 1.0, 0, 0) + _POSITION.pack(0)
"""The record of a row that is left alone: its token is not written."""


def _floor(min_p: float) -> float:
    """The least float32 score that min_p keeps: scores are compared with its logarithm in double precision."""
    if min_p <= 0:
        return -math.inf
    exact = math.log(min_p)
    rounded = np.float32(exact)
    return float(rounded if float(rounded) >= exact else np.nextafter(rounded, np.float32(math.inf)))


class GpuSampler:
    """Samples up to `max_rows` rows of `vocab` logits of `dtype` ("float32", "float16" or "bfloat16").

    All memory and kernels are there once it is made; every method only launches on the device's stream, so it can be
    captured in a CUDA graph. One step at a time: steps on one stream share its scratch. Raises ValueError for a
    vocabulary above MAX_VOCAB, KeyError for another dtype.
    """

    def __init__(self, device: CudaDevice, max_rows: int, vocab: int, dtype: str = "bfloat16") -> None:
        if vocab > MAX_VOCAB:
            raise ValueError(f"the vocabulary is {vocab} tokens, but the sampling kernels take at most {MAX_VOCAB}")
        from pycuda import driver

        defines = {"LOGITS": LOGITS[dtype]}
        self._item = 4 if dtype == "float32" else 2
        self._max_rows, self._vocab, self._num_sms = max_rows, vocab, device.num_sms
        self._top = device.kernel("sample.cu", "sample_top", defines)
        self._draw = device.kernel("sample.cu", "sample_draw", defines)
        self._cut = device.kernel("sample_cut.cu", "sample_cut", defines)
        self._resolve = {
            4: device.kernel("sample.cu", "resolve_ids_32", defines),
            8: device.kernel("sample.cu", "resolve_ids_64", defines),
        }
        size = sum(_SCRATCH) * max_rows
        self._memory: Any = driver.mem_alloc(size)
        driver.memset_d8_async(self._memory, 0, size, device.stream)  # which waits for no other stream
        self._work = self._addresses(int(self._memory))

    def _addresses(self, base: int) -> tuple[int, ...]:
        addresses = []
        for row_bytes in _SCRATCH:
            addresses.append(base)
            base += row_bytes * self._max_rows
        return tuple(addresses)

    def sample(self, logits: Logits, rows: int, tokens: int, *, greedy_only: bool = False) -> None:
        """Launch the sampling of logits [R, vocab] into int32 tokens [R]; -1 for logits with a NaN or nothing finite.

        rows, tokens: device addresses of R records of ROW_BYTES (pack_head, pack_position or PADDING) and of R int32.
        greedy_only: the caller knows that every record is of temperature 0 or PADDING, which saves two empty launches.
        """
        num_rows, vocab = logits.shape
        stride, step = logits.stride()
        if num_rows > self._max_rows or vocab != self._vocab or step != 1:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} and strides {logits.stride()}, but the sampler was made for at "
                f"most {self._max_rows} rows of {self._vocab} contiguous logits"
            )
        address = logits.data_ptr()
        aligned = address % 16 == 0 and stride * self._item % 16 == 0
        args = _ARGUMENTS.pack(address, stride, vocab, aligned, rows, *self._work, tokens)
        grid = (self._splits(num_rows), num_rows, 1)
        self._top.launch(grid, (THREADS, 1, 1), args)
        if not greedy_only:
            self._cut.launch((num_rows, 1, 1), (CUT_THREADS, 1, 1), args[: -struct.calcsize("P")])  # no tokens
            self._draw.launch(grid, (THREADS, 1, 1), args)

    def _splits(self, num_rows: int) -> int:
        """CTAs a row: enough to fill the device, and a token's work for each thread."""
        return max(1, min(MAX_SPLITS, 4 * self._num_sms // num_rows, -(-self._vocab // (THREADS * WIDE))))

    def resolve_ids(self, ids: int, id_bytes: int, num_ids: int, tokens: int) -> None:
        """Replace, in place, each id of -1 - r by the token of row r of the step sampled before, 0 if it has none.

        ids, tokens: device addresses of num_ids integers of id_bytes (4 or 8) and of the int32 tokens that `sample`
        wrote.
        """
        grid = (-(-num_ids // THREADS), 1, 1)
        self._resolve[id_bytes].launch(grid, (THREADS, 1, 1), _RESOLVE.pack(ids, num_ids, tokens))

    def close(self) -> None:
        """Free the scratch; on the device's thread, and after the last graph that uses it. Again does nothing."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None
