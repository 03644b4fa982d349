"""Real daemons on real sockets, and a worker that speaks the raw protocol."""

from __future__ import annotations

import fcntl
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.errors import PagepoolError
from pagepool.memd.v1 import pool_service_pb2, pool_service_pb2_grpc, types_pb2, worker_service_pb2_grpc
from pagepool.memd.v1 import worker_service_pb2 as wpb
from pagepool_client import Attachment, PoolClient, PoolSession

READY_S = 20.0


def wait_until(condition: Callable[[], Any], timeout_s: float = 5.0) -> Any:
    """Polls until the condition holds and returns its value; fails the test if it does not in time."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not so within {timeout_s} s")
        time.sleep(0.02)
    return value


@dataclass
class Memd:
    """A running memd. `directory` is its private folder, `output` what it wrote before it was ready."""

    process: subprocess.Popen[str]
    directory: Path
    slab_dir: Path
    addresses: list[str]
    channels: list[grpc.Channel] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.directory / "memd.sock"

    @property
    def target(self) -> str:
        return f"unix:{self.socket}"

    @property
    def tcp(self) -> str:
        return next(address.removeprefix("tcp:") for address in self.addresses if address.startswith("tcp:"))

    @property
    def log(self) -> str:
        return (self.directory / "memd.log").read_text()

    def channel(self, target: str = "") -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        self.channels.append(grpc.insecure_channel(target or self.target, options=options))
        return self.channels[-1]

    def pool(self, target: str = "") -> pool_service_pb2_grpc.PoolServiceStub:
        return pool_service_pb2_grpc.PoolServiceStub(self.channel(target))

    def usage(self) -> types_pb2.PoolUsage:
        return self.pool().GetPool(pool_service_pb2.GetPoolRequest()).pool.usage

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        code = self.process.wait(15)
        if self.process.stdout:
            self.process.stdout.close()
        return code


def clean_environ() -> dict[str, str]:
    """The environment without anything that would steer a daemon."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PAGEPOOL_", "NOTIFY_"))}


@pytest.fixture
def private_dir() -> Iterator[Path]:
    """A folder of mode 0700 with a path short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="pp-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def slab_dir() -> Iterator[Path]:
    """A folder in shared memory that only this test uses."""
    path = Path(tempfile.mkdtemp(prefix="pp-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start_memd(private_dir: Path, slab_dir: Path) -> Iterator[Callable[..., Memd]]:
    """Starts memd with more flags; it listens on `private_dir`/memd.sock and a free TCP port."""
    with memds(private_dir, slab_dir) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_memd() -> Iterator[Callable[..., Memd]]:
    """start_memd for one memd that all tests of a module share."""
    private = Path(tempfile.mkdtemp(prefix="pp-"))
    slabs = Path(tempfile.mkdtemp(prefix="pp-", dir="/dev/shm"))
    with memds(private, slabs) as start:
        yield start
    for path in (private, slabs):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def memds(private_dir: Path, slab_dir: Path) -> Iterator[Callable[..., Memd]]:
    """A way to start memds, all of which end with the context."""
    running: list[Memd] = []

    def start(*flags: str, directory: Path = private_dir, environ: Mapping[str, str] | None = None) -> Memd:
        listen = ["--listen", f"unix:{directory / 'memd.sock'}", "--listen", "tcp:127.0.0.1:0"]
        command = [sys.executable, "-m", "memd", *listen, "--slab-dir", str(slab_dir), "--log-format", "json"]
        if "--device" not in flags:  # these tests are of the CPU, also where there is a GPU
            command += ["--device", "cpu"]
        if not {"--pool-bytes", "--reserve-bytes"} & set(flags):
            command += ["--pool-bytes", "16MiB"]
        log = (directory / "memd.log").open("a")
        with log:
            process = subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**clean_environ(), **(environ or {})},
            )
        line = process.stdout.readline() if process.stdout else ""
        memd = Memd(process, directory, slab_dir, line.removeprefix("memd is ready: ").split())
        running.append(memd)
        assert line.startswith("memd is ready"), memd.log
        return memd

    try:
        yield start
    finally:
        for memd in running:
            for channel in memd.channels:
                channel.close()
            if memd.process.poll() is None:
                memd.process.send_signal(signal.SIGCONT)
                memd.stop()


@pytest.fixture
def memd(start_memd: Callable[..., Memd]) -> Memd:
    """A memd with a heartbeat timeout of a second and a pool of 16 MiB."""
    return start_memd("--heartbeat-timeout", "1s", "--drain-grace", "1s")


def make_geometry(digest: bytes = b"\1" * 32, name: str = "tiny", **changes: Any) -> types_pb2.Geometry:
    """Two layers of one KV head with 8 elements a row, f32: a block of 16 tokens has 4 KiB."""
    layers = [types_pb2.LayerGeometry(num_kv_heads=1, head_dim_k=8, head_dim_v=8) for _ in range(2)]
    fields = {"layers": layers, "format": types_pb2.FORMAT_F32, "layout_version": 1, **changes}
    return types_pb2.Geometry(model_digest=digest, model_name=name, **fields)


@pytest.fixture
def geometry() -> types_pb2.Geometry:
    """A tiny geometry; see make_geometry."""
    return make_geometry()


@pytest.fixture
def session(memd: Memd, geometry: types_pb2.Geometry) -> Iterator[PoolSession]:
    """A worker's session with `memd`, of `geometry`."""
    with PoolSession(Attachment(memd.target, "worker", geometry)) as made:
        yield made


@pytest.fixture
def client(memd: Memd, session: PoolSession) -> Iterator[PoolClient]:
    """A client of `memd`, whose pool is cut."""
    with PoolClient(memd.target) as made:
        yield made


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> PagepoolError:
    """The error that a call raises; the test fails if it raises none."""
    with pytest.raises(PagepoolError) as caught:
        call(*arguments, **named)
    return caught.value


class RawWorker:
    """One Attach stream driven by hand. `receive` returns the next message or raises what ended the stream."""

    def __init__(self, memd: Memd, name: str = "raw", *, lock: bool = True) -> None:
        self.lock_name = f"{name}-{os.urandom(6).hex()}.lock"
        self.lock_path = memd.directory / "leases" / self.lock_name
        self._memd = memd
        self._name = name
        self._descriptor = os.open(self.lock_path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        if lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._step = 0
        self.connect()

    def connect(self) -> None:
        self._outbox: queue.SimpleQueue[wpb.AttachRequest | None] = queue.SimpleQueue()
        stub = worker_service_pb2_grpc.WorkerServiceStub(self._memd.channel())
        self._call = stub.Attach(iter(self._outbox.get, None), timeout=30)

    def send(self, **message: Any) -> None:
        self._outbox.put(wpb.AttachRequest(**message))

    def receive(self, kind: str = "") -> Any:
        """The next message; with `kind`, the next of that kind."""
        while True:
            message = next(self._call)
            name = message.WhichOneof("message")
            if not kind or name == kind:
                return getattr(message, name)

    def hello(self, geometry: types_pb2.Geometry, **fields: Any) -> wpb.Welcome:
        self.send(hello=wpb.Hello(worker_name=self._name, lock_file=self.lock_name, geometry=geometry, **fields))
        return self.receive("welcome")

    def step(self, **fields: Any) -> wpb.StepResult:
        self._step += 1
        self.send(step=wpb.Step(step_id=self._step, **fields))
        return self.receive("step_result")

    def create(self, token_ids: list[int], num_blocks: int, **fields: Any) -> wpb.Grant:
        request = wpb.TableRequest(ref=1, token_ids=token_ids, num_blocks=num_blocks, **fields)
        result = self.step(creates=[request])
        assert not result.refusals, result
        return result.grants[0]

    def commit(self, table_id: int, token_ids: list[int]) -> wpb.StepResult:
        return self.step(commits=[wpb.Commit(table_id=table_id, token_ids=token_ids)])

    def ending(self) -> grpc.RpcError:
        """The error that ends the stream."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self._call)
        return caught.value

    def break_stream(self) -> None:
        self._call.cancel()
        self._outbox.put(None)

    def unlock(self) -> None:
        """As if the process had ended."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def close(self) -> None:
        self.break_stream()
        self.unlock()


@pytest.fixture
def raw_worker(memd: Memd) -> Iterator[Callable[..., RawWorker]]:
    """Makes raw workers of `memd`; call `hello` on each."""
    workers: list[RawWorker] = []

    def make(name: str = "raw", **options: Any) -> RawWorker:
        workers.append(RawWorker(memd, name, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def wait() -> Callable[..., Any]:
    """`wait_until`, for test modules."""
    return wait_until


@pytest.fixture
def raw_worker_of() -> Iterator[Callable[..., RawWorker]]:
    """Makes raw workers of any memd."""
    workers: list[RawWorker] = []

    def make(memd: Memd, name: str = "raw") -> RawWorker:
        workers.append(RawWorker(memd, name))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


# Workers. `tests.e2e.workers` is imported late, since it builds on this module.


@pytest.fixture(scope="session")
def default_house() -> Iterator[Any]:
    """A memd for the default model, and a way to start workers on it; see tests.e2e.workers.household."""
    from tests.e2e.workers import household

    with household("--pool-bytes", "512MiB") as house:
        yield house


@pytest.fixture(scope="session")
def default_memd(default_house: Any) -> Memd:
    """The memd of `worker`."""
    return default_house[0]


@pytest.fixture(scope="session")
def worker(default_house: Any) -> Any:
    """A worker of the default model in float32."""
    return default_house[1]("a", "--dtype", "float32").ready()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random llama and the default model's tokenizer."""
    from tests.e2e.workers import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("first") / "tiny")


@pytest.fixture(scope="session")
def tiny_house(tiny_model: Path) -> Iterator[Any]:
    """A memd and two workers of the tiny model; see tests.e2e.workers.TinyHouse."""
    from tests.e2e.workers import tiny_household

    with tiny_household(tiny_model) as house:
        yield house
