"""The tokens of steps in flight on a GPU, and the logprobs that some ask for, on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inferd.logprobs import Scores
from inferd.model.cuda_logits import Asked
from inferd.surroundings import DeviceLostError
from pagekernels.cuda.device import CudaDevice

DEPTH = 2
"""Steps in flight: one runs, and the next is there when it ends."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on the GPU; `ended` is recorded behind the copies of its tokens into `host`, and of what was `asked`."""

    host: Any
    count: int
    began: Any
    ended: Any
    asked: Asked | None = None

    @property
    def forward_s(self) -> float:
        """Seconds that the step took on the GPU, sampling included, which is part of the same graph."""
        return float(self.ended.time_since(self.began)) / 1e3

    def tokens(self) -> list[int]:
        """See inferd.surroundings.Pending."""
        with device_errors():
            self.ended.synchronize()
        tokens: list[int] = self.host[: self.count].tolist()
        return tokens

    def scores(self) -> Scores | None:
        """See inferd.surroundings.Scoring."""
        return None if self.asked is None else self.asked.scores()


class device_errors:  # noqa: N801 (a context manager reads like a function)
    """After an error of the driver the context is of no more use."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        name = type(error).__name__
        if error is None or isinstance(error, torch.cuda.OutOfMemoryError) or name == "MemoryError":
            return  # no memory is no reason to give the device up
        if isinstance(error, torch.AcceleratorError) or type(error).__module__.startswith("pycuda"):
            raise DeviceLostError(f"{name}: {error}") from error


class TokenRing:
    """Pinned memory for the tokens of the steps in flight, and their events. One more than may be in flight."""

    def __init__(self, device: CudaDevice, rows: int) -> None:
        flags = device.api.event_flags.BLOCKING_SYNC
        self._slots = [
            _Slot(device, device.api.pagelocked_empty(rows, np.int32), device.api.Event(flags), device.api.Event(flags))
            for _ in range(DEPTH + 1)
        ]
        self._turn = 0

    def begin(self) -> _Slot:
        """The next slot, its first event recorded."""
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        slot.began.record(slot.device.stream)
        return slot


@dataclass(frozen=True, slots=True)
class _Slot:
    device: CudaDevice
    host: Any
    began: Any
    ended: Any

    def end(self, tokens: int, count: int, asked: Asked | None) -> Launched:
        if count:
            self.device.api.memcpy_dtoh_async(self.host[:count], tokens, self.device.stream)
        self.ended.record(self.device.stream)
        return Launched(self.host, count, self.began, self.ended, asked)
