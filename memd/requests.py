"""Repeated calls made safe: the answers of the last minute by request id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from pagepool.errors import PagepoolError, Reason, invalid_field

MAX_ID_BYTES = 128
KEEP_S = 60.0

Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class _Entry:
    question: tuple[str, bytes]
    answer: Message
    expires: float
    size: int


class RequestMemory:
    """Bounded memory of successful answers, oldest out first: at most `max_entries`, and `max_bytes` in all."""

    def __init__(self, max_entries: int = 10_000, max_bytes: int = 16 << 20) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    def once(self, request_id: str, request: Message, now: float, call: Callable[[], Answer]) -> Answer:
        """The answer of `call`, or the earlier one to the same request. What `call` raises is not remembered.

        Raises INVALID_FIELD for a long id, REQUEST_ID_REUSED for the id of another request.
        """
        if (known := self.find(request_id, request, now)) is not None:
            return known  # type: ignore[return-value]  # the question names the type
        answer = call()
        self.keep(request_id, request, now, answer)
        return answer

    def find(self, request_id: str, request: Message, now: float) -> Message | None:
        """The answer that was kept for the same request; raises as `once` does."""
        if not request_id:
            return None
        if len(request_id.encode()) > MAX_ID_BYTES:
            raise invalid_field("request_id", request_id, f"at most {MAX_ID_BYTES} bytes", "use a UUID")
        self._forget(now)
        if (entry := self._entries.get(request_id)) is None:
            return None
        if entry.question != _question(request):
            message = f"request_id {request_id!r} was that of another request; give every request an id of its own"
            raise PagepoolError(Reason.REQUEST_ID_REUSED, message, field="request_id", request_id=request_id)
        return entry.answer

    def keep(self, request_id: str, request: Message, now: float, answer: Message) -> None:
        """Remember the answer to a request, unless it has no id."""
        if not request_id or request_id in self._entries:
            return
        question = _question(request)
        entry = _Entry(question, answer, now + KEEP_S, answer.ByteSize() + len(question[1]))
        self._entries[request_id] = entry
        self._bytes += entry.size
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self._drop_oldest()

    def _forget(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values())).expires <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._bytes -= self._entries.popitem(last=False)[1].size


def _question(request: Message) -> tuple[str, bytes]:
    return request.DESCRIPTOR.full_name, request.SerializeToString(deterministic=True)
