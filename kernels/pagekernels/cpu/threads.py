"""How many threads the kernels use, and whose."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numba


def configure(threads: int) -> None:
    """Choose how many threads the kernels use; for the calling thread, which is to run them. Import torch first."""
    prepare()
    numba.set_num_threads(threads)


def prepare() -> None:
    """Select OpenMP as numba's threading layer, and join the OpenMP runtime that is loaded already (torch's).

    Two runtimes have two pools, whose waiting threads spin against each other. numba binds to the symbols that are
    global when its first kernel loads, so making the loaded runtime's global is enough.
    """
    numba.config.THREADING_LAYER = "omp"
    loaded = re.search(r"/\S*/libgomp\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    if loaded:
        ctypes.CDLL(loaded.group(), mode=ctypes.RTLD_GLOBAL)
