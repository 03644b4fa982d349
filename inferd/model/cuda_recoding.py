"""Blocks from one format to the other on a GPU, launched behind whatever was launched before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferd.model.cuda_tokens import device_errors
from inferd.model.recoding import are_compressed, entries_of
from pagekernels.cuda.device import CudaDevice
from pagekernels.cuda.ops import CudaOps


@dataclass(frozen=True, slots=True)
class LaunchedRecoding:
    """A recoding on the GPU; `ended` is recorded behind it, and behind the copy of its errors into `host`, if any."""

    ended: Any
    host: torch.Tensor | None = None

    def done(self) -> bool:
        """See inferd.surroundings.Recoding."""
        with device_errors():
            return bool(self.ended.query())

    def errors(self) -> list[float]:
        """See inferd.surroundings.Recoding."""
        with device_errors():
            self.ended.synchronize()
        return [] if self.host is None else self.host.flatten().tolist()


def launch_recoding(
    device: CudaDevice, ops: CudaOps, where: torch.device, sources: Sequence[int], targets: Sequence[int]
) -> LaunchedRecoding:
    """Launch on the device's stream, which must be torch's current one; `where` is the device as torch has it.

    ValueError if the blocks cannot be recoded.
    """
    given, wanted = entries_of(sources, targets)
    host = None
    if are_compressed(given):
        ops.decompress_blocks(given, wanted)
    else:
        errors = torch.empty((len(given), 2), dtype=torch.float32, device=where)
        ops.compress_blocks(given, wanted, errors)
        # From torch's memory: whoever gets these bytes next writes them behind this copy, on the same stream.
        host = torch.empty(errors.shape, dtype=errors.dtype, pin_memory=errors.is_cuda)
        host.copy_(errors, non_blocking=True)
    flags = device.api.event_flags
    ended = device.api.Event(flags.BLOCKING_SYNC | flags.DISABLE_TIMING)
    ended.record(device.stream)
    return LaunchedRecoding(ended, host)
