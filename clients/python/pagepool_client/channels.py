"""Where the daemons are, how a channel to them is set up, and what a failed call becomes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.experimental

from pagepool.errors import Code, PagepoolError, invalid_field
from pagepool.listen import default_socket
from pagepool.status import ForeignError, RpcFailure, from_rpc_error

MAX_MESSAGE_BYTES = 64 << 20

# A server closes a connection that pings more often than twice a minute.
_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

# Only memd's unary calls: they read, are idempotent by nature, or carry a request_id.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "pagepool.memd.v1.PoolService"}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def default_target(daemon: str) -> str:
    """Where "memd" or "inferd" listens unless it was told otherwise, as a gRPC target."""
    return f"unix:{default_socket(daemon, os.environ, os.getuid())}"


def channel_options() -> list[tuple[str, str | int]]:
    """Options of every channel that the clients open."""
    return [*_OPTIONS, ("grpc.service_config", json.dumps(_RETRIES))]


def reading_options() -> list[tuple[str, str | int]]:
    """Options of a channel whose server streams are each read by one thread, which then waits for the network itself.

    By default grpc has a thread of the channel do so, which hands every message on.
    """
    return [*channel_options(), (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]


def stream_options() -> list[tuple[str, str | int]]:
    """Options of a worker's channel: no retries behind its back, and a connection of its own."""
    return [*_OPTIONS, ("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


def dialled(target: str) -> str:
    """The gRPC target for `unix:PATH`, `HOST:PORT` or, as the daemons write it, `tcp:HOST:PORT`."""
    return target.removeprefix("tcp:")


def socket_path(target: str) -> Path:
    """The path of a Unix socket target. Raises INVALID_FIELD for any other target."""
    if not target.startswith("unix:"):
        remedy = "give its socket, since the pool's memory is not handed out over TCP"
        raise invalid_field("memd", target, "unix:PATH", remedy)
    return Path(target.removeprefix("unix:").removeprefix("//"))


def failure(error: RpcFailure | grpc.RpcError, target: str) -> PagepoolError:
    """The PagepoolError behind a failed call; one that never reached a server says where it looked."""
    found = from_rpc_error(error)
    if isinstance(found, ForeignError) and found.code is Code.UNAVAILABLE:
        cause = found.message.rpartition(": ")[2].strip() or "no connection"
        message = f"nothing answers at {target} ({cause}); start it with `pagepool up`, or give its address"
        return ForeignError(message, Code.UNAVAILABLE, target=target, cause=cause)
    return found


@contextmanager
def failures(target: str) -> Iterator[None]:
    """Within it, a failed call raises PagepoolError."""
    try:
        yield
    except grpc.RpcError as error:
        raise failure(error, target) from error


async def answered(call: Any, target: str) -> Any:
    """The answer of an aio unary call. Raises PagepoolError; a caller that is cancelled cancels the call."""
    try:
        return await call
    except grpc.RpcError as error:
        raise failure(error, target) from error
    finally:
        call.cancel()  # nothing, once it has ended
