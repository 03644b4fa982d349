"""The pagepool command as a process, and a scripted inferd at the place where the command looks for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from pagepool.inferd.v1 import generation_service_pb2_grpc as pb_grpc

ServicerT = TypeVar("ServicerT", bound=pb_grpc.GenerationServiceServicer)
add_inferd: Any = pb_grpc.add_GenerationServiceServicer_to_server


@contextmanager
def served(servicer: ServicerT, folder: Path) -> Iterator[ServicerT]:
    """It answers at inferd's default socket in this folder."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_inferd(servicer, server)
    server.add_insecure_port(f"unix:{folder / 'inferd.sock'}")
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None).wait()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def default_signals() -> Iterator[None]:
    """A child inherits which signals are ignored; under nohup, or as a job of a script, these two are."""
    ends = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(end, signal.default_int_handler) for end in ends]
    yield
    for end, handler in zip(ends, before, strict=True):
        signal.signal(end, handler)


@pytest.fixture
def start(tmp_path: Path, default_signals: None) -> Iterator[Start]:
    running = []

    def launch(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagepool_client.cli.main", *words, "--socket-dir", str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        running.append(process)
        return process

    yield launch
    for process in running:
        process.kill()
        process.communicate()
