"""Which memory the pool lies in: chosen by `--device`, waited for where a former memd's workers still map theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from memd.config import MemdConfig
from memd.core.extent import HostMemory
from memd.device.cuda import CudaSlab, GpuThread, Memory, choose_gpu, memory_of, pool_bytes
from memd.device.host import HostSlab, default_pool_bytes, living_bytes, remove_stale_slabs
from memd.device.locks import LeaseLocks
from memd.device.note import FormerPool, PoolNote
from pagekernels.cuda.identity import Driver, Gpu, open_driver
from pagepool.errors import PagepoolError
from pagepool.memd.v1 import types_pb2, worker_service_pb2

FORMER_WORKERS_S, FORMER_POLL_S, SWEEP_S = 10.0, 0.2, 10.0
"""How long to wait for memory whose holder is not known, and how often to look."""

UNLOCK_S = 1.0
"""What a worker may take from its Detach to its unlocked lease file."""

_TOLD_EVERY_S = 10.0

_log = structlog.get_logger("memd.slabs")

Slab = HostSlab | CudaSlab


@dataclass(frozen=True, slots=True)
class OpenGpu:
    """A GPU whose context is current on memd's GPU thread."""

    thread: GpuThread
    driver: Driver
    gpu: Gpu

    @classmethod
    def open(cls, flag: str, driver: Callable[[], Driver] = open_driver) -> OpenGpu | str:
        """The GPU that `--device` means; why the pool lies in shared memory instead, if "auto" allows that.

        Raises INVALID_FIELD if the flag asks for a GPU that cannot be used.
        """
        if flag == "cpu":
            return "--device cpu"
        thread = GpuThread()
        try:
            opened, gpu = thread.run(choose_gpu, flag, driver)
        except PagepoolError as error:
            thread.close()
            if flag != "auto":
                raise
            return error.metadata["limit"]
        try:
            thread.enter(opened, gpu)
        except BaseException:
            thread.close()
            raise
        return cls(thread, opened, gpu)

    def memory(self) -> Memory:
        """What is free now."""
        return self.thread.run(memory_of, self.driver)


def describe(config: MemdConfig, driver: Callable[[], Driver] = open_driver) -> str:
    """One line that says where the pool would lie and how large it would be now. Raises INVALID_FIELD if it cannot."""
    opened = OpenGpu.open(config.device, driver)
    if isinstance(opened, str):
        size = config.pool_bytes or default_pool_bytes(config.slab_dir)
        return f"the pool lies in shared memory in {config.slab_dir}: {size} bytes (no GPU: {opened})"
    try:
        memory = opened.memory()
        size = pool_bytes(config.pool_bytes, config.reserve_bytes, memory)
    finally:
        opened.thread.close()
    gpu = opened.gpu
    return (
        f"the pool lies on cuda:{gpu.index}, {gpu.name} ({gpu.uuid}): {size} of {memory.free} free bytes, "
        f"{memory.free - size} left for workers"
    )


class PoolMemory:
    """The slab of one memd life, from `open` to `close`."""

    def __init__(self, config: MemdConfig, leases: LeaseLocks, driver: Callable[[], Driver] = open_driver) -> None:
        self._config = config
        self._leases = leases
        self._driver = driver
        self._note = PoolNote(leases.directory.parent / "gpu-pool.json")
        self._slab: Slab | None = None

    async def open(self, stop: asyncio.Event) -> Slab | None:
        """The slab, or None if memd is to stop already. Raises INVALID_FIELD, naming the flag, if it cannot be had."""
        opened = await asyncio.to_thread(OpenGpu.open, self._config.device, self._driver)
        if isinstance(opened, str):
            _log.info("the pool lies in shared memory", no_gpu=opened)
            self._slab = await _host_slab(self._config, stop)
        else:
            try:
                self._slab = await self._with_host(await self._cuda_slab(opened, stop), stop)
            finally:
                if self._slab is None:
                    opened.thread.close()
        return self._slab

    def close(self) -> None:
        """Gives the memory back. Call it when the workers have detached, which they do after unmapping it."""
        if self._slab is None:
            return
        self._slab.close()
        if isinstance(self._slab, CudaSlab) and self._workers_let_go():
            self._note.remove()

    async def _with_host(self, slab: CudaSlab | None, stop: asyncio.Event) -> CudaSlab | None:
        """The slab with its host tier, if there is to be one."""
        size = self._config.host_tier
        if slab is None or not size:
            return slab
        self._slab = slab  # to be closed, whatever happens
        directory = self._config.slab_dir
        host = await asyncio.to_thread(HostSlab.create, directory, size, lambda: not stop.is_set(), "--host-tier")
        if host is None:
            return slab
        try:
            await asyncio.to_thread(slab.add_host, host)
        except BaseException:
            host.close()
            raise
        return slab

    def _workers_let_go(self) -> bool:
        """Whether nobody maps the pool any more: a worker unlocks its lease file a moment after it has detached."""
        deadline, holders = time.monotonic() + UNLOCK_S, self._leases.locked()
        while holders and time.monotonic() < deadline:
            time.sleep(FORMER_POLL_S / 10)
            holders &= self._leases.locked()
        return not holders

    async def _cuda_slab(self, opened: OpenGpu, stop: asyncio.Event) -> CudaSlab | None:
        """Waits until the former pool's memory is back: as long as workers of it live, and a while longer."""
        config, former = self._config, self._note.read()
        expected = former.size_bytes if former is not None and former.uuid == opened.gpu.uuid else 0
        waiting = _Waiting(expected, self._leases)
        while not stop.is_set():
            memory = await asyncio.to_thread(opened.memory)
            try:
                size = pool_bytes(config.pool_bytes, config.reserve_bytes, memory)
                why = f"the GPU would have room for {size} bytes only"
                if config.pool_bytes is not None or size >= expected or waiting.in_vain():
                    slab = await asyncio.to_thread(CudaSlab, opened.thread, opened.driver, opened.gpu, size)
                    self._note.write(FormerPool(opened.gpu.uuid, size))
                    return slab
            except PagepoolError as error:
                if waiting.in_vain():
                    raise
                why = error.message
            waiting.tell(memory, why)
            await asyncio.sleep(FORMER_POLL_S)
        return None


class _Waiting:
    """The wait for a former pool of `expected` bytes; 0 says that there was none."""

    def __init__(self, expected: int, leases: LeaseLocks) -> None:
        self._expected, self._leases = expected, leases
        # Its workers were there before: those that come while memd waits map nothing yet.
        self._holders = leases.locked()
        self._deadline = time.monotonic() + FORMER_WORKERS_S
        self._told = -_TOLD_EVERY_S

    def in_vain(self) -> bool:
        """Whether nothing more is to be expected."""
        if not self._expected:
            return True
        self._holders &= self._leases.locked()
        if self._holders:
            self._deadline = time.monotonic() + FORMER_WORKERS_S
        return time.monotonic() >= self._deadline

    def tell(self, memory: Memory, why: str) -> None:
        """Says why memd waits, every few seconds."""
        if time.monotonic() < self._told + _TOLD_EVERY_S:
            return
        self._told = time.monotonic()
        _log.warning(
            "waiting for the memory of the former pool",
            former_bytes=self._expected,
            free_bytes=memory.free,
            held_by=sorted(self._holders) or "nobody that is known",
            why=why,
        )


async def _host_slab(config: MemdConfig, stop: asyncio.Event) -> HostSlab | None:
    """Waits a while for shared memory that a former memd's workers still map."""
    deadline = time.monotonic() + FORMER_WORKERS_S
    while not stop.is_set():
        held = await asyncio.to_thread(sweep, config.slab_dir)
        size = (config.pool_bytes or default_pool_bytes(config.slab_dir)) + (config.host_tier or 0)
        flags = "--pool-bytes plus --host-tier" if config.host_tier else "--pool-bytes"
        try:
            return await asyncio.to_thread(HostSlab.create, config.slab_dir, size, lambda: not stop.is_set(), flags)
        except PagepoolError as error:
            if not held or time.monotonic() > deadline:
                raise
            _log.warning("waiting for the memory of other slabs", held_bytes=held, why=error.message)
        await asyncio.sleep(FORMER_POLL_S)
    return None


def sweep(slab_dir: Path) -> int:
    """Removes the slabs that nobody has any more; the bytes of those that somebody still has."""
    for stale in remove_stale_slabs(slab_dir):
        _log.info("removed the slab of a memd that is gone", path=str(stale))
    return living_bytes(slab_dir)


async def keep_sweeping(slab_dir: Path) -> None:
    """Until cancelled: what workers of a former memd let go of late must not cost memory for good."""
    while True:
        await asyncio.sleep(SWEEP_S)
        await asyncio.to_thread(sweep, slab_dir)  # to give tens of gigabytes back takes the kernel a while


def host_memory(slab: Slab, config: MemdConfig) -> HostMemory | None:
    """Where the host tier lies, if there is one: behind the pool in shared memory, or in a slab of its own."""
    if isinstance(slab, CudaSlab):
        return HostMemory(slab.host.size_bytes) if slab.host is not None else None
    if not config.host_tier:
        return None
    return HostMemory(config.host_tier, 0, slab.size_bytes - config.host_tier)


def pool_size(slab: Slab, config: MemdConfig) -> int:
    """Bytes of the device tier."""
    return slab.size_bytes if isinstance(slab, CudaSlab) else slab.size_bytes - (config.host_tier or 0)


def slab_messages(slab: Slab) -> list[worker_service_pb2.Slab]:
    """How a worker maps each of the slabs."""
    if isinstance(slab, HostSlab):
        return [_file_message(slab)]
    below = [] if slab.host is None else [_file_message(slab.host)]
    return [_cuda_message(slab), *below]


def _file_message(slab: HostSlab) -> worker_service_pb2.Slab:
    file = worker_service_pb2.SharedMemoryHandle(path=str(slab.path))
    return worker_service_pb2.Slab(size_bytes=slab.size_bytes, shared_memory=file)


def _cuda_message(slab: CudaSlab) -> worker_service_pb2.Slab:
    handle = worker_service_pb2.CudaIpcHandle(handle=slab.handle, device_uuid=slab.gpu.uuid, memd_pid=slab.memd_pid)
    return worker_service_pb2.Slab(size_bytes=slab.size_bytes, cuda_ipc=handle)


def device_message(slab: Slab) -> types_pb2.CudaDevice | None:
    """The GPU it lies on, if it lies on one."""
    if isinstance(slab, HostSlab):
        return None
    return types_pb2.CudaDevice(uuid=slab.gpu.uuid, name=slab.gpu.name, memd_pid=slab.memd_pid)
