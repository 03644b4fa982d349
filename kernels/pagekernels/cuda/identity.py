"""Which GPU is which: identities that are the same in every process and container, found out without a context."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CudaUnavailableError(RuntimeError):
    """There is no GPU to use here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The CUDA driver as this process reaches it.

    api is pycuda.driver, initialised. uuids gives, for CUDA's number of a device, the 16 bytes of its UUID and those of
    the whole GPU's, which are others for a MIG instance; PyCUDA has no call for them.
    """

    api: Any
    uuids: Callable[[int], tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that this process may use: `index` is CUDA's number of it here, `uuid` names it everywhere.

    uuid is "GPU-..." or, for a MIG instance, "MIG-...", as `nvidia-smi -L` prints them and CUDA_VISIBLE_DEVICES takes
    them; whole is the UUID of the GPU itself, which only a MIG instance differs from.
    """

    index: int
    uuid: str
    name: str
    whole: str


def open_driver() -> Driver:
    """The driver, initialised. Raises CudaUnavailableError, naming what is missing, where there is none."""
    try:
        from pycuda import driver  # late: without NVIDIA's driver its import fails
    except ImportError as error:
        raise CudaUnavailableError(
            f"CUDA cannot be used ({error}); it needs NVIDIA's driver and `pip install 'pagepool[cuda]'`"
        ) from error
    try:
        driver.init()
    except driver.Error as error:
        raise CudaUnavailableError(
            f"CUDA cannot be used ({error}); see nvidia-smi -L and CUDA_VISIBLE_DEVICES"
        ) from error
    return Driver(driver, _uuids)


def visible_gpus(driver: Driver) -> list[Gpu]:
    """The devices that this process may use, by CUDA's numbers."""
    return [_gpu(driver, index) for index in range(driver.api.Device.count())]


def current_gpu(driver: Driver) -> Gpu:
    """The device of the context that is current on this thread. Raises pycuda.driver.LogicError if none is."""
    device = driver.api.Context.get_device()
    (index,) = (index for index in range(driver.api.Device.count()) if driver.api.Device(index) == device)
    return _gpu(driver, index)


def on_wsl2(release: Path = Path("/proc/sys/kernel/osrelease")) -> bool:
    """Whether this Linux runs inside Windows, whose CUDA maps no memory of other processes."""
    return "microsoft" in release.read_text(encoding="ascii", errors="replace").lower()


def _gpu(driver: Driver, index: int) -> Gpu:
    own, whole = driver.uuids(index)
    kind = "GPU" if own == whole else "MIG"
    name = driver.api.Device(index).name()
    return Gpu(index, f"{kind}-{uuid.UUID(bytes=own)}", name, f"GPU-{uuid.UUID(bytes=whole)}")


def _uuids(index: int) -> tuple[bytes, bytes]:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, own, whole = ctypes.c_int(), (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
    # The first version of the call knows nothing of MIG.
    for code in (
        cuda.cuDeviceGet(ctypes.byref(device), index),
        cuda.cuDeviceGetUuid_v2(ctypes.byref(own), device),
        cuda.cuDeviceGetUuid(ctypes.byref(whole), device),
    ):
        if code:
            raise CudaUnavailableError(f"CUDA device {index} has no UUID: the driver answered with error {code}")
    return bytes(own), bytes(whole)
