"""A servicer as a generic gRPC handler that parses for itself and answers every failure with a PagepoolError's status.

gRPC's own deserialisers answer UNKNOWN before any handler runs; here bytes that do not parse (invalid UTF-8 included)
answer INVALID_ARGUMENT / MALFORMED_REQUEST. An exception nobody foresaw is logged with its traceback and answered
INTERNAL / INTERNAL_ERROR without it. CancelledError always passes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from pagepool.errors import PagepoolError, Reason
from pagepool.status import to_status

_log = structlog.get_logger("pagepool.rpc")


@dataclass(frozen=True, slots=True)
class Service:
    """A service and who serves it.

    For the method `DoThis` the servicer has `do_this`:
        unary           async def do_this(self, request, context) -> response
        server stream   async def do_this(self, request, context): yield response ...
        bidirectional   async def do_this(self, stream: Stream) -> None
    Each may raise PagepoolError. Any other exception is told to `on_failure` too, if that is given, whether
    or not its caller has gone by then.
    """

    descriptor: ServiceDescriptor
    servicer: object
    on_failure: Callable[[Exception], None] | None = None

    @property
    def name(self) -> str:
        """The full name, such as pagepool.memd.v1.PoolService."""
        return str(self.descriptor.full_name)


class Stream:
    """A bidirectional call: parsed messages in, messages out. One reader and one writer at a time."""

    def __init__(self, context: Any, request_class: type[Message]) -> None:
        self._context = context
        self._request_class = request_class

    async def read(self) -> Any:
        """The next request, or None after the client's last. Raises MALFORMED_REQUEST; CancelledError if it is gone."""
        data = await self._context.read()
        return None if data is grpc.aio.EOF else _parse(self._request_class, data)

    async def write(self, response: Message) -> None:
        """Sends a response; waits while the client's flow-control window is full."""
        await self._context.write(response.SerializeToString())


def generic_handler(service: Service) -> grpc.GenericRpcHandler:
    """The handler of all methods of a service; raises AttributeError if the servicer lacks one."""
    methods = {method.name: _method_handler(method, service) for method in service.descriptor.methods}
    return grpc.method_handlers_generic_handler(service.name, methods)


def snake_case(name: str) -> str:
    """do_this for DoThis."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _method_handler(method: MethodDescriptor, service: Service) -> grpc.RpcMethodHandler:
    function = getattr(service.servicer, snake_case(method.name))
    request_class = message_factory.GetMessageClass(method.input_type)
    answered = _Answered(f"{service.name}/{method.name}", service.on_failure)

    async def unary(data: bytes, context: Any) -> Any:
        async def run() -> bytes:
            response: Message = await function(_parse(request_class, data), context)
            return response.SerializeToString()

        return await answered(run(), context)

    async def server_stream(data: bytes, context: Any) -> None:
        async def run() -> None:
            async with aclosing(function(_parse(request_class, data), context)) as responses:
                async for response in responses:
                    await context.write(response.SerializeToString())

        await answered(run(), context)

    async def bidirectional(_: Any, context: Any) -> None:
        await answered(function(Stream(context, request_class)), context)

    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(bidirectional)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(server_stream)
    return grpc.unary_unary_rpc_method_handler(unary)


def _parse(request_class: type[Message], data: bytes) -> Message:
    try:
        return request_class.FromString(data)
    except DecodeError as error:
        message = (
            f"the {len(data)} bytes of this request do not parse as {request_class.DESCRIPTOR.full_name}: {error}; "
            "send what the published proto describes, with strings in UTF-8"
        )
        raise PagepoolError(
            Reason.MALFORMED_REQUEST, message, size=len(data), type=request_class.DESCRIPTOR.full_name, cause=error
        ) from error


class _Answered:
    """Awaits calls of one method within their log context and turns what they raise into a status."""

    def __init__(self, name: str, on_failure: Callable[[Exception], None] | None) -> None:
        self._name = name
        self._on_failure = on_failure

    async def __call__(self, call: Awaitable[Any], context: Any) -> Any:
        with structlog.contextvars.bound_contextvars(rpc=self._name):
            try:
                return await call
            except PagepoolError as error:
                await _abort(context, error)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:  # noqa: BLE001 whatever it is, the caller gets a status, the log the traceback
                await self._failed(error, context)

    async def _failed(self, error: Exception, context: Any) -> None:
        if self._on_failure is not None:  # it matters to the daemon, whether or not the caller has gone
            self._on_failure(error)
        if context.done():  # nobody is left to be answered, and writing to a finished call is what failed
            _log.debug("failed after the caller had gone", exc_info=True)
            raise asyncio.CancelledError from None
        _log.error("unexpected failure", exc_info=error)
        await _abort(context, PagepoolError(Reason.INTERNAL_ERROR, f"{self._name} failed; the daemon's log says why"))


async def _abort(context: Any, error: PagepoolError) -> None:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
