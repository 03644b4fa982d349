"""Real daemons on real sockets in a folder of their own, for the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagepool.errors import PagepoolError
from pagepool_client import InferenceClient, PoolClient

START_S = 300.0


@contextmanager
def folder() -> Iterator[Path]:
    """A private folder for sockets and logs."""
    with tempfile.TemporaryDirectory(prefix="pagepool-bench-") as name:
        yield Path(name)


@contextmanager
def daemon(
    module: str, log: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon as a child process, ended by SIGTERM; `environment` is added to this process's own."""
    variables = {**os.environ, **(environment or {})}
    with log.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-m", module, *flags], stdout=out, stderr=out, env=variables)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)


def wait_for(ready: object, child: subprocess.Popen[bytes], log: Path) -> None:
    """Call `ready` until it raises no PagepoolError; SystemExit with the log's end if the child dies first."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if callable(ready) and ready():
                return
        except PagepoolError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{log.name} is not ready:\n{log.read_text()[-2000:]}")


def serving(target: str) -> bool:
    """Whether the standard health service says SERVING, which it does after the warm-up."""
    with grpc.insecure_channel(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            return bool(
                check(health_pb2.HealthCheckRequest(), timeout=5).status == health_pb2.HealthCheckResponse.SERVING
            )
        except grpc.RpcError:
            return False


@contextmanager
def memd(place: Path, *flags: str) -> Iterator[tuple[PoolClient, subprocess.Popen[bytes]]]:
    """A memd and its client; in shared memory unless the flags say otherwise."""
    target = f"unix:{place}/memd.sock"
    words = ("--listen", target, "--device", "cpu", *flags)
    with daemon("memd", place / "memd.log", *words) as child, PoolClient(target) as client:
        wait_for(lambda: client.pool().epoch, child, place / "memd.log")
        yield client, child


@contextmanager
def inferd(
    place: Path, *flags: str, name: str = "inferd", environment: Mapping[str, str] | None = None
) -> Iterator[tuple[InferenceClient, subprocess.Popen[bytes]]]:
    """An inferd on the memd of the same place, and its client; `name` tells several apart."""
    target, log = f"unix:{place}/{name}.sock", place / f"{name}.log"
    words = ("--listen", target, "--memd", f"unix:{place}/memd.sock", "--name", name, *flags)
    with daemon("inferd", log, *words, environment=environment) as child, InferenceClient(target) as client:
        wait_for(lambda: serving(target), child, log)
        yield client, child
