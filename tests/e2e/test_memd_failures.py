"""What nobody foresaw: a status for the caller, the traceback in the log, and the end of memd if it must be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from memd.core.errors import InvariantError
from pagepool.errors import PagepoolError, Reason
from pagepool.handlers import Service, Stream
from pagepool.listen import UnixListener
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1 import pool_service_pb2_grpc, types_pb2, worker_service_pb2, worker_service_pb2_grpc
from pagepool.serve import Servers
from pagepool.status import from_rpc_error

SECRET = "the secret of the failure"


class Failing:
    """Every method fails in a way of its own."""

    async def get_pool(self, _request: Any, _context: Any) -> Any:
        raise InvariantError(SECRET)

    async def watch_pool(self, _request: Any, _context: Any) -> AsyncIterator[pb.WatchPoolResponse]:
        yield pb.WatchPoolResponse()
        raise ZeroDivisionError(SECRET)

    async def attach(self, stream: Stream) -> None:
        await stream.read()
        raise KeyError(SECRET)

    async def get_block(self, _request: Any, _context: Any) -> Any:
        raise PagepoolError(Reason.BLOCK_NOT_FOUND, "no such block", block_id=1)

    def __getattr__(self, name: str) -> Any:
        return self.get_pool


@pytest.fixture
async def failing(private_dir: Path) -> AsyncIterator[tuple[str, list[Exception]]]:
    """The address of a server of Failing, and the failures it told of."""
    told: list[Exception] = []
    pool, worker = pb.DESCRIPTOR.services_by_name["PoolService"], worker_service_pb2.DESCRIPTOR
    services = [
        Service(pool, Failing(), told.append),
        Service(worker.services_by_name["WorkerService"], Failing(), told.append),
    ]
    servers = Servers()
    servers.claim([UnixListener(private_dir / "x.sock")])
    await servers.open(lambda _: services)
    yield servers.addresses[0], told
    await servers.stop(0)


async def expect_failure(call: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert error.reason is Reason.INTERNAL_ERROR
    assert error.code.name == "INTERNAL"
    assert SECRET not in str(caught.value)
    assert "Traceback" not in str(caught.value)


async def read_all(call: Any) -> list[Any]:
    return [message async for message in call]


async def test_unforeseen_failures_are_answered_without_and_logged_with_their_traceback(
    failing: tuple[str, list[Exception]],
) -> None:
    address, told = failing
    with structlog.testing.capture_logs() as logs:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pool_service_pb2_grpc.PoolServiceStub(channel)
            worker = worker_service_pb2_grpc.WorkerServiceStub(channel)
            await expect_failure(stub.GetPool(pb.GetPoolRequest()))
            await expect_failure(read_all(stub.WatchPool(pb.WatchPoolRequest())))
            await expect_failure(read_all(worker.Attach(iter([worker_service_pb2.AttachRequest()]))))
    assert [type(error) for error in told] == [InvariantError, ZeroDivisionError, KeyError]
    assert [log["exc_info"] for log in logs if log["log_level"] == "error"] == told


async def test_a_foreseen_failure_is_told_to_nobody_but_the_caller(failing: tuple[str, list[Exception]]) -> None:
    address, told = failing
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pool_service_pb2_grpc.PoolServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetBlock(pb.GetBlockRequest())
    assert from_rpc_error(caught.value).metadata == {"block_id": "1"}
    assert told == []


def test_a_pool_that_contradicts_itself_ends_memd_at_once(
    start_memd: Callable[..., Any], raw_worker_of: Any, geometry: types_pb2.Geometry, private_dir: Path
) -> None:
    (private_dir / "sitecustomize.py").write_text(
        "import memd.core.pool\n"
        "from memd.core.errors import InvariantError\n"
        "def broken(self): raise InvariantError('planted')\n"
        "memd.core.pool.Pool.usage = broken\n"
    )
    memd = start_memd("--drain-grace", "60s", "--heartbeat-timeout", "60s", environ={"PYTHONPATH": str(private_dir)})
    raw_worker_of(memd).hello(geometry)
    with pytest.raises(grpc.RpcError) as caught:
        memd.pool().GetPool(pb.GetPoolRequest())
    assert from_rpc_error(caught.value).reason is Reason.INTERNAL_ERROR
    assert memd.wait() == 1
    assert "planted" in memd.log
    assert not list(memd.slab_dir.iterdir())
