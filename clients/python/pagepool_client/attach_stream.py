"""One Attach call: messages go out through a queue, answers come in on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import grpc

from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1.worker_service_pb2 import AttachRequest, AttachResponse, Hello, Welcome
from pagepool.memd.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagepool_client.channels import failure, stream_options


class AttachStream:
    """An Attach call that has been welcomed.

    `deliver` is called for every later message, and `ended` once when the stream is over (None: memd ended it in
    order); both on this stream's own thread. `send` never blocks and may be called from any thread.
    The constructor raises PagepoolError if memd refuses, or does not answer within `timeout_s`.
    """

    def __init__(
        self,
        target: str,
        hello: Hello,
        deliver: Callable[[AttachResponse], None],
        ended: Callable[[PagepoolError | None], None],
        timeout_s: float,
    ) -> None:
        self._target = target
        self._deliver, self._ended = deliver, ended
        self._outbox: queue.SimpleQueue[AttachRequest | None] = queue.SimpleQueue()
        self._first: Future[Welcome] = Future()
        self.unary_calls = UnaryCallCounter()
        self._channel = grpc.insecure_channel(target, options=stream_options())
        counted = grpc.intercept_channel(self._channel, self.unary_calls)
        self.send(AttachRequest(hello=hello))
        stub = WorkerServiceStub(counted)  # type: ignore[no-untyped-call]
        self._call = stub.Attach(iter(self._outbox.get, None))
        self._reader = threading.Thread(target=self._read, name="pagepool-attach-reader", daemon=True)
        self._reader.start()
        self.welcome = self._welcomed(timeout_s)

    def send(self, message: AttachRequest) -> None:
        """Queue a message. One sent to a stream that has ended is dropped."""
        self._outbox.put(message)

    def finish(self, timeout_s: float) -> bool:
        """Send no more and wait until memd ends the stream; False if it did not in time."""
        self._outbox.put(None)
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def close(self) -> None:
        """Cancel the call and leave no thread behind. Idempotent; not for the stream's own thread."""
        self._call.cancel()
        self._outbox.put(None)
        self._channel.close()
        self._reader.join()

    def _welcomed(self, timeout_s: float) -> Welcome:
        try:
            return self._first.result(timeout_s)
        except FutureTimeoutError:
            self.close()
            message = f"memd at {self._target} has not answered Hello within {timeout_s:g} s; is it stopped?"
            raise PagepoolError(Reason.POOL_LOST, message, target=self._target, timeout_s=timeout_s) from None
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        over: PagepoolError | None = None
        try:
            for message in self._call:
                if self._first.done():
                    self._deliver(message)
                else:
                    self._greeted(message)
        except grpc.RpcError as error:
            over = failure(error, self._target)
        if not self._first.done():
            self._first.set_exception(over or _violation("memd ended the stream without an answer to Hello"))
        elif self._first.exception() is None:
            self._ended(over)

    def _greeted(self, message: AttachResponse) -> None:
        if message.HasField("welcome"):
            self._first.set_result(message.welcome)
        else:
            self._first.set_exception(_violation(f"memd answered Hello with {message.WhichOneof('message')}"))


class UnaryCallCounter(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]  # grpc has no types
    """Counts the unary calls of a channel: the token path promises to make none."""

    def __init__(self) -> None:
        self.count = 0

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Called by grpc for each unary call."""
        self.count += 1
        return continuation(details, request)


def _violation(message: str) -> PagepoolError:
    return PagepoolError(Reason.PROTOCOL_VIOLATION, f"{message}; are memd and this worker of one version?")
