"""One GPU as this process uses it: a context on one thread, one stream, and the kernels loaded on it.

Everything of a CudaDevice belongs to the thread that called open_device: PyCUDA keeps a stack of contexts per thread,
and what is closed on another one leaks. Where torch shares the process it must have initialised CUDA first; both then
use the device's primary context.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagekernels.cuda import build
from pagekernels.cuda.identity import CudaUnavailableError, open_driver, visible_gpus

_DEFAULT_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel gets without asking for more."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel, ready to be launched on its device's stream."""

    function: Any
    stream: Any
    shared: int

    def launch(self, grid: tuple[int, ...], block: tuple[int, ...], args: bytes, shared: int | None = None) -> None:
        """Launch with arguments packed by struct in native alignment ("P" a pointer, "q" int64, "i" int32, ...).

        `grid` and `block` have one to three sizes. `shared`: bytes of dynamic shared memory, at most and by default
        what the kernel was loaded with. Does not wait; raises pycuda.driver.Error if the launch itself is refused.
        """
        self.function._launch_kernel(grid, block, args, self.shared if shared is None else shared, self.stream)  # noqa: SLF001  # the prepared calls cost 4 us more


class CudaDevice:
    """A GPU with its primary context current on this thread, until close().

    index            CUDA's number of the device within CUDA_VISIBLE_DEVICES
    api              the module pycuda.driver
    uuid             "GPU-..." or "MIG-...", the same in every process and container; see identity.Gpu
    arch             "sm_90"
    num_sms          multiprocessors
    max_shared_bytes dynamic shared memory that one thread block may have
    stream           a PyCUDA stream that does not wait for the legacy default stream; all work of ours goes there
    stream_handle    the same as an integer, for torch.cuda.ExternalStream
    """

    def __init__(self, index: int, cache_dir: Path | None = None) -> None:
        driver = open_driver()
        self.api: Any = driver.api
        gpus = visible_gpus(driver)
        if not 0 <= index < len(gpus):
            raise CudaUnavailableError(
                f"the CUDA device is {index}, but {len(gpus)} are visible: say cuda:0 to cuda:{len(gpus) - 1}, "
                "or change CUDA_VISIBLE_DEVICES"
            )
        device = self.api.Device(index)
        attribute = self.api.device_attribute
        major, minor = device.compute_capability()
        self.index, self.uuid, self.arch = index, gpus[index].uuid, f"sm_{major}{minor}"
        self.num_sms: int = device.get_attribute(attribute.MULTIPROCESSOR_COUNT)
        self.max_shared_bytes: int = device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self._cache_dir = cache_dir
        self._modules: dict[tuple[object, ...], Any] = {}
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._context: Any = device.retain_primary_context()
        self._context.push()
        self.stream: Any = self.api.Stream(1)  # CU_STREAM_NON_BLOCKING
        self.stream_handle: int = self.stream.handle

    def kernel(self, source: str, name: str, defines: build.Defines, dynamic_shared: int = 0) -> Kernel:
        """The `extern "C"` kernel `name` of a .cu file of this folder; compiled and loaded at most once.

        `dynamic_shared`: bytes a launch will ask for, up to max_shared_bytes. Not while a graph is captured. Raises
        build.BuildError, or ValueError if the device has less shared memory.
        """
        if dynamic_shared > self.max_shared_bytes:
            raise ValueError(f"{name} needs {dynamic_shared} bytes of shared memory, but has {self.max_shared_bytes}")
        which = (source, tuple(sorted(defines.items())))
        key = (*which, name, dynamic_shared)
        if key not in self._kernels:
            if which not in self._modules:
                cubin = build.cubin(source, defines, self.arch, self._cache_dir)
                self._modules[which] = self.api.module_from_buffer(cubin)
            function = self._modules[which].get_function(name)
            if dynamic_shared > _DEFAULT_SHARED:
                attribute = self.api.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                function.set_attribute(attribute, dynamic_shared)
            self._kernels[key] = Kernel(function, self.stream, dynamic_shared)
        return self._kernels[key]

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        self.stream.synchronize()

    def close(self) -> None:
        """Drop the kernels and the stream, and the context from this thread. Again does nothing.

        On the thread of open_device, after everything made on the device is gone: a thread must not end with a context.
        """
        if self._context is None:
            return
        self.stream.synchronize()
        self._kernels.clear()
        self._modules.clear()
        self.stream = None
        self._context.pop()
        self._context = None


def open_device(index: int, cache_dir: Path | None = None) -> CudaDevice:
    """Use CUDA device `index` from this thread. See CudaDevice; `cache_dir` as in build.cubin.

    Raises CudaUnavailableError where PyCUDA, the driver or the device is missing.
    """
    return CudaDevice(index, cache_dir)
