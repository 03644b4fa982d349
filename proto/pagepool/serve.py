"""gRPC servers of a daemon: one per listener, with health, reflection and, on Unix sockets, channelz."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc
import structlog
from google.rpc import error_details_pb2  # noqa: F401  known to the descriptor pool, so that reflection can resolve it
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagepool.errors import invalid_field
from pagepool.handlers import Service, generic_handler
from pagepool.listen import Listener, SocketClaim, TcpListener, UnixListener
from pagepool.reflection import add_reflection

MAX_PUBLIC_MESSAGE_BYTES = 4 << 20
MAX_UNIX_MESSAGE_BYTES = 64 << 20
HEALTH_SERVICE = "grpc.health.v1.Health"

_log = structlog.get_logger("pagepool.serve")


class Servers:
    """The servers of one daemon. `claim`, `open`, then `serving`; at the end `draining`, then `stop`.

    Health answers NOT_SERVING, for "" and each service, before `serving`, after `not_serving` and after `draining`.
    """

    def __init__(self) -> None:
        self._health = health.aio.HealthServicer()
        self._listeners: list[Listener] = []
        self._servers: list[grpc.aio.Server] = []
        self._claims: list[SocketClaim] = []
        self._names: set[str] = set()
        self.addresses: list[str] = []

    def claim(self, listeners: Sequence[Listener]) -> None:
        """Takes the Unix socket paths; raises INVALID_FIELD if one is taken. Call it before anything costly is made."""
        self._listeners = list(listeners)
        for listener in listeners:
            if isinstance(listener, UnixListener):
                self._claims.append(SocketClaim(listener.path))

    async def open(self, services: Callable[[Listener], Sequence[Service]]) -> None:
        """Binds and starts every listener with its services; port 0 is replaced by the bound one in `addresses`.

        Raises INVALID_FIELD, naming the listener, if an address is taken. `stop` cleans up whatever was opened.
        """
        for listener in self._listeners:
            offered = services(listener)
            self._names.update(service.name for service in offered)
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._open_one(listener, offered)

    async def _open_one(self, listener: Listener, services: Sequence[Service]) -> None:
        local = isinstance(listener, UnixListener)
        server = grpc.aio.server(options=_options(local=local))
        server.add_generic_rpc_handlers([generic_handler(service) for service in services])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.name for service in services] + [HEALTH_SERVICE]
        if local:
            channelz.add_channelz_servicer(server)
            names.append("grpc.channelz.v1.Channelz")
        add_reflection(server, names)
        self.addresses.append(_bind(server, listener))
        self._servers.append(server)
        await server.start()

    async def serving(self) -> None:
        """Health answers SERVING from now on."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def not_serving(self) -> None:
        """Health answers NOT_SERVING until `serving` is called again."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def draining(self) -> None:
        """Health answers NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Ends the servers, cancelling calls that are still there after the grace, and removes their sockets."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        for claim in self._claims:
            claim.release()
        self._servers, self._claims = [], []

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ["", *sorted(self._names)]:
            await self._health.set(name, status)


def _bind(server: grpc.aio.Server, listener: Listener) -> str:
    """Binds the listener; the word for where it listens now."""
    if isinstance(listener, UnixListener):
        server.add_insecure_port(str(listener))
        return str(listener)
    with suppress(RuntimeError):
        if port := server.add_insecure_port(listener.address):
            return str(TcpListener(listener.host, port))
    raise invalid_field("listen", listener, "a free address", "stop what listens there, or choose another port")


def _options(*, local: bool) -> list[tuple[str, int]]:
    size = MAX_UNIX_MESSAGE_BYTES if local else MAX_PUBLIC_MESSAGE_BYTES
    return [
        ("grpc.so_reuseport", 0),  # a second daemon must fail to bind, not share the port
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Its pings would end every stream of a host that was suspended for a minute; a fixed window does as well here.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4 << 20),
        ("grpc.enable_channelz", int(local)),
    ]
