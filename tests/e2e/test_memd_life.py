"""memd as a process: start, stop, kill, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagepool.errors import Reason
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1 import types_pb2
from pagepool.memd.v1 import worker_service_pb2 as wpb
from pagepool.status import from_rpc_error

SERVICES = ("", "pagepool.memd.v1.PoolService", "pagepool.memd.v1.WorkerService")


def run_memd(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """memd run to its end."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PAGEPOOL_")}
    command = [sys.executable, "-m", "memd", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env={**clean, **environ})


def health(memd: Any, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(memd.channel())
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service)).status)


def test_sigterm_stops_in_order_and_leaves_nothing(start_memd: Callable[..., Any]) -> None:
    memd = start_memd()
    assert len(list(memd.slab_dir.iterdir())) == 1
    assert memd.addresses[0] == f"unix:{memd.socket}"
    assert [health(memd, service) for service in SERVICES] == [health_pb2.HealthCheckResponse.SERVING] * 3
    assert memd.stop() == 0
    assert not list(memd.slab_dir.iterdir())
    assert not memd.socket.exists()


def test_a_worker_is_asked_to_detach_and_memd_waits_for_it(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    worker = raw_worker()
    worker.hello(geometry)
    channel = memd.channel()
    watch = memd.pool().WatchPool(pb.WatchPoolRequest(), timeout=10)
    next(watch)
    grpc.channel_ready_future(channel).result(5)
    memd.process.send_signal(signal.SIGTERM)
    assert worker.receive("drain").grace.ToMilliseconds() == 1000
    stub = health_pb2_grpc.HealthStub(channel)
    assert stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        list(watch)
    assert from_rpc_error(caught.value).reason is Reason.DRAINING
    late = raw_worker("late")
    late.send(hello=wpb.Hello(lock_file=late.lock_name, geometry=geometry))
    error = from_rpc_error(late.ending())
    assert error.reason is Reason.DRAINING
    assert error.retry_after_s
    worker.send(detach=wpb.Detach())
    assert worker.receive("detach_ack") == wpb.DetachAck()
    assert memd.wait() == 0


def test_a_worker_that_does_not_detach_is_ended_after_the_grace(
    start_memd: Callable[..., Any], raw_worker_of: Callable[..., Any], geometry: types_pb2.Geometry
) -> None:
    memd = start_memd("--drain-grace", "500ms")
    worker = raw_worker_of(memd)
    worker.hello(geometry)
    memd.process.send_signal(signal.SIGTERM)
    assert from_rpc_error(worker.ending()).reason is Reason.DRAINING
    assert memd.wait() == 0
    assert not list(memd.slab_dir.iterdir())


@pytest.mark.parametrize("delay_s", [0.2, *(pytest.param(x / 20, marks=pytest.mark.full) for x in range(2, 30))])
def test_sigterm_during_start_up_is_an_orderly_exit(private_dir: Path, slab_dir: Path, delay_s: float) -> None:
    flags = ["--listen", f"unix:{private_dir}/memd.sock", "--slab-dir", str(slab_dir), "--pool-bytes", "1GiB"]
    process = subprocess.Popen([sys.executable, "-m", "memd", *flags], stdout=subprocess.DEVNULL)
    time.sleep(delay_s)
    handled = Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0]
    process.send_signal(signal.SIGTERM)
    code = process.wait(20)
    # Until the interpreter itself has started nobody can catch the signal.
    assert code == 0 or not int(handled, 16) >> (signal.SIGTERM - 1) & 1
    assert not list(slab_dir.iterdir())
    assert not (private_dir / "memd.sock").exists()


def test_a_killed_memd_ends_its_streams_and_a_restart_cleans_up_under_a_new_epoch(
    start_memd: Callable[..., Any], geometry: types_pb2.Geometry, raw_worker_of: Any
) -> None:
    memd = start_memd()
    worker = raw_worker_of(memd)
    first = worker.hello(geometry)
    watch = memd.pool().WatchPool(pb.WatchPoolRequest())
    next(watch)
    memd.process.kill()
    started = time.monotonic()
    assert worker.ending().code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError) as caught:
        list(watch)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - started < 2
    memd.wait()
    left = list(memd.slab_dir.iterdir())
    assert len(left) == 1
    assert memd.socket.exists()
    again = start_memd()
    assert left[0] not in set(again.slab_dir.iterdir())
    assert len(list(again.slab_dir.iterdir())) == 1
    pool = again.pool().GetPool(pb.GetPoolRequest()).pool
    assert pool.epoch != first.epoch
    renewal = pb.RenewLeaseRequest(epoch=first.epoch, lease_id=first.lease_id)
    with pytest.raises(grpc.RpcError) as caught:
        again.pool().RenewLease(renewal)
    assert from_rpc_error(caught.value).reason is Reason.EPOCH_MISMATCH
    reattached = raw_worker_of(again)
    welcome = reattached.hello(geometry, reclaim_epoch=first.epoch, reclaim_lease_id=first.lease_id)
    assert not welcome.reclaimed


def test_a_second_memd_on_the_same_socket_is_refused_and_the_first_lives(start_memd: Callable[..., Any]) -> None:
    memd = start_memd()
    done = run_memd("--listen", f"unix:{memd.socket}", "--slab-dir", str(memd.slab_dir), "--pool-bytes", "1MiB")
    assert done.returncode == 2
    assert str(memd.socket) in done.stderr
    assert "--listen" in done.stderr
    assert "Traceback" not in done.stderr
    assert memd.usage().total_blocks == 0
    assert len(list(memd.slab_dir.iterdir())) == 1


def test_a_taken_port_is_refused_and_nothing_is_left(
    start_memd: Callable[..., Any], private_dir: Path, slab_dir: Path
) -> None:
    memd = start_memd()
    other = private_dir / "other"
    other.mkdir(mode=0o700)
    flags = ["--listen", f"unix:{other}/memd.sock", "--slab-dir", str(slab_dir), "--pool-bytes", "1MiB"]
    done = run_memd(*flags, "--listen", f"tcp:{memd.tcp}")
    assert done.returncode == 2
    assert memd.tcp in done.stderr
    assert not (other / "memd.sock").exists()
    assert len(list(slab_dir.iterdir())) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pool-bytes", "999TiB"], ["--pool-bytes", "free", "--slab-dir"]),
        (["--listen", "tcp:127.0.0.1:0"], ["unix:PATH"]),
        (["--geometry", "none.json"], ["--geometry", "none.json"]),
        (["--max-num-blocks", "0"], ["--max-num-blocks", "at least 1"]),
    ],
)
def test_impossible_settings_exit_with_2_and_say_why(private_dir: Path, flags: list[str], words: list[str]) -> None:
    listen = [] if "--listen" in flags else ["--listen", f"unix:{private_dir}/memd.sock"]
    done = run_memd(*listen, *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert [word for word in words if word not in done.stderr] == []


def test_check_prints_the_settings_and_touches_nothing(private_dir: Path) -> None:
    listen = f"unix:{private_dir}/x/memd.sock"
    done = run_memd("--check", "--listen", listen, PAGEPOOL_MEMD_POOL_BYTES="1GiB")
    assert done.returncode == 0
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["listen"] == [listen, "(--listen)"]
    assert rows["pool_bytes"] == ["1073741824", "(PAGEPOOL_MEMD_POOL_BYTES)"]
    assert rows["block_size"] == ["16", "(default)"]
    assert not list(private_dir.iterdir())
    wrong = run_memd("--check", PAGEPOOL_MEMD_POOL_SIZE="1GiB")
    assert wrong.returncode == 2
    assert "PAGEPOOL_MEMD_POOL_SIZE" in wrong.stderr


def test_a_geometry_file_cuts_the_pool_at_start(
    start_memd: Callable[..., Any], private_dir: Path, geometry: types_pb2.Geometry
) -> None:
    file = private_dir / "geometry.json"
    file.write_text(json_format.MessageToJson(geometry))
    memd = start_memd("--geometry", str(file), "--max-num-blocks", "7", "--block-size", "32")
    pool = memd.pool().GetPool(pb.GetPoolRequest()).pool
    assert (pool.usage.total_blocks, pool.geometry, pool.block_size) == (7, geometry, 32)
    lease = memd.pool().CreateLease(pb.CreateLeaseRequest(ttl=Duration(seconds=5)))
    request = pb.AllocateBlocksRequest(epoch=lease.epoch, lease_id=lease.lease.lease_id, num_blocks=7)
    assert len(memd.pool().AllocateBlocks(request).block_ids) == 7


def test_systemd_is_told_when_memd_is_ready(private_dir: Path, slab_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(private_dir / "notify"))
        notified.settimeout(20)
        flags = ["--listen", f"unix:{private_dir}/memd.sock", "--slab-dir", str(slab_dir), "--pool-bytes", "1MiB"]
        environ = {**os.environ, "NOTIFY_SOCKET": str(private_dir / "notify")}
        process = subprocess.Popen([sys.executable, "-m", "memd", *flags], env=environ, stdout=subprocess.DEVNULL)
        assert notified.recv(64) == b"READY=1"
        process.terminate()
        assert notified.recv(64) == b"STOPPING=1"
        assert process.wait(20) == 0


def test_100_000_blocks_fit_in_memory_beside_the_pool(
    start_memd: Callable[..., Any], private_dir: Path, geometry: types_pb2.Geometry
) -> None:
    file = private_dir / "geometry.json"
    file.write_text(
        json_format.MessageToJson(types_pb2.Geometry(**{**_fields(geometry), "layers": geometry.layers[:1]}))
    )
    memd = start_memd("--geometry", str(file), "--block-size", "8", "--pool-bytes", "160MiB")
    stub = memd.pool()
    lease = stub.CreateLease(pb.CreateLeaseRequest(ttl=Duration(seconds=60)))
    request = pb.AllocateBlocksRequest(epoch=lease.epoch, lease_id=lease.lease.lease_id, num_blocks=10_000)
    assert sum(len(stub.AllocateBlocks(request).block_ids) for _ in range(10)) == 100_000
    status = Path(f"/proc/{memd.process.pid}/status").read_text()
    sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Rss")}
    assert int(sizes["RssAnon"]) + int(sizes["RssFile"]) < 120 << 10


def _fields(geometry: types_pb2.Geometry) -> dict[str, Any]:
    return {field.name: value for field, value in geometry.ListFields()}
