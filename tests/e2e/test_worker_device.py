"""A real inferd before a memd whose pool lies on a GPU: what it does before it loads a model or touches CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.memd.v1.pool_service_pb2 import GetPoolResponse
from pagepool.memd.v1.pool_service_pb2_grpc import PoolServiceServicer, add_PoolServiceServicer_to_server
from pagepool.memd.v1.types_pb2 import CudaDevice, Pool
from tests.e2e.workers import Worker, launch

UUID = "GPU-11111111-2222-3333-4444-555555555555"


class GpuMemd(PoolServiceServicer):
    """A memd that says of its pool what a test tells it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.memd_pid: Callable[[], int] = lambda: 1
        self.questions = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        add_PoolServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(target)

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def GetPool(self, request: Any, context: Any) -> GetPoolResponse:  # noqa: N802 gRPC's name
        self.questions += 1
        gpu = CudaDevice(uuid=UUID, name="Imaginary GPU", memd_pid=self.memd_pid())
        return GetPoolResponse(pool=Pool(epoch=3, device=f"cuda:{UUID}", cuda_device=gpu))


@pytest.fixture
def memd(private_dir: Path) -> Iterator[GpuMemd]:
    made = GpuMemd(f"unix:{private_dir / 'memd.sock'}")
    yield made
    made.stop()


@pytest.fixture
def worker(memd: GpuMemd, private_dir: Path) -> Iterator[Worker]:
    started = launch(memd.target, private_dir, "w", "--model", str(private_dir / "nowhere"))
    yield started
    if started.process.poll() is None:
        started.process.kill()
    started.wait()


def test_a_gpu_that_this_machine_has_not_is_refused_before_the_model_is_looked_for(
    memd: GpuMemd, worker: Worker
) -> None:
    memd.start()
    assert worker.wait() == 2
    assert f"--device is auto, but memd's pool lies on Imaginary GPU ({UUID})" in worker.log
    assert "nowhere" not in worker.log.partition("Imaginary")[2]


def test_an_engine_that_has_memd_s_pid_is_followed_by_one_that_has_another(memd: GpuMemd, worker: Worker) -> None:
    pids: list[int] = []

    def first_the_engine_s_own() -> int:
        pids.append(worker.engine_pid())
        return pids[0]

    memd.memd_pid = first_the_engine_s_own
    began = time.monotonic()
    memd.start()
    assert worker.wait() == 2
    assert len(set(pids)) == memd.questions == 2
    assert "the engine had memd's PID, each in its own PID namespace, and is started again" in worker.log
    assert "Imaginary GPU" in worker.log
    assert time.monotonic() - began < 25
