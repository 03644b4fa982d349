"""A slab of GPU memory: one plain allocation, which workers map by one CUDA IPC handle.

All CUDA in memd is here, and all of it runs on one thread that lives as long as the slab: PyCUDA keeps a stack of
contexts per thread, leaks what is closed on another one, and ends the process with abort() if a thread ends with a
context. memd computes nothing on the GPU: kernels of another process would delay the workers' (time slices).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from memd.device.host import HostSlab
from memd.runs import Run
from pagekernels.cuda.identity import CudaUnavailableError, Driver, Gpu, on_wsl2, open_driver, visible_gpus
from pagekernels.cuda.pinned import PinError, PinnedMemory
from pagekernels.layout import LAYOUT_SWIZZLED
from pagepool.errors import PagepoolError, invalid_field

GRANULE = 2 << 20
"""Bytes of a page of GPU memory: an allocation of less would share its page, and its handle, with others."""

T = TypeVar("T")


class GpuThread:
    """The one thread of this process that touches CUDA. From `enter` to `close` a device's context is current on it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="memd-gpu")
        self._context: Any = None

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Does `work` on the thread, and waits for it."""
        return self._executor.submit(work, *args).result()

    def enter(self, driver: Driver, gpu: Gpu) -> None:
        """Makes the GPU's primary context current on the thread. Raises INVALID_FIELD if the driver refuses."""

        def push() -> None:
            try:
                context = driver.api.Device(gpu.index).retain_primary_context()
                context.push()
            except driver.api.Error as error:
                raise _refused(f"cuda:{gpu.index}", f"a GPU that memd may open: {gpu.name} says {error}") from error
            self._context = context

        self.run(push)

    def close(self) -> None:
        """Takes the context off the thread and ends it. Again does nothing."""

        def pop() -> None:
            if self._context is not None:
                self._context.pop()
            self._context = None  # released on this thread, as all of CUDA

        try:
            if self._context is not None:
                self.run(pop)
        finally:
            self._executor.shutdown()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a GPU's memory."""

    free: int
    total: int


def choose_gpu(flag: str, open_: Callable[[], Driver] = open_driver) -> tuple[Driver, Gpu]:
    """The GPU that `--device` means: the first one for "auto" and "cuda". Call it on the GPU thread.

    Raises INVALID_FIELD, naming what is missing and the way out, where it cannot be used.
    """
    try:
        if on_wsl2():
            raise CudaUnavailableError("this is WSL 2, where CUDA maps no memory of other processes")
        driver = open_()
        gpus = visible_gpus(driver)
    except CudaUnavailableError as error:
        raise _refused(flag, f"a GPU that can be used here: {error}") from error
    index = int(flag.removeprefix("cuda:")) if flag.startswith("cuda:") else 0
    if index >= len(gpus):
        seen = "".join(f"; cuda:{gpu.index} is {gpu.name} ({gpu.uuid})" for gpu in gpus)
        raise _refused(flag, f"one of the {len(gpus)} GPUs that CUDA_VISIBLE_DEVICES leaves visible here{seen}")
    return driver, gpus[index]


def pool_bytes(wanted: int | None, reserve: int | None, memory: Memory) -> int:
    """The size of the pool: `wanted`, or what is free without the reserve (default: half of the GPU's memory).

    In whole granules unless it was given. Raises INVALID_FIELD if it does not fit.
    """
    kept = memory.total // 2 if reserve is None else reserve
    if wanted is None:
        size = (memory.free - kept) // GRANULE * GRANULE
        if size <= 0:
            limit = f"less than the {memory.free} bytes that are free of the GPU's {memory.total}"
            raise invalid_field("--reserve-bytes", kept, limit, "lower it, or end what else uses the GPU")
        return size
    room = memory.free - (reserve or 0)
    if wanted > room:
        beside = f" beside --reserve-bytes {reserve}" if reserve else ""
        limit = f"at most the {max(room, 0)} bytes that are free on the GPU{beside}"
        raise invalid_field("--pool-bytes", wanted, limit, "lower it, or end what else uses the GPU")
    return wanted


class CudaSlab:
    """Zeroed memory on a GPU, and the handle that other processes map it by; `memd_pid` must not be their own PID.

    Zeroed, because the driver does not promise it, and nobody shall read through the pool what another process left
    there. Raises INVALID_FIELD (--pool-bytes) if there is not so much memory; the thread is the caller's then.
    """

    layout_version = LAYOUT_SWIZZLED

    def __init__(self, thread: GpuThread, driver: Driver, gpu: Gpu, size_bytes: int) -> None:
        self.gpu = gpu
        self.size_bytes = size_bytes
        self.memd_pid = os.getpid()
        self._thread, self._driver = thread, driver
        self._allocation: Any = None
        self.host: HostSlab | None = None
        self._pinned: PinnedMemory | None = None
        self.handle: bytes = thread.run(self._allocate)

    def __str__(self) -> str:
        return f"cuda:{self.gpu.index} {self.gpu.name} {self.gpu.uuid}"

    def add_host(self, host: HostSlab) -> None:
        """Takes host memory beside the GPU's, as slab 1, pinned so that copy engines and kernels reach it.

        It ends with this slab. Raises INVALID_FIELD (--host-tier) if it cannot be pinned; it is the caller's then.
        """
        try:
            self._pinned = self._thread.run(PinnedMemory, host.path, host.size_bytes)
        except PinError as error:
            raise invalid_field(
                "--host-tier", host.size_bytes, f"memory that can be pinned: {error}", "see there"
            ) from error
        self.host = host

    def copy(self, runs: Sequence[Run]) -> None:
        """Carries out copies, in order, on the copy engine's stream; done when it returns."""
        self._thread.run(self._copy, runs)

    def close(self) -> None:
        """Frees the memory and ends the GPU thread. What a worker has not unmapped by then stays until it ends.

        Again does nothing.
        """
        if self._allocation is not None:
            self._thread.run(self._free)
        if self._pinned is not None:
            self._thread.run(self._pinned.close)
        self._thread.close()
        if self.host is not None:
            self.host.close()
        self._pinned = self.host = None

    def _allocate(self) -> bytes:
        api = self._driver.api
        size = -(-self.size_bytes // GRANULE) * GRANULE
        try:
            self._allocation = api.mem_alloc(size)
        except api.MemoryError as error:
            limit = f"one piece of the {memory_of(self._driver).free} bytes that are free on the GPU ({error})"
            raise invalid_field("--pool-bytes", self.size_bytes, limit, "lower it") from error
        try:
            stream = api.Stream(1)  # does not wait for the legacy default stream
            api.memset_d8_async(int(self._allocation), 0, size, stream)
            stream.synchronize()
            return bytes(api.mem_get_ipc_handle(self._allocation))
        except BaseException:
            self._free()
            raise

    def _copy(self, runs: Sequence[Run]) -> None:
        api, bases = self._driver.api, [int(self._allocation)]
        if self._pinned is not None:
            bases.append(self._pinned.address)
        stream = api.Stream(1)  # does not wait for the legacy default stream
        for source, target, size in runs:
            # By addresses alone: the driver knows which memory each is of.
            api.memcpy_dtod_async(bases[target.slab] + target.offset, bases[source.slab] + source.offset, size, stream)
        stream.synchronize()

    def _free(self) -> None:
        self._allocation.free()
        self._allocation = None


def memory_of(driver: Driver) -> Memory:
    """The memory of the GPU whose context is current on this thread."""
    free, total = driver.api.mem_get_info()
    return Memory(free, total)


def _refused(flag: str, limit: str) -> PagepoolError:
    return invalid_field("--device", flag, limit, "use --device cpu for a pool in shared memory")
