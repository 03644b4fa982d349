"""Shared host memory that a GPU's copy engines and kernels reach."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from pagekernels.cuda.identity import Driver


class PinError(Exception):
    """The driver does not pin this memory; the message says why, and the way out."""


class PinnedMemory:
    """A file of shared memory, mapped and pinned; `address` is where the GPU has it.

    Made and closed on the thread whose context is current. Raises PinError.
    """

    def __init__(self, driver: Driver, path: Path, size_bytes: int) -> None:
        import numpy as np  # which memd does without where there is no GPU

        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        flags = driver.api.mem_host_register_flags
        try:
            view = np.frombuffer(self._map, np.uint8)
            self._registered: Any = driver.api.register_host_memory(view, flags.DEVICEMAP | flags.PORTABLE)
        except driver.api.Error as error:
            remedy = "raise the limit of locked memory (ulimit -l, LimitMEMLOCK of the service), or ask for less"
            raise PinError(f"the driver does not pin {size_bytes} bytes of {path} ({error}): {remedy}") from error
        self.address = int(self._registered.base.get_device_pointer())

    def close(self) -> None:
        """Unpin and unmap it; nothing may use it any more."""
        self._registered.base.unregister()
        self._registered = None
        self._map.close()
