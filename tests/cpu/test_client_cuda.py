"""A worker's mapping of GPU memory: against a driver that keeps CUDA's rules, and through a memd on that driver."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from memd import daemon
from memd.config import MemdConfig
from memd.slabs import PoolMemory
from pagekernels.cuda.identity import CudaUnavailableError, Driver
from pagekernels.layout import Format, LayerShape, PagedLayout
from pagepool.errors import Code, PagepoolError, Reason
from pagepool.listen import UnixListener
from pagepool.pool_values import CudaDevice, Draining
from pagepool_client import cuda_mapping
from pagepool_client.cuda_mapping import CudaMapping
from pagepool_client.pool import PoolClient
from pagepool_client.session import Attachment, PoolSession
from pagepool_client.wire import geometry_message
from tests.cpu.fake_cuda import FakeGpu, Machine, fake_driver

FIRST, SECOND = (f"GPU-{pair * 4}-{pair * 2}-{pair * 2}-{pair * 2}-{pair * 6}" for pair in ("01", "02"))
LAYERS = (LayerShape(1, 8, 8),)
HANDLE = b"h" * 64


@pytest.fixture
def machine() -> Machine:
    return Machine([FakeGpu(0), FakeGpu(1)])


@pytest.fixture
def driver(machine: Machine) -> Iterator[Driver]:
    """A driver with a context on the first GPU, and memory of memd's there behind HANDLE."""
    made = fake_driver(machine)
    made.api.Device(0).retain_primary_context().push()
    machine.handles[HANDLE] = made.api.mem_alloc(4096)
    yield made
    made.api.Context.pop()


def mapping(driver: Driver, *, uuid: str = FIRST, pid: int = 0, handle: bytes = HANDLE) -> CudaMapping:
    return CudaMapping(handle, 4096, CudaDevice(uuid, pid), driver=driver)


def refusal(driver: Driver | None, uuid: str = FIRST, pid: int = 0) -> str:
    with pytest.raises(PagepoolError) as caught:
        CudaMapping(HANDLE, 4096, CudaDevice(uuid, pid), driver=driver)
    assert caught.value.reason is Reason.DEVICE_MISMATCH
    return caught.value.message


class TestMapping:
    def test_has_an_address_until_it_is_closed_after_the_work_on_it(self, driver: Driver) -> None:
        mapped = mapping(driver)
        assert (mapped.address, mapped.size_bytes, mapped.device_uuid) == (0x7E0000000000, 4096, FIRST)
        mapped.close()
        mapped.close()
        assert mapped.address == 0
        assert driver.api.calls == ["synchronize", "close"]

    def test_is_not_closed_on_another_thread_where_it_would_leak(self, driver: Driver) -> None:
        mapped = mapping(driver)
        errors: list[BaseException] = []

        def close() -> None:
            try:
                mapped.close()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
        assert "on the thread that made it" in str(errors[0])
        mapped.close()

    def test_memd_s_own_pid_value_is_refused_before_cuda_is_touched(self) -> None:
        message = refusal(None, pid=os.getpid())
        assert f"PID is {os.getpid()}, and so is memd's" in message
        assert "as the child of another process" in message

    def test_another_gpu_is_refused_with_both_names_and_the_way_out(self, driver: Driver) -> None:
        message = refusal(driver, uuid=SECOND)
        assert f"computes on Fake GPU ({FIRST}), but memd's pool lies on {SECOND}; start" in message
        assert f"CUDA_VISIBLE_DEVICES={SECOND}" in message
        assert "MIG" not in message

    def test_another_mig_instance_is_refused_by_that_name(self) -> None:
        driver = fake_driver(Machine([FakeGpu(0, mig=True)]))
        driver.api.Device(0).retain_primary_context().push()
        assert "no memory between MIG instances, or between one and its whole GPU" in refusal(driver, uuid=FIRST)
        driver.api.Context.pop()

    def test_wsl2_and_a_missing_driver_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def none() -> Driver:
            raise CudaUnavailableError("CUDA cannot be used (no libcuda.so.1)")

        monkeypatch.setattr(cuda_mapping, "open_driver", none)
        assert f"lies on the GPU {FIRST}, but CUDA cannot be used (no libcuda.so.1); or start memd" in refusal(None)
        monkeypatch.setattr(cuda_mapping, "on_wsl2", lambda: True)
        assert "WSL 2" in refusal(None)

    def test_a_handle_that_cuda_refuses_may_be_tried_again(self, driver: Driver) -> None:
        with pytest.raises(PagepoolError, match=r"invalid resource handle.*attach again when memd is back") as caught:
            mapping(driver, handle=b"g" * 64)
        assert (caught.value.reason, caught.value.code) == (Reason.POOL_LOST, Code.UNAVAILABLE)


class Served:
    """A memd on the fake driver, in a thread of this process."""

    def __init__(self, config: MemdConfig, target: str) -> None:
        self.target = target
        self._config = config
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        with PoolClient(target) as client:
            self.pool = next(iter(client.watch()))

    def _run(self) -> None:
        self._loop.run_until_complete(daemon._live(self._config, self._stop))
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def served(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="pp-"))
    config = MemdConfig(listen=(UnixListener(folder / "memd.sock"),), device="cuda", pool_bytes=1 << 20)
    monkeypatch.setattr(daemon, "PoolMemory", partial(PoolMemory, driver=lambda: fake_driver(machine)))
    memd = Served(config, f"unix:{folder / 'memd.sock'}")
    yield memd
    if not memd._loop.is_closed():
        memd.stop()
    memd.join()
    shutil.rmtree(folder)


@pytest.fixture
def worker(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver of a worker's process, with its context; and the PID of another process."""
    made = fake_driver(machine)
    monkeypatch.setattr(cuda_mapping, "open_driver", lambda: made)
    monkeypatch.setattr(cuda_mapping, "require_other_pid", lambda _: None)
    made.api.Device(0).retain_primary_context().push()
    yield made
    made.api.Context.pop()


def attachment(memd: Served, version: int = 2) -> Attachment:
    return Attachment(memd.target, "w", geometry_message(PagedLayout(16, LAYERS, Format.F32, version), b"d" * 32, "m"))


class TestSession:
    def test_maps_what_memd_has_on_the_gpu(self, served: Served, worker: Driver) -> None:
        assert served.pool.cuda_device.uuid == FIRST
        with PoolSession(attachment(served)) as session:
            memory = session.memory
            assert isinstance(memory, CudaMapping)
            assert (memory.size_bytes, memory.device_uuid) == (1 << 20, FIRST)
            assert session.info.cuda_device == CudaDevice(FIRST, os.getpid())
            assert session.info.slab_paths == ()
            assert HANDLE[:8] not in repr(session.info).encode()
        assert memory.address == 0

    def test_unmaps_before_memd_frees(self, served: Served, worker: Driver, machine: Machine) -> None:
        session = PoolSession(attachment(served))
        machine.calls.clear()
        served.stop()
        session.wait(5)
        assert [type(event) for event in session.poll()] == [Draining]
        session.close()
        served.join()
        assert machine.calls == ["synchronize", "close", "free"]

    def test_of_memd_s_own_process_is_refused_and_leaves_no_lease(self, served: Served) -> None:
        with pytest.raises(PagepoolError, match=f"PID is {os.getpid()}") as caught:
            PoolSession(attachment(served))
        assert caught.value.reason is Reason.DEVICE_MISMATCH
        with PoolClient(served.target) as client:
            assert client.pool().num_leases == 0

    def test_of_a_worker_on_the_cpu_is_refused_by_memd(self, served: Served) -> None:
        with pytest.raises(PagepoolError, match="start the worker with --device cuda, or memd with --device cpu"):
            PoolSession(attachment(served, version=1))
