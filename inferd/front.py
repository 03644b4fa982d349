"""inferd's front process: its parts put together in order, and taken apart in the other."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from inferd.config import InferdConfig, engine_environment, load_config, notify_address
from inferd.core.messages import Setup
from inferd.dispatch import Dispatcher
from inferd.service import GenerationService
from inferd.supervisor import EngineLife, EngineProcess, Supervisor
from inferd.text.tokenizer import Tokenizer
from pagepool import logs
from pagepool.errors import PagepoolError
from pagepool.handlers import Service
from pagepool.inferd.v1 import generation_service_pb2
from pagepool.lifecycle import EXIT_USAGE, run, sd_notify
from pagepool.serve import Servers

STOP_GRACE_S = 0.5

_log = structlog.get_logger("inferd")
_SERVICE = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"]


def main(argv: Sequence[str]) -> int:
    """Runs inferd; its exit code: 0 after an orderly stop, 2 if it was told something impossible."""
    try:
        loaded = load_config(argv)
    except PagepoolError as error:
        sys.stderr.write(f"inferd: {error.message}\n")
        return EXIT_USAGE
    config = loaded.config
    if loaded.check:
        sys.stdout.write(loaded.describe() + "\n")
        return 0
    logs.configure(config.log_level, config.log_format)
    if config.print_geometry:
        return print_geometry(config)
    launch = partial(EngineProcess.launch, setup(config), engine_environment(config))
    return run("inferd", lambda stop: live(config, launch, stop))


def print_geometry(config: InferdConfig) -> int:
    """Writes the model's geometry to standard output; the exit code."""
    from inferd.geometry import geometry_json  # needs torch, which the front never loads

    assert config.cache_dir is not None
    try:
        sys.stdout.write(geometry_json(config.model, config.dtype, config.cache_dir, config.device) + "\n")
    except PagepoolError as error:
        sys.stderr.write(f"inferd: {error.message}\n")
        return EXIT_USAGE
    return 0


def setup(config: InferdConfig) -> Setup:
    """What the engine needs of the settings."""
    return Setup(
        model=config.model,
        memd=config.memd,
        name=config.name,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        max_batch_tokens=config.max_batch_tokens or 0,
        max_num_seqs=config.max_num_seqs or 0,
        max_queue=config.max_queue,
        prefix_wait_s=config.prefix_wait,
        speculate_tokens=config.speculate_tokens,
        chunked_prefix=config.enable_chunked_prefix,
        exact=config.kv_precision == "exact",
        warmup=config.warmup,
        compile=config.compile == "on",
        graphs=config.graphs == "on",
        cache_dir=str(config.cache_dir),
        log_level=config.log_level,
        log_format=config.log_format,
    )


async def live(config: InferdConfig, launch: Callable[[], Awaitable[EngineLife]], stop: asyncio.Event) -> None:
    """One life of the front, until `stop` is set. Raises PagepoolError if it cannot go on."""
    servers = Servers()
    async with AsyncExitStack() as undo:
        front = Front(config, servers, launch)
        undo.callback(front.service.close)
        undo.push_async_callback(servers.stop, STOP_GRACE_S)
        servers.claim(config.listen)
        await servers.open(lambda _: [Service(_SERVICE, front.service)])
        await front.run(stop)
    _log.info("inferd has stopped")


class Front:
    """The service, the engine's supervisor, and what health says of them."""

    def __init__(self, config: InferdConfig, servers: Servers, launch: Callable[[], Awaitable[EngineLife]]) -> None:
        self._config = config
        self._servers = servers
        self._changed = asyncio.Event()
        self._dispatcher = Dispatcher(self._changed.set)
        self._supervisor = Supervisor(launch, self._dispatcher)
        self._tokenizer_folder = ""
        self._serving = self._announced = False
        self.service = GenerationService(config.model, self._dispatcher)

    async def run(self, stop: asyncio.Event) -> None:
        """Keeps an engine until `stop` is set, then drains; raises PagepoolError if there can be no engine."""
        supervising = asyncio.create_task(self._supervisor.run())
        following = asyncio.create_task(self._follow())
        stopping = asyncio.create_task(stop.wait())
        tasks = (supervising, following, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            # An engine that was told to stop while it started has failed nobody.
            if isinstance(result, Exception) and not (stop.is_set() and isinstance(result, PagepoolError)):
                raise result

    async def _drain(self) -> None:
        """Takes no more requests and lets the running ones end, if there can be any."""
        sd_notify("STOPPING=1", notify_address())
        self._dispatcher.drain()
        await self._servers.draining()
        if self._serving:
            _log.info("stopping", open_requests=self._dispatcher.open_requests, grace_s=self._config.drain_grace)
            await self._supervisor.shut_down(self._config.drain_grace)

    async def _follow(self) -> None:
        """Follows the engine: takes the tokenizer of its model, and lets health say whether it serves."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            state, card = self._dispatcher.state, self._dispatcher.card
            _log.info("engine", phase=state.phase, detail=state.detail)
            if card is not None and card.tokenizer != self._tokenizer_folder:
                await self.service.use(partial(Tokenizer.load, Path(card.tokenizer)))
                self._tokenizer_folder = card.tokenizer
            await self._tell(serving=self._dispatcher.state.phase == "serving" and bool(self._tokenizer_folder))

    async def _tell(self, *, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            await (self._servers.serving() if serving else self._servers.not_serving())
        if serving and not self._announced:
            self._announced = True
            _log.info("inferd is ready", listen=self._servers.addresses, model=self._config.model)
            sys.stdout.write(f"inferd is ready: {' '.join(self._servers.addresses)}\n")
            sys.stdout.flush()
            sd_notify("READY=1", notify_address())
