"""A daemon's life as a process: signals, exit codes and the word to systemd."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable

from pagepool.errors import Code, PagepoolError

EXIT_FAILURE, EXIT_USAGE = 1, 2
"""Exit codes of a daemon that failed, and of one that could not start because of what it was told: 2 is for good."""

_TOLD_WRONG = frozenset({Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION})


def run(program: str, serve: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Runs the daemon; SIGTERM and SIGINT set the event. The exit code: 0, or what a PagepoolError comes to."""

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(stop)

    try:
        asyncio.run(main())
    except PagepoolError as error:
        sys.stderr.write(f"{program}: {error.message}\n")
        return EXIT_USAGE if error.code in _TOLD_WRONG else EXIT_FAILURE
    return 0


def sd_notify(state: str, address: str | None) -> None:
    """Tells systemd, for example "READY=1"; `address` is $NOTIFY_SOCKET, and without it nothing happens."""
    if not address:
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        notify.sendto(state.encode(), target)
