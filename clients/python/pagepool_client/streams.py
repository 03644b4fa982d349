"""Server streams that are never left running: whoever stops reading, cancels.

grpc keeps the state of a call alive as long as the call runs, so a stream that is merely forgotten goes on for ever
(grpc/grpc#43462). These wrappers own the call, are referred to by nobody but the reader, and cancel it when closed,
when reading fails, and when they are collected.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from pagepool_client.channels import failure

T = TypeVar("T")


class ServerStream(Iterator[T], Generic[T]):
    """The answers of a server-streaming call, each passed through `convert`.

    Iterating raises PagepoolError if the call fails. Use it in a `with` block, or call `close`, or drop it: each
    cancels the call, unless it has ended. After `close` the iteration is over.
    """

    def __init__(self, call: Any, convert: Callable[[Any], T], target: str) -> None:
        self._call, self._convert, self._target = call, convert, target
        self._closed = False
        self._cancel = weakref.finalize(self, call.cancel)
        self._cancel.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise StopIteration
        try:
            return self._convert(next(self._call))
        except StopIteration:
            self._closed = True
            raise
        except grpc.RpcError as error:
            if self._closed:  # by another thread, while this one was waiting
                raise StopIteration from None
            self._closed = True
            raise failure(error, self._target) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the call, unless it has ended. Idempotent."""
        self._closed = True
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncServerStream(AsyncIterator[T], Generic[T]):
    """ServerStream for asyncio; a task that is cancelled while it reads cancels the call too."""

    def __init__(self, call: Any, convert: Callable[[Any], T], target: str) -> None:
        self._call, self._convert, self._target = call, convert, target
        self._closed = False
        weakref.finalize(self, _cancel_on, asyncio.get_running_loop(), call).atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            self._closed = True
            raise failure(error, self._target) from error
        except asyncio.CancelledError:
            if self._closed and not _being_cancelled():  # by another task, while this one was waiting
                raise StopAsyncIteration from None
            self.close()
            raise
        if message is grpc.aio.EOF:
            self._closed = True
            raise StopAsyncIteration
        return self._convert(message)

    def close(self) -> None:
        """Cancel the call, unless it has ended. Idempotent."""
        self._closed = True
        self._call.cancel()

    async def aclose(self) -> None:
        """`close`, for contextlib.aclosing."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancel_on(loop: asyncio.AbstractEventLoop, call: Any) -> None:
    """Cancel from whatever thread the collector runs in; with the loop, its calls have ended already."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call.cancel)
