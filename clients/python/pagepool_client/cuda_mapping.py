"""memd's slab of GPU memory in this process, and the refusals of a worker that cannot map it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from pagekernels.cuda.identity import CudaUnavailableError, Driver, Gpu, current_gpu, on_wsl2, open_driver
from pagekernels.cuda.pinned import PinError, PinnedMemory
from pagepool.errors import PagepoolError, Reason
from pagepool.pool_values import CudaDevice


class CudaMapping:
    """memd's allocation, mapped by its CUDA IPC handle: `size_bytes` at `address` on the GPU `device_uuid`.

    With a `host_slab`, a file and its bytes, that is pinned beside it; `addresses` are those of all slabs by number.

    PyCUDA must have a context on that GPU current on the calling thread; `close` belongs to the same thread. Raises
    PagepoolError: DEVICE_MISMATCH if this process can never map the pool, saying why and the way out; POOL_LOST if CUDA
    refuses the handle, as it does when memd has gone.
    """

    def __init__(
        self,
        handle: bytes,
        size_bytes: int,
        device: CudaDevice,
        host_slab: tuple[str, int] | None = None,
        driver: Driver | None = None,
    ) -> None:
        require_other_pid(device)
        driver = driver or _driver(device)
        _require_device(current_gpu(driver), device)
        self.size_bytes = size_bytes
        self.device_uuid = device.uuid
        self._api, self._thread = driver.api, threading.get_ident()
        try:
            self._handle: Any = self._api.IPCMemoryHandle(bytearray(handle))  # PyCUDA takes nothing else
        except self._api.Error as error:
            message = (
                f"CUDA does not map memd's memory on {device.uuid} ({error}); attach again when memd is back; if it "
                "is there, let both run under MPS or neither, and see the same devices"
            )
            raise PagepoolError(Reason.POOL_LOST, message, device_uuid=device.uuid, error=error) from error
        self.address = int(self._handle)
        self.addresses: tuple[int, ...] = (self.address,)
        try:
            self._pinned = _pinned(host_slab) if host_slab is not None else None
        except BaseException:
            self._handle.close()
            raise
        if self._pinned is not None:
            self.addresses += (self._pinned.address,)

    def close(self) -> None:
        """Wait for this process's work on the GPU, then give the mapping up: kernels must not lose it under them.

        Raises pycuda.driver.Error if the context is broken; then only the end of the process unmaps. Idempotent.
        """
        if self._handle is None:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError("a CUDA mapping must be closed on the thread that made it, or it leaks")
        self._api.Context.synchronize()
        if self._pinned is not None:
            self._pinned.close()
        self._handle.close()
        self._handle, self._pinned, self.address, self.addresses = None, None, 0, ()


def _pinned(host_slab: tuple[str, int]) -> PinnedMemory:
    path, size_bytes = host_slab
    try:
        return PinnedMemory(Path(path), size_bytes)
    except OSError as error:
        message = f"memd's host memory {path} cannot be mapped ({error}); attach again when memd is back"
        raise PagepoolError(Reason.POOL_LOST, message, path=path, error=error) from error
    except PinError as error:
        raise PagepoolError(Reason.DEVICE_MISMATCH, f"this worker cannot use memd's --host-tier: {error}") from error


def require_other_pid(device: CudaDevice) -> None:
    """DEVICE_MISMATCH if this process has memd's PID value, which CUDA does not tell from memd itself."""
    if os.getpid() != device.memd_pid:
        return
    message = (
        f"this worker's PID is {device.memd_pid}, and so is memd's, each in its own PID namespace; CUDA maps no memory "
        "between two such processes: start one of them as the child of another process (docker run --init), or give "
        "both one PID namespace"
    )
    raise PagepoolError(Reason.DEVICE_MISMATCH, message, pid=device.memd_pid, memd_pid=device.memd_pid)


def _driver(device: CudaDevice) -> Driver:
    try:
        if on_wsl2():
            raise CudaUnavailableError("this is WSL 2, where CUDA maps no memory of other processes")
        return open_driver()
    except CudaUnavailableError as error:
        message = f"the pool lies on the GPU {device.uuid}, but {error}; or start memd with --device cpu"
        raise PagepoolError(Reason.DEVICE_MISMATCH, message, device_uuid=device.uuid, cause=error) from error


def _require_device(own: Gpu, pool: CudaDevice) -> None:
    if own.uuid == pool.uuid:
        return
    mig = pool.uuid.startswith("MIG-") or own.uuid.startswith("MIG-")
    why = "; CUDA maps no memory between MIG instances, or between one and its whole GPU" if mig else ""
    message = (
        f"this worker computes on {own.name} ({own.uuid}), but memd's pool lies on {pool.uuid}{why}; start the worker "
        f"with --device auto and CUDA_VISIBLE_DEVICES={pool.uuid}, or memd on the worker's device"
    )
    raise PagepoolError(Reason.DEVICE_MISMATCH, message, value=own.uuid, pool_value=pool.uuid, name=own.name)
