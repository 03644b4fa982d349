"""memd's pool on a GPU, over a driver that keeps CUDA's rules: sizes, refusals, one thread, a former memd's memory."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from memd import slabs
from memd.config import MemdConfig, load_config
from memd.copying import copier_of
from memd.core.values import BlockCopy
from memd.device import cuda
from memd.device.cuda import GRANULE, CudaSlab, Memory, pool_bytes
from memd.device.locks import LeaseLocks
from memd.device.note import FormerPool, PoolNote
from memd.slabs import PoolMemory, device_message, slab_messages
from pagekernels.cuda.identity import CudaUnavailableError, Driver, on_wsl2
from pagekernels.layout import Format, pack_entry
from pagepool.errors import PagepoolError, Reason
from tests.cpu.fake_cuda import GIB, FakeGpu, Machine, fake_driver

UUID = "GPU-01010101-0101-0101-0101-010101010101"


@pytest.fixture(autouse=True)
def no_wsl2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "on_wsl2", lambda: False)


@pytest.fixture
def machine() -> Machine:
    return Machine([FakeGpu(0), FakeGpu(1)])


@pytest.fixture
def locks(tmp_path: Path) -> LeaseLocks:
    return LeaseLocks(tmp_path / "leases")


def memory(machine: Machine, locks: LeaseLocks, **settings: object) -> PoolMemory:
    config = MemdConfig(**{"device": "cuda", **settings})  # type: ignore[arg-type]
    return PoolMemory(config, locks, lambda: fake_driver(machine))


async def opened(pool: PoolMemory) -> CudaSlab:
    slab = await pool.open(asyncio.Event())
    assert isinstance(slab, CudaSlab)
    return slab


class TestSizes:
    MEMORY = Memory(free=70 * GIB + 1, total=80 * GIB)

    def test_the_default_leaves_half_of_the_gpu_to_the_workers(self) -> None:
        assert pool_bytes(None, None, self.MEMORY) == 30 * GIB

    def test_a_reserve_leaves_so_much_free_in_whole_granules(self) -> None:
        size = pool_bytes(None, 20 * GIB - 7, self.MEMORY)
        assert size == 50 * GIB
        assert size % GRANULE == 0

    def test_a_size_is_taken_as_it_is_if_it_fits_beside_a_reserve_that_is_given(self) -> None:
        assert pool_bytes(70 * GIB, None, self.MEMORY) == 70 * GIB
        assert pool_bytes(60 * GIB, 10 * GIB, self.MEMORY) == 60 * GIB

    @pytest.mark.parametrize(
        ("wanted", "reserve", "text"),
        [
            (71 * GIB, None, rf"--pool-bytes is {71 * GIB}, but must be at most the {70 * GIB + 1} bytes .*; lower it"),
            (61 * GIB, 10 * GIB, rf"at most the {60 * GIB + 1} bytes that are free on the GPU beside --reserve-bytes"),
            (GIB, 75 * GIB, "at most the 0 bytes"),
            (None, 71 * GIB, rf"--reserve-bytes is {71 * GIB}, but must be less than the {70 * GIB + 1} bytes"),
        ],
    )
    def test_what_does_not_fit_is_refused_with_numbers(
        self, wanted: int | None, reserve: int | None, text: str
    ) -> None:
        with pytest.raises(PagepoolError, match=text) as caught:
            pool_bytes(wanted, reserve, self.MEMORY)
        assert caught.value.reason is Reason.INVALID_FIELD


class TestSlab:
    async def test_is_zeroed_before_anybody_gets_its_handle(self, machine: Machine, locks: LeaseLocks) -> None:
        driver = fake_driver(machine)
        pool = PoolMemory(MemdConfig(device="cuda", pool_bytes=GIB + 5), locks, lambda: driver)
        slab = await opened(pool)
        assert driver.api.calls == [f"memset 0 {GIB + GRANULE}", "synchronize"]
        assert slab.size_bytes == GIB + 5
        assert machine.gpus[0].used == GIB + GRANULE
        pool.close()
        assert machine.gpus[0].used == 0

    async def test_copies_of_blocks_are_done_when_it_returns(self, machine: Machine, locks: LeaseLocks) -> None:
        driver = fake_driver(machine)
        pool = PoolMemory(MemdConfig(device="cuda", pool_bytes=GIB), locks, lambda: driver)
        slab = await opened(pool)
        driver.api.calls.clear()
        entries = [pack_entry(Format.BF16, 0, unit) for unit in (2, 8, 4)]
        copier_of(slab)([BlockCopy(entries[0], entries[1]), BlockCopy(entries[1], entries[2])], 100)
        copier_of(slab)([], 100)
        assert driver.api.calls == ["copy 200 800 200", "copy 800 400 200", "synchronize"]
        pool.close()
        assert len(driver.api.threads) == 1

    async def test_all_cuda_is_on_one_thread_that_ends_without_a_context(
        self, machine: Machine, locks: LeaseLocks
    ) -> None:
        driver = fake_driver(machine)
        pool = PoolMemory(MemdConfig(device="cuda:1", pool_bytes=GIB), locks, lambda: driver)
        await opened(pool)
        await asyncio.to_thread(pool.close)
        assert len(driver.api.threads) == 1
        assert threading.get_ident() not in driver.api.threads
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("memd-gpu")]
        pool.close()

    async def test_workers_are_told_handle_gpu_and_pid(self, machine: Machine, locks: LeaseLocks) -> None:
        pool = memory(machine, locks, device="cuda:1", pool_bytes=GIB)
        slab = await opened(pool)
        (told,) = slab_messages(slab)
        assert told.size_bytes == GIB
        assert (told.cuda_ipc.handle, told.cuda_ipc.memd_pid) == (b"\1" * 64, os.getpid())
        assert told.cuda_ipc.device_uuid == "GPU-02020202-0202-0202-0202-020202020202"
        device = device_message(slab)
        assert device is not None
        assert (device.uuid, device.name, device.memd_pid) == (told.cuda_ipc.device_uuid, "Fake GPU", os.getpid())
        pool.close()

    async def test_a_mig_instance_has_its_own_name(self, locks: LeaseLocks) -> None:
        pool = memory(Machine([FakeGpu(0, mig=True)]), locks, pool_bytes=GIB)
        slab = await opened(pool)
        assert slab.gpu.uuid == "MIG-80808080-8080-8080-8080-808080808080"
        assert slab.gpu.whole == UUID
        pool.close()

    async def test_memory_that_goes_between_asking_and_taking_is_refused_and_no_thread_stays(
        self, machine: Machine, locks: LeaseLocks
    ) -> None:
        driver = fake_driver(machine)

        def taken(_size: int) -> None:
            raise driver.api.MemoryError("cuMemAlloc failed: out of memory")

        driver.api.mem_alloc = taken
        pool = PoolMemory(MemdConfig(device="cuda", pool_bytes=GIB), locks, lambda: driver)
        with pytest.raises(PagepoolError, match=rf"--pool-bytes is {GIB}, but must be one piece of the {80 * GIB}"):
            await opened(pool)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("memd-gpu")]


class TestChoice:
    @pytest.mark.parametrize("flag", ["cuda", "cuda:0"])
    async def test_a_gpu_that_is_not_there_is_refused_with_the_way_out(self, locks: LeaseLocks, flag: str) -> None:
        def none() -> Driver:
            raise CudaUnavailableError("CUDA cannot be used (libcuda.so.1: no such file)")

        pool = PoolMemory(MemdConfig(device=flag), locks, none)
        text = f"--device is {flag}, but must be a GPU that can be used here: .*libcuda.*; use --device cpu"
        with pytest.raises(PagepoolError, match=text) as caught:
            await pool.open(asyncio.Event())
        assert caught.value.reason is Reason.INVALID_FIELD

    async def test_auto_takes_shared_memory_where_there_is_no_gpu(self, locks: LeaseLocks, tmp_path: Path) -> None:
        def none() -> Driver:
            raise CudaUnavailableError("no driver")

        pool = PoolMemory(MemdConfig(slab_dir=tmp_path, pool_bytes=4096), locks, none)
        slab = await pool.open(asyncio.Event())
        assert slab is not None
        assert (slab.layout_version, slab_messages(slab)[0].shared_memory.path) == (1, str(slab))
        assert device_message(slab) is None
        pool.close()

    async def test_auto_takes_the_first_gpu_and_cpu_takes_none(
        self, machine: Machine, locks: LeaseLocks, tmp_path: Path
    ) -> None:
        pool = memory(machine, locks, device="auto", pool_bytes=GIB)
        slab = await opened(pool)
        assert (slab.gpu.uuid, slab.layout_version) == (UUID, 2)
        pool.close()
        pool = memory(machine, locks, device="cpu", pool_bytes=4096, slab_dir=tmp_path)
        assert not isinstance(await pool.open(asyncio.Event()), CudaSlab)
        pool.close()

    async def test_a_number_that_is_not_there_is_refused_with_those_that_are(
        self, machine: Machine, locks: LeaseLocks
    ) -> None:
        pool = memory(machine, locks, device="cuda:2")
        with pytest.raises(
            PagepoolError, match=rf"cuda:2, but must be one of the 2 GPUs .*cuda:0 is Fake GPU \({UUID}"
        ):
            await opened(pool)

    async def test_a_gpu_that_is_anothers_alone_is_refused_even_by_auto(
        self, machine: Machine, locks: LeaseLocks
    ) -> None:
        machine.gpus[0].exclusive = True
        pool = memory(machine, locks, device="auto")
        with pytest.raises(PagepoolError, match=r"--device is cuda:0, but must be .*exclusive mode; use --device cpu"):
            await opened(pool)

    async def test_wsl2_is_refused_by_name(
        self, machine: Machine, locks: LeaseLocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        release = tmp_path / "osrelease"
        release.write_text("5.15.90.1-microsoft-standard-WSL2\n")
        monkeypatch.setattr(cuda, "on_wsl2", lambda: on_wsl2(release))
        with pytest.raises(PagepoolError, match=r"--device is cuda, .*WSL 2, where CUDA maps no memory"):
            await opened(memory(machine, locks))
        release.write_text("6.8.0-45-generic\n")
        pool = memory(machine, locks, pool_bytes=GIB)
        await opened(pool)
        pool.close()

    def test_the_flag_takes_four_kinds_of_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for word in ("auto", "cpu", "cuda", "cuda:12"):
            assert load_config(["--device", word]).config.device == word
        for word in ("gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", ""):
            with pytest.raises(PagepoolError, match=r"--device is .*auto, cpu, cuda, or cuda:N"):
                load_config(["--device", word])

    def test_check_says_where_the_pool_would_lie(self, machine: Machine, tmp_path: Path) -> None:
        line = slabs.describe(MemdConfig(reserve_bytes=20 * GIB), lambda: fake_driver(machine))
        assert line == (
            f"the pool lies on cuda:0, Fake GPU ({UUID}): {60 * GIB} of {80 * GIB} free bytes, "
            f"{20 * GIB} left for workers"
        )
        line = slabs.describe(MemdConfig(device="cpu", pool_bytes=4096, slab_dir=tmp_path))
        assert line == f"the pool lies in shared memory in {tmp_path}: 4096 bytes (no GPU: --device cpu)"


class TestFormerPool:
    """A memd that was killed: what it had of the GPU is counted as used until its workers let go of it."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slabs, "FORMER_POLL_S", 0.01)
        monkeypatch.setattr(slabs, "FORMER_WORKERS_S", 0.5)

    @pytest.fixture
    def lease(self, locks: LeaseLocks) -> Callable[[], None]:
        """A worker of the former memd; what ends it."""
        held = os.open(locks.directory / "worker-7-x.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        return lambda: os.close(held)

    def killed(self, machine: Machine, locks: LeaseLocks, size: int = 40 * GIB, uuid: str = UUID) -> None:
        machine.gpus[0].used = size
        PoolNote(locks.directory.parent / "gpu-pool.json").write(FormerPool(uuid, size))

    async def test_it_is_waited_for_while_its_worker_lives_however_long(
        self, machine: Machine, locks: LeaseLocks, lease: Callable[[], None]
    ) -> None:
        self.killed(machine, locks)
        pool = memory(machine, locks, reserve_bytes=40 * GIB)
        coming = asyncio.create_task(opened(pool))
        await asyncio.sleep(1)
        assert not coming.done()
        lease()
        machine.gpus[0].used = 0
        slab = await asyncio.wait_for(coming, 5)
        assert slab.size_bytes == 40 * GIB
        pool.close()

    async def test_a_smaller_pool_is_not_taken_before_the_former_ones_memory_can_be_back(
        self, machine: Machine, locks: LeaseLocks
    ) -> None:
        self.killed(machine, locks, 30 * GIB)
        pool = memory(machine, locks, reserve_bytes=40 * GIB)
        coming = asyncio.create_task(opened(pool))
        await asyncio.sleep(0.2)
        assert not coming.done()
        slab = await asyncio.wait_for(coming, 5)
        assert slab.size_bytes == 10 * GIB
        pool.close()

    async def test_a_size_that_fits_beside_it_is_taken_at_once(
        self, machine: Machine, locks: LeaseLocks, lease: Callable[[], None]
    ) -> None:
        self.killed(machine, locks)
        pool = memory(machine, locks, pool_bytes=40 * GIB)
        assert (await asyncio.wait_for(opened(pool), 0.4)).size_bytes == 40 * GIB
        pool.close()
        lease()

    async def test_one_that_never_fits_is_refused_when_nobody_is_left_to_wait_for(
        self, machine: Machine, locks: LeaseLocks
    ) -> None:
        self.killed(machine, locks)
        with pytest.raises(PagepoolError, match="--pool-bytes"):
            await asyncio.wait_for(opened(memory(machine, locks, pool_bytes=60 * GIB)), 5)

    @pytest.mark.parametrize("uuid", ["", "GPU-02020202-0202-0202-0202-020202020202"])
    async def test_without_a_former_pool_on_this_gpu_nothing_is_waited_for(
        self, machine: Machine, locks: LeaseLocks, uuid: str
    ) -> None:
        if uuid:
            self.killed(machine, locks, uuid=uuid)
        machine.gpus[0].used = 40 * GIB
        with pytest.raises(PagepoolError, match="--pool-bytes"):
            await asyncio.wait_for(opened(memory(machine, locks, pool_bytes=60 * GIB)), 0.4)

    async def test_the_wait_ends_when_memd_is_to_stop_and_leaves_nothing(
        self, machine: Machine, locks: LeaseLocks, lease: Callable[[], None]
    ) -> None:
        self.killed(machine, locks)
        stop = asyncio.Event()
        pool = memory(machine, locks, pool_bytes=60 * GIB)
        coming = asyncio.create_task(pool.open(stop))
        await asyncio.sleep(0.05)
        stop.set()
        assert await asyncio.wait_for(coming, 5) is None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("memd-gpu")]
        pool.close()
        lease()

    async def test_the_note_goes_with_the_memory_but_not_while_a_worker_maps_it(
        self, machine: Machine, locks: LeaseLocks, lease: Callable[[], None]
    ) -> None:
        note = PoolNote(locks.directory.parent / "gpu-pool.json")
        pool = memory(machine, locks, pool_bytes=GIB)
        await opened(pool)
        assert note.read() == FormerPool(UUID, GIB)
        pool.close()
        assert note.read() == FormerPool(UUID, GIB)
        lease()
        pool = memory(machine, locks, pool_bytes=GIB)
        await opened(pool)
        pool.close()
        assert note.read() is None

    async def test_a_worker_that_has_just_detached_may_unlock_a_moment_later(
        self, machine: Machine, locks: LeaseLocks, lease: Callable[[], None]
    ) -> None:
        pool = memory(machine, locks, pool_bytes=GIB)
        await opened(pool)
        asyncio.get_running_loop().call_later(0.2, lease)
        await asyncio.to_thread(pool.close)
        assert PoolNote(locks.directory.parent / "gpu-pool.json").read() is None

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"uuid": "GPU-1"}', '{"uuid": "GPU-1", "size_bytes": "many"}'])
    def test_a_note_that_was_cut_short_says_nothing(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "note.json").write_text(text)
        assert PoolNote(tmp_path / "note.json").read() is None
