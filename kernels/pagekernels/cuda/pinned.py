"""Shared host memory that a GPU's copy engines and kernels reach.

By the driver's own functions: PyCUDA's register_host_memory makes an array of it, in a way that NumPy refuses by now.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PORTABLE, DEVICE_MAP = 1, 2
"""CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTREGISTER_DEVICEMAP."""


class PinError(Exception):
    """The driver does not pin this memory; the message says why, and the way out."""


def open_library() -> Any:
    """The CUDA driver's library, which PyCUDA has loaded."""
    return ctypes.CDLL("libcuda.so.1")


class PinnedMemory:
    """A file of shared memory, mapped and pinned; `address` is where the GPU has it.

    Made and closed on a thread on which a context of PyCUDA is current. Raises PinError, OSError if there is no such
    file.
    """

    def __init__(self, path: Path, size_bytes: int, library: Callable[[], Any] = open_library) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self._library = library()
        first = ctypes.c_char.from_buffer(self._map)
        self._here = ctypes.addressof(first)
        del first  # which would keep the mapping from being closed
        here, size = ctypes.c_void_p(self._here), ctypes.c_size_t(size_bytes)
        if code := self._library.cuMemHostRegister_v2(here, size, PORTABLE | DEVICE_MAP):
            self._map.close()
            remedy = "raise the limit of locked memory (ulimit -l, LimitMEMLOCK of the service), or ask for less"
            raise PinError(f"the driver does not pin {size_bytes} bytes of {path} (error {code}): {remedy}")
        there = ctypes.c_uint64()
        if code := self._library.cuMemHostGetDevicePointer_v2(ctypes.byref(there), here, 0):
            self.close()
            raise PinError(f"the GPU does not reach the {size_bytes} bytes of {path} (error {code})")
        self.address = int(there.value)

    def close(self) -> None:
        """Unpin and unmap it; nothing may use it any more."""
        self._library.cuMemHostUnregister(ctypes.c_void_p(self._here))
        self._map.close()
