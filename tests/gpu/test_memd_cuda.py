"""memd on a real GPU: its memory seen by other processes, and what comes back when one of them dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagekernels.layout import unpack_entry
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool_client import PoolClient
from tests.e2e.conftest import Memd, RawWorker, make_geometry, memds, wait_until

GIB = 1 << 30
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

pytest.importorskip("pycuda.driver", exc_type=ImportError)


class Worker:
    """A tests.gpu.cuda_worker process."""

    def __init__(
        self, target: str, *flags: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.gpu.cuda_worker", target, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.hello = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker has ended with {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, do: str, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.process.stdin.flush()

    def do(self, do: str, **words: Any) -> dict[str, Any]:
        self.order(do, **words)
        return self.answer()

    def finish(self) -> int:
        """Detaches and ends in order; the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pp-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Memd]]:
    """Starts memd on the first GPU with more flags."""
    with memds(folder, Path("/dev/shm")) as begin:
        yield lambda *flags: begin("--device", "cuda", "--heartbeat-timeout", "2s", "--drain-grace", "5s", *flags)


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(target: str, *flags: str, **options: Any) -> Worker:
        workers.append(Worker(target, *flags, **options))
        return workers[-1]

    yield make
    for each in workers:
        each.end()


def pool_of(memd: Memd, target: str = "") -> Any:
    return memd.pool(target).GetPool(pb.GetPoolRequest()).pool


def used_bytes() -> int:
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    used: int = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    return used


def memd_process(folder: Path, *flags: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "memd", "--listen", f"unix:{folder / 'memd.sock'}", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_workers_share_zeroed_memory_and_grpc_says_where_it_lies(
    start: Callable[..., Memd], worker: Callable[..., Worker]
) -> None:
    dirty = (
        "from pycuda import driver as d; d.init(); c = d.Device(0).retain_primary_context(); c.push();"
        f"m = d.mem_alloc({8 * GIB}); d.memset_d8(m, 171, {8 * GIB}); c.synchronize(); c.pop()"
    )
    subprocess.run([sys.executable, "-c", dirty], check=True)
    size = 5 * GIB + 4096
    memd = start("--pool-bytes", str(size))
    pool = pool_of(memd)
    assert (pool.device, pool.slab_bytes) == (f"cuda:{pool.cuda_device.uuid}", size)
    assert pool.cuda_device.memd_pid == memd.process.pid
    assert "GPU-" in pool.cuda_device.uuid or "MIG-" in pool.cuda_device.uuid
    assert pool_of(memd, memd.tcp).cuda_device == pool.cuda_device
    first, second = worker(memd.target), worker(memd.target)
    assert first.hello["size"] == size
    assert first.do("read", offset=0, size=256 << 20) == {"bytes": [0]}
    assert first.do("read", offset=size - (256 << 20) - 4096, size=256 << 20) == {"bytes": [0]}
    for offset, byte in ((4096, 7), (size - 4096, 9)):
        first.do("write", offset=offset, byte=byte, size=4096)
        assert second.do("read", offset=offset, size=4096) == {"bytes": [byte]}
    assert first.do("close") == {"address": 0}
    assert second.do("read", offset=size - 4096, size=4096) == {"bytes": [9]}
    assert (first.finish(), second.finish(), memd.stop()) == (0, 0, 0)


def test_memd_copies_for_a_client_what_a_worker_has_sealed(
    start: Callable[..., Memd], worker: Callable[..., Worker]
) -> None:
    memd = start("--pool-bytes", str(64 << 20))
    writer = worker(memd.target)
    entries = writer.do("table", num_tokens=34)["entries"]
    pool = pool_of(memd)

    def offset(entry: int) -> int:
        return unpack_entry(entry)[2] * int(pool.unit_bytes)

    for byte, entry in enumerate(entries[:2], 7):
        writer.do("write", offset=offset(entry), byte=byte, size=int(pool.block_bytes))
    with PoolClient(memd.target) as client, client.lease() as lease:
        sealed = {block.entry: block.block_id for block in client.blocks() if block.sealed}
        copies = lease.copy([sealed[entry] for entry in entries[:2]])
        for byte, entry in enumerate(copies.entries, 7):
            assert writer.do("read", offset=offset(entry), size=int(pool.block_bytes)) == {"bytes": [byte]}
        table = lease.create_table([*range(32), 1], 2)
        cut = lease.truncate_table(table.table_id, 20)
        assert writer.do("read", offset=offset(cut.entries[1]), size=int(pool.block_bytes)) == {"bytes": [8]}


def test_a_killed_worker_gives_its_blocks_back_and_the_others_go_on(
    start: Callable[..., Memd], worker: Callable[..., Worker]
) -> None:
    memd = start("--pool-bytes", "64MiB")
    victim, other = worker(memd.target), worker(memd.target)
    victim.do("table", num_tokens=160)
    other.do("write", offset=1 << 20, byte=5, size=4096)
    wait_until(lambda: memd.usage().held_blocks == 10)
    victim.process.kill()
    wait_until(lambda: memd.usage().held_blocks == 0)
    assert memd.usage().cached_blocks == 9
    assert other.do("table", num_tokens=32)["entries"]
    assert other.do("read", offset=1 << 20, size=4096) == {"bytes": [5]}
    assert other.finish() == 0


def test_a_worker_may_come_and_go_as_often_as_it_likes(
    start: Callable[..., Memd], worker: Callable[..., Worker]
) -> None:
    memd = start("--pool-bytes", "64MiB")
    restless = worker(memd.target)
    restless.do("write", offset=12345, byte=77, size=4096)
    assert restless.do("reattach", times=20)["leases"] > 20
    assert restless.do("read", offset=12345, size=4096) == {"bytes": [77]}
    assert pool_of(memd).num_leases == 1
    assert (restless.finish(), memd.stop()) == (0, 0)


def test_workers_detach_before_memd_frees_the_memory(
    start: Callable[..., Memd], worker: Callable[..., Worker], folder: Path
) -> None:
    memd = start("--pool-bytes", "64MiB")
    note = folder / "gpu-pool.json"
    assert json.loads(note.read_text())["size_bytes"] == 64 << 20
    workers = [worker(memd.target) for _ in range(2)]
    for each in workers:
        each.order("until_drained")
    began = time.monotonic()
    assert memd.stop() == 0
    assert time.monotonic() - began < 4
    assert [each.answer() for each in workers] == [{"grace": 5.0}] * 2
    assert "has not detached in time" not in memd.log
    assert not note.exists()


def test_after_a_killed_memd_the_next_one_serves_the_same_workers(
    start: Callable[..., Memd], worker: Callable[..., Worker]
) -> None:
    memd = start("--pool-bytes", "1GiB")
    first = worker(memd.target)
    first.do("write", offset=0, byte=3, size=4096)
    first.order("until_lost")
    memd.kill()
    assert "gone" in first.answer()["lost"]
    again = start("--pool-bytes", "1GiB")
    second = worker(again.target)
    assert second.hello["epoch"] != first.hello["epoch"]
    assert second.do("read", offset=0, size=1 << 20) == {"bytes": [0]}
    assert (first.finish(), second.finish(), again.stop()) == (0, 0, 0)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--device", "cuda:99"), r"--device is cuda:99, but must be one of the \d+ GPUs .*cuda:0 is "),
        (("--device", "cuda", "--pool-bytes", "9TB"), r"--pool-bytes is 9000000000000, but must be at most the \d+"),
        (("--device", "cuda", "--reserve-bytes", "9TB"), r"--reserve-bytes is 9000000000000, but must be less than"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(folder: Path, flags: tuple[str, ...], text: str) -> None:
    process = memd_process(folder, *flags)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert re.search(text, errors), errors


def test_check_says_where_the_pool_would_lie(folder: Path) -> None:
    process = memd_process(folder, "--check", "--pool-bytes", "1GiB")
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert "the pool lies on cuda:0" in output
    assert f"{GIB} of " in output


def test_memd_needs_neither_torch_nor_numba(folder: Path) -> None:
    run = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(('torch', 'numba', 'transformers', 'triton')));"
        "sys.argv = ['memd', *sys.argv[1:]]; runpy.run_module('memd', None, '__main__')"
    )
    done = python(run, "--check", "--device", "cuda", "--listen", f"unix:{folder / 'memd.sock'}")
    assert done.returncode == 0, done.stderr
    assert "the pool lies on cuda:0" in done.stdout


def test_a_worker_on_the_cpu_is_refused_with_the_way_out(start: Callable[..., Memd]) -> None:
    memd = start("--pool-bytes", "64MiB")
    raw = RawWorker(memd)
    try:
        with pytest.raises(Exception, match="start the worker with --device cuda, or memd with --device cpu"):
            raw.hello(make_geometry(layout_version=1))
    finally:
        raw.close()


SETTLE = "import sys; from inferd.device import settle; print(settle('auto', sys.argv[1], print))"


def python(
    code: str, *arguments: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", code, *arguments]
    environ = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environ)


def test_an_engine_takes_memd_s_gpu_and_one_that_cannot_see_it_is_told(start: Callable[..., Memd]) -> None:
    memd = start("--pool-bytes", "64MiB")
    settled = python(SETTLE, memd.target)
    assert (settled.stdout, settled.returncode) == ("0\n", 0), settled.stderr
    blind = python(SETTLE, memd.target, env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert "PagepoolError: --device is auto, but memd's pool lies on NVIDIA" in blind.stderr
    assert "start inferd where" in blind.stderr
    print(blind.stderr.splitlines()[-1])


def test_without_a_visible_gpu_auto_is_shared_memory_and_cuda_a_refusal(folder: Path) -> None:
    run = "import runpy, sys; sys.argv = ['memd', '--check', *sys.argv[1:]]; runpy.run_module('memd', None, '__main__')"
    flags = ("--listen", f"unix:{folder / 'memd.sock'}", "--pool-bytes", "16MiB", "--device")
    auto = python(run, *flags, "auto", env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert "the pool lies in shared memory in /dev/shm: 16777216 bytes (no GPU: " in auto.stdout, auto.stderr
    cuda = python(run, *flags, "cuda", env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert cuda.returncode == 2
    assert "use --device cpu for a pool in shared memory" in cuda.stderr
    print(cuda.stderr)


def can_unshare() -> bool:
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


def test_two_processes_of_one_pid_value_are_refused_and_a_child_of_pid_1_is_not(
    folder: Path, worker: Callable[..., Worker]
) -> None:
    if not can_unshare():
        pytest.skip("this machine allows no PID namespaces")
    memd = memd_process(folder, "--device", "cuda", "--pool-bytes", "64MiB", prefix=NAMESPACE)
    target = f"unix:{folder / 'memd.sock'}"
    try:
        assert memd.stdout is not None
        assert memd.stdout.readline().startswith("memd is ready")
        settled = python(SETTLE, target, prefix=NAMESPACE)
        assert "RespawnError" in settled.stderr
        refused = worker(target, prefix=NAMESPACE)
        assert refused.hello["error"] == "DEVICE_MISMATCH"
        assert "PID is 1, and so is memd's" in refused.hello["message"]
        blind = worker(target, "--blindly", prefix=NAMESPACE)
        assert blind.hello.get("error") == "POOL_LOST", "CUDA maps memory between equal PIDs now"
        shell = ("sh", "-c", '"$@"; exit $?', "sh")
        second = worker(target, prefix=(*NAMESPACE, *shell))
        assert second.hello["pid"] != 1
        assert second.do("read", offset=0, size=4096) == {"bytes": [0]}
        assert second.finish() == 0
    finally:
        memd.kill()
        memd.communicate()


# Memory of the whole GPU: these need a GPU that nobody else uses meanwhile.


def test_the_gpu_holds_the_pool_once_however_many_workers_map_it(
    start: Callable[..., Memd], worker: Callable[..., Worker]
) -> None:
    before = used_bytes()
    memd = start("--pool-bytes", str(20 * GIB))
    alone = used_bytes()
    assert 20 * GIB <= alone - before < 22 * GIB
    with_workers = []
    for _ in range(2):
        worker(memd.target)
        with_workers.append(used_bytes())
    print("NVML used MiB:", [x >> 20 for x in (before, alone, *with_workers)])
    assert with_workers[0] - alone < 2 * GIB
    assert with_workers[1] - with_workers[0] < 2 * GIB


def test_the_memory_of_a_killed_memd_comes_back_at_once(start: Callable[..., Memd]) -> None:
    before = used_bytes()
    memd = start("--pool-bytes", str(20 * GIB))
    began = time.monotonic()
    memd.kill()
    wait_until(lambda: used_bytes() < before + GIB)
    print(f"back {time.monotonic() - began:.2f} s after SIGKILL")
    assert time.monotonic() - began < 5


def test_the_memory_of_a_killed_memd_comes_back_when_its_living_workers_have_unmapped_it(
    start: Callable[..., Memd], worker: Callable[..., Worker]
) -> None:
    before = used_bytes()
    memd = start("--pool-bytes", str(20 * GIB))
    holders = [worker(memd.target) for _ in range(2)]
    for each in holders:
        each.order("until_lost")
    memd.kill()
    for each in holders:
        assert each.answer()["lost"]
    wait_until(lambda: used_bytes() < before + 4 * GIB)
    assert [each.process.poll() for each in holders] == [None, None]


def test_a_new_memd_waits_for_the_memory_that_a_stopped_worker_still_maps(
    start: Callable[..., Memd], worker: Callable[..., Worker], folder: Path
) -> None:
    from pagekernels.cuda.identity import open_driver

    api = open_driver().api
    context = api.Device(0).retain_primary_context()
    context.push()
    free, _ = api.mem_get_info()
    context.pop()
    reserve = ("--reserve-bytes", str(free - 20 * GIB))
    memd = start(*reserve)
    holder = worker(memd.target)
    assert 15 * GIB < holder.hello["size"] <= 20 * GIB
    holder.process.send_signal(signal.SIGSTOP)
    memd.kill()
    with ThreadPoolExecutor(1) as executor:
        coming = executor.submit(start, *reserve)
        wait_until(lambda: "waiting for the memory of the former pool" in memd.log, 15)
        time.sleep(2)
        assert not coming.done()
        line = next(line for line in memd.log.splitlines() if "waiting for the memory" in line)
        print(line)
        assert f"worker-{holder.hello['pid']}-" in line
        holder.process.kill()
        again = coming.result(20)
    assert pool_of(again).slab_bytes > holder.hello["size"] - GIB
    assert again.stop() == 0


def test_memd_runs_where_no_memory_may_be_writable_and_executable(folder: Path) -> None:
    """As systemd's MemoryDenyWriteExecute demands, where the kernel can be asked for it."""
    deny = (  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
        "import ctypes, runpy, sys; sys.exit(77) if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) else "
        "runpy.run_module('memd', run_name='__main__')"
    )
    flags = ("--listen", f"unix:{folder / 'memd.sock'}", "--device", "cuda", "--pool-bytes", "64MiB")
    command = [sys.executable, "-c", deny, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.terminate()
    _, errors = process.communicate(timeout=30)
    if process.returncode == 77:
        pytest.skip("this kernel knows no PR_SET_MDWE")
    assert line.startswith("memd is ready"), errors
    assert process.returncode == 0
