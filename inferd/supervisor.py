"""Keeps an engine process alive: starts it, hears it out, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import structlog

from inferd.channel import FrontChannel
from inferd.core.messages import Setup, Shutdown
from inferd.device import EXIT_RESPAWN
from inferd.dispatch import Dispatcher
from pagepool.errors import PagepoolError, Reason

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_RESPAWNS = 3
EXIT_ALLOWANCE_S = 5.0
"""What an engine may need, beyond the grace, to give its blocks back and exit."""

_log = structlog.get_logger("inferd.supervisor")


class EngineLife(Protocol):
    """One engine process."""

    channel: FrontChannel

    async def wait(self) -> int:
        """Its exit code, once it has one; negative for a signal."""

    def kill(self) -> None:
        """Ends it at once; nothing if it has ended."""


class Supervisor:
    """One engine after the other, for one dispatcher.

    An engine that dies after it has served is started again, after a pause that doubles from life to life that did
    not get to serve; one that has memd's PID at once. One that never served, or that says itself that it cannot, ends
    `run`.
    """

    def __init__(
        self,
        launch: Callable[[], Awaitable[EngineLife]],
        dispatcher: Dispatcher,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._launch = launch
        self._dispatcher = dispatcher
        self._sleep = sleep
        self._life: EngineLife | None = None
        self._stopping = False

    async def run(self) -> None:
        """Runs engines until `shut_down`, or until one cannot be started, and then raises why.

        CancelledError kills the engine that runs.
        """
        ever, pause, respawns = False, FIRST_PAUSE_S, 0
        while True:
            served, code = await self._live()
            if self._stopping:
                return
            ever = ever or served
            respawns = 0 if served else respawns
            if code == EXIT_RESPAWN and respawns < MAX_RESPAWNS:  # the next child has another PID
                respawns += 1
                _log.info("the engine had memd's PID, each in its own PID namespace, and is started again")
                continue
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
            if not ever:
                message = f"the engine did not get to serve ({why}); its log says more"
                raise PagepoolError(Reason.ENGINE_FAILED, message, cause=why)
            pause = FIRST_PAUSE_S if served else min(2 * pause, LONGEST_PAUSE_S)
            _log.error("the engine died and is started again", cause=why, pause_s=pause)
            await self._sleep(pause)

    async def shut_down(self, grace_s: float) -> None:
        """Has the engine end what runs within the grace, give its blocks back and exit; kills one that does not."""
        self._stopping = True
        life = self._life
        if life is None:
            return
        try:
            life.channel.send(Shutdown(grace_s))
            await _exits(life, grace_s + EXIT_ALLOWANCE_S)
        except ConnectionError:  # it is gone already
            return
        finally:
            life.kill()

    async def _live(self) -> tuple[bool, int]:
        """One engine's life; whether it served, and its exit code. Raises what it says it cannot start for."""
        life = self._life = await self._launch()
        served = False
        try:
            self._dispatcher.connected(life.channel.send)
            async for message in life.channel:
                self._dispatcher.receive(message)
                served = served or self._dispatcher.state.phase == "serving"
            self._dispatcher.disconnected("its process is gone")
            await _exits(life)
        finally:
            life.kill()
            code = await life.wait()
            await life.channel.close()
            self._life = None
            self._dispatcher.disconnected("its process is gone")
        if self._dispatcher.fatal is not None:
            raise self._dispatcher.fatal
        return served, code


async def _exits(life: EngineLife, within_s: float = EXIT_ALLOWANCE_S) -> None:
    """Waits for an exit that is due, so that its code is the engine's own and not that of being killed."""
    try:
        await asyncio.wait_for(life.wait(), within_s)
    except TimeoutError:
        _log.warning("the engine did not exit in time and is killed", within_s=within_s)


class EngineProcess:
    """An engine as a child process with one end of a socket pair, in a session of its own.

    So a Ctrl-C at the terminal reaches the front alone, which then has the engine finish; and an engine whose front
    is gone sees the end of its channel.
    """

    def __init__(self, process: asyncio.subprocess.Process, channel: FrontChannel) -> None:
        self._process = process
        self.channel = channel

    @classmethod
    async def launch(cls, setup: Setup, environment: Mapping[str, str]) -> EngineProcess:
        """Starts an engine and tells it what it needs to know."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "inferd.engine_process",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        channel = await FrontChannel.open(ours)
        channel.send(setup)
        return cls(process, channel)

    async def wait(self) -> int:
        """See EngineLife."""
        return await self._process.wait()

    def kill(self) -> None:
        """See EngineLife."""
        if self._process.returncode is None:
            self._process.kill()
