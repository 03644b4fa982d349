"""memd's life: its parts put together in order, and taken apart in the other."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from memd.clock import LivenessClock
from memd.config import MemdConfig, fp8_of, load_config, notify_address
from memd.copying import copier_of
from memd.core.errors import InvariantError
from memd.core.extent import Tiers
from memd.core.pool import Pool
from memd.device.locks import LeaseLocks
from memd.messages import read_geometry
from memd.moving import Mover
from memd.service import MemdLife, PoolService
from memd.sessions import Sessions
from memd.slabs import (
    PoolMemory,
    Slab,
    describe,
    device_message,
    host_memory,
    keep_sweeping,
    pool_size,
    slab_messages,
)
from memd.worker_service import WorkerService, WorkerTerms
from pagepool import logs
from pagepool.errors import PagepoolError, invalid_field
from pagepool.handlers import Service
from pagepool.lifecycle import EXIT_USAGE, run, sd_notify
from pagepool.listen import Listener, UnixListener
from pagepool.memd.v1 import pool_service_pb2, worker_service_pb2
from pagepool.serve import Servers

TICK_S = 0.1
STOP_GRACE_S = 0.5
LEASE_DIRECTORY = "leases"

_log = structlog.get_logger("memd")
_POOL_SERVICE = pool_service_pb2.DESCRIPTOR.services_by_name["PoolService"]
_WORKER_SERVICE = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"]


def main(argv: Sequence[str]) -> int:
    """Runs memd; its exit code: 0 after an orderly stop, 2 if it was told something impossible."""
    try:
        loaded = load_config(argv)
        if loaded.check:
            sys.stdout.write(f"{loaded.describe()}\n{describe(loaded.config)}\n")
            return 0
    except PagepoolError as error:
        sys.stderr.write(f"memd: {error.message}\n")
        return EXIT_USAGE
    logs.configure(loaded.config.log_level, loaded.config.log_format)
    return run("memd", lambda stop: _live(loaded.config, stop))


async def _live(config: MemdConfig, stop: asyncio.Event) -> None:
    servers = Servers()
    async with AsyncExitStack() as undo:
        undo.push_async_callback(servers.stop, STOP_GRACE_S)
        servers.claim(config.listen)
        locks = LeaseLocks(_lease_directory(config.listen))
        memory = PoolMemory(config, locks)
        slab = await memory.open(stop)
        undo.push_async_callback(asyncio.to_thread, memory.close)
        if slab is None:
            return
        daemon = Memd(config, slab, locks, stop)
        undo.push_async_callback(daemon.mover.close)
        await servers.open(daemon.services)
        ticking = asyncio.create_task(daemon.sessions.keep_time(TICK_S))
        ticking.add_done_callback(daemon.ticking_ended)
        undo.callback(ticking.cancel)
        undo.callback(asyncio.create_task(keep_sweeping(config.slab_dir)).cancel)
        await servers.serving()
        _log.info("memd is ready", listen=servers.addresses, epoch=daemon.pool.epoch, slab=str(slab))
        sys.stdout.write(f"memd is ready: {' '.join(servers.addresses)}\n")
        sys.stdout.flush()
        sd_notify("READY=1", notify_address())
        await stop.wait()
        sd_notify("STOPPING=1", notify_address())
        await servers.draining()
        daemon.raise_failure()  # nothing more is done with a pool that contradicts itself
        await daemon.sessions.drain(config.drain_grace)
    daemon.raise_failure()
    _log.info("memd has stopped")


class Memd:
    """One memd life: the pool and who serves it. `failure` is set by a pool that contradicts itself."""

    def __init__(self, config: MemdConfig, slab: Slab, locks: LeaseLocks, stop: asyncio.Event) -> None:
        self._stop = stop
        self._failure: BaseException | None = None
        epoch = secrets.randbits(64) or 1
        cut = (config.block_size, pool_size(slab, config), config.max_num_blocks, slab.layout_version)
        self.pool = Pool(epoch, *cut, tiers=Tiers(fp8_of(config), host_memory(slab, config)))
        self.pool.remaps.ack_timeout_s = config.ack_timeout
        if config.geometry is not None:
            self.pool.declare(read_geometry(config.geometry, slab.layout_version))
        self._clock = LivenessClock()
        self._locks = locks
        self._locks.remove_leftovers()
        self.sessions = Sessions(self.pool, self._locks, self._clock, self._failed)
        self._terms = WorkerTerms(config.heartbeat_timeout, slab_messages(slab))
        start, copier, device = time.time(), copier_of(slab), device_message(slab)
        self._life = MemdLife(self.pool, self._clock, start, self.sessions, copier, device)
        self.mover = Mover(self.pool, copier, self._clock, self.sessions)
        self.sessions.on_news = self.mover.begin

    def services(self, listener: Listener) -> list[Service]:
        """What a listener offers: everything on Unix sockets, looking only on TCP."""
        read_only = not isinstance(listener, UnixListener)
        pool_service = PoolService(self._life, read_only=read_only)
        worker_service = WorkerService(
            self.pool, self.sessions, self._locks, self._terms, self._clock, read_only=read_only
        )
        return [
            Service(_POOL_SERVICE, pool_service, self._failed),
            Service(_WORKER_SERVICE, worker_service, self._failed),
        ]

    def ticking_ended(self, task: asyncio.Task[None]) -> None:
        """Without the ticker leases never end, so memd must not go on without it."""
        if not task.cancelled():
            self._failure = task.exception()
            self._stop.set()

    def raise_failure(self) -> None:
        """Raises what memd could not go on with, if there was something."""
        if self._failure is not None:
            raise self._failure

    def _failed(self, error: Exception) -> None:
        if isinstance(error, InvariantError):
            self._failure = error
            self._stop.set()


def _lease_directory(listeners: Sequence[Listener]) -> Path:
    """The folder beside the first Unix socket, which workers look in."""
    for listener in listeners:
        if isinstance(listener, UnixListener):
            return listener.path.parent / LEASE_DIRECTORY
    raise invalid_field("--listen", "TCP only", "at least one unix:PATH", "workers attach over a Unix socket")
