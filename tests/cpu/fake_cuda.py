"""A CUDA driver as pycuda.driver shows it, as far as memd and its workers use it, that holds them to its rules.

Contexts are per thread; what needs one raises without it; an IPC handle opens in another `Driver` of the same machine;
memory is counted. It computes nothing: what GPU memory holds is asked of a real one in tests/gpu.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from pagekernels.cuda.identity import Driver

GIB = 1 << 30
BASE = 0x7F0000000000


class Error(Exception):
    """pycuda.driver.Error."""


class LogicError(Error):
    """pycuda.driver.LogicError."""


class OutOfMemoryError(Error, MemoryError):
    """pycuda.driver.MemoryError."""


@dataclass
class Machine:
    """The GPUs of a host and the memory on them, which outlives processes that are killed."""

    gpus: list[FakeGpu]
    handles: dict[bytes, Allocation] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)


@dataclass
class FakeGpu:
    number: int
    mig: bool = False
    total: int = 80 * GIB
    used: int = 0
    exclusive: bool = False

    @property
    def uuids(self) -> tuple[bytes, bytes]:
        whole = bytes([self.number + 1]) * 16
        return (bytes([0x80 + self.number]) * 16 if self.mig else whole, whole)


def fake_driver(machine: Machine, visible: list[int] | None = None) -> Driver:
    """The driver in one process, which sees the GPUs of these numbers, all unless it is told."""
    gpus = machine.gpus if visible is None else [machine.gpus[number] for number in visible]
    return Driver(Api(machine, gpus), lambda index: gpus[index].uuids)


class Api:
    """pycuda.driver."""

    Error = Error
    LogicError = LogicError
    MemoryError = OutOfMemoryError

    def __init__(self, machine: Machine, gpus: list[FakeGpu]) -> None:
        self.machine = machine
        self.gpus = gpus
        self.calls = machine.calls
        self.threads: set[int] = set()
        self._local = threading.local()
        self.Device, self.Context = device_class(self), context_class(self)

    @property
    def stack(self) -> list[Any]:
        """This thread's contexts."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[Any] = self._local.stack
        return stack

    def current(self) -> Any:
        self.threads.add(threading.get_ident())
        if not self.stack:
            raise LogicError("context::get_current failed: invalid device context")
        return self.stack[-1]

    def mem_get_info(self) -> tuple[int, int]:
        gpu = self.current().device.gpu
        return gpu.total - gpu.used, gpu.total

    def mem_alloc(self, size: int) -> Allocation:
        gpu = self.current().device.gpu
        if size > gpu.total - gpu.used:
            raise OutOfMemoryError("cuMemAlloc failed: out of memory")
        return Allocation(self, gpu, size)

    def Stream(self, flags: int) -> Any:  # noqa: N802 pycuda's name
        self.current()
        assert flags == 1
        return self.Context

    def memset_d8_async(self, address: int, value: int, size: int, stream: Any) -> None:
        self.current()
        self.calls.append(f"memset {value} {size}")

    def memcpy_dtod_async(self, target: int, source: int, size: int, stream: Any) -> None:
        self.current()
        self.calls.append(f"copy {source - BASE} {target - BASE} {size}")

    def mem_get_ipc_handle(self, allocation: Allocation) -> bytearray:
        self.current()
        handle = bytes([len(self.machine.handles) + 1]) * 64
        self.machine.handles[handle] = allocation
        return bytearray(handle)

    def IPCMemoryHandle(self, handle: bytearray) -> Mapping:  # noqa: N802 pycuda's name
        assert type(handle) is bytearray, "PyCUDA takes nothing else"
        self.current()
        allocation = self.machine.handles.get(bytes(handle))
        if allocation is None or allocation.freed:
            raise LogicError("cuIpcOpenMemHandle failed: invalid resource handle")
        return Mapping(self)


def device_class(api: Api) -> Any:
    """pycuda.driver.Device."""

    class Device:
        def __init__(self, index: int) -> None:
            self.gpu = api.gpus[index]

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Device) and other.gpu is self.gpu

        def __hash__(self) -> int:
            return id(self.gpu)

        @staticmethod
        def count() -> int:
            return len(api.gpus)

        def name(self) -> str:
            return "Fake GPU"

        def retain_primary_context(self) -> Any:
            if self.gpu.exclusive:
                raise LogicError("device is in exclusive mode")
            return api.Context(self)

    return Device


def context_class(api: Api) -> Any:
    """pycuda.driver.Context."""

    class Context:
        def __init__(self, device: Any) -> None:
            self.device = device

        def push(self) -> None:
            api.stack.append(self)

        @staticmethod
        def pop() -> None:
            api.current()
            api.stack.pop()

        @staticmethod
        def get_device() -> Any:
            return api.current().device

        @staticmethod
        def synchronize() -> None:
            api.current()
            api.calls.append("synchronize")

    return Context


class Allocation:
    """pycuda.driver.DeviceAllocation."""

    def __init__(self, api: Api, gpu: FakeGpu, size: int) -> None:
        self._api, self._gpu, self._size = api, gpu, size
        self.freed = False
        gpu.used += size

    def __int__(self) -> int:
        return BASE

    def free(self) -> None:
        self._api.current()
        assert not self.freed
        self.freed = True
        self._api.calls.append("free")
        self._gpu.used -= self._size


class Mapping:
    """pycuda.driver.IPCMemoryHandle."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def __int__(self) -> int:
        return 0x7E0000000000

    def close(self) -> None:
        self._api.current()
        self._api.calls.append("close")
