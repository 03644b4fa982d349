"""Reads what `top` and `doctor` look at: the pool of one memd, and the workers that were named."""

from __future__ import annotations

import argparse
import threading
import time
from types import TracebackType
from typing import Self

from pagepool.errors import PagepoolError
from pagepool.memd.v1.types_pb2 import Pool
from pagepool_client.cli.places import add_flags as add_place_flags
from pagepool_client.cli.places import inferd_targets, memd_target
from pagepool_client.diagnosis.observation import Observation, WorkerReport
from pagepool_client.inference import InferenceClient
from pagepool_client.pool import PoolClient

WORKER_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 0.1
PAGE_SIZE = 10_000


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say where memd and the workers are."""
    add_place_flags(parser, "memd")
    parser.add_argument(
        "--inferd",
        action="append",
        metavar="TARGET",
        help="a worker's address, unix:PATH or HOST:PORT; repeatable (default: inferd.sock beside memd.sock)",
    )


class Reader:
    """A memd and the workers of a command line, asked together. Use it in a `with` block. Not thread-safe."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._memd = PoolClient(memd_target(args))
        self._asked_for = bool(args.inferd)
        self._workers = [InferenceClient(target, timeout_s=WORKER_TIMEOUT_S) for target in inferd_targets(args)]

    @property
    def target(self) -> str:
        """Where memd is asked."""
        return self._memd.target

    def observe(self, *, with_blocks: bool) -> Observation:
        """Pool, tables and workers as they are now, and every block if asked to. Raises PagepoolError without memd."""
        pool = self._memd.pool()
        blocks = list(self._memd.blocks(page_size=PAGE_SIZE)) if with_blocks else []
        tables = list(self._memd.tables(page_size=PAGE_SIZE))
        workers = [self._report(worker) for worker in self._workers]
        return Observation(pool, blocks, tables, workers, time.time(), target=self.target)

    def watch(self, seconds: float) -> list[Pool]:
        """The pool at the beginning of so many seconds and after each change in them, oldest first."""
        with self._memd.watch(WATCH_INTERVAL_S) as pools:
            timer = threading.Timer(seconds, pools.close)
            timer.start()
            try:
                return list(pools)
            finally:
                timer.cancel()

    def close(self) -> None:
        """Close all channels. Idempotent."""
        self._memd.close()
        for worker in self._workers:
            worker.close()

    def _report(self, worker: InferenceClient) -> WorkerReport:
        try:
            return WorkerReport(worker.target, worker.model(), asked_for=self._asked_for)
        except PagepoolError as error:
            return WorkerReport(worker.target, trouble=error.message, asked_for=self._asked_for)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
