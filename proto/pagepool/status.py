"""PagepoolError to and from a gRPC status. The only module that knows how an error looks on the wire.

A failure is a google.rpc.Status with ErrorInfo (domain "pagepool", the reason, the metadata), BadRequest where a field
is at fault, and RetryInfo where a retry makes sense. The whole trailer stays below MAX_TRAILER_BYTES, since peers
refuse long headers and would show nothing instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from pagepool.durations import to_seconds
from pagepool.errors import Code, PagepoolError, Reason

DOMAIN = "pagepool"
MAX_TRAILER_BYTES = 4096
DETAILS_KEY = "grpc-status-details-bin"

_MAX_MESSAGE = 900  # as the percent-encoded header has it
_MAX_METADATA = 700  # of all keys and values together
_MAX_FIELD = 128
_MAX_DESCRIPTION = 200
_ENTRY_OVERHEAD = 8  # of a map entry on the wire
_ELLIPSIS = "…"
_CUT_OFF = "Stream removed"
"""What grpc now and then says, as UNKNOWN, of a peer that is gone (github.com/grpc/grpc/issues/34076)."""


class ForeignError(PagepoolError):
    """A failure whose reason this build does not know: the transport's own, another program's or a newer peer's.

    `reason` is INTERNAL_ERROR, which promises nothing about the cause. `code` is what the peer answered (UNKNOWN where
    the vocabulary has no such code); `metadata` has the code's name as "peer_code" and the peer's reason, if it gave
    one, as "peer_reason".
    """

    def __init__(self, message: str, code: Code, *, retry_after_s: float | None = None, **metadata: Any) -> None:
        super().__init__(Reason.INTERNAL_ERROR, message, retry_after_s=retry_after_s, **metadata)
        self._code = code

    @property
    def code(self) -> Code:
        """What the peer answered."""
        return self._code


class RpcFailure(Protocol):
    """What grpc raises in clients; grpc.Call of a failed sync call and grpc.aio.AioRpcError both are one."""

    def code(self) -> grpc.StatusCode:
        """The status code."""

    def details(self) -> str | None:
        """The message."""

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """The trailer."""


def to_status(error: PagepoolError) -> status_pb2.Status:
    """The wire form of an error, trimmed to fit the trailer."""
    message = _trimmed(error.message, _MAX_MESSAGE, quoted=True)
    status = status_pb2.Status(code=error.code.value, message=message)
    info = error_details_pb2.ErrorInfo(reason=str(error.reason), domain=DOMAIN, metadata=_metadata(error.metadata))
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_trimmed(error.field, _MAX_FIELD), description=_trimmed(error.message, _MAX_DESCRIPTION)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(math.ceil(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status) -> PagepoolError:
    """The error that a status carries; a ForeignError if its reason is not of this vocabulary."""
    info, field, retry_after_s = error_details_pb2.ErrorInfo(), "", None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            request = error_details_pb2.BadRequest()
            detail.Unpack(request)
            field = next((violation.field for violation in request.field_violations), "")
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = to_seconds(retry.retry_delay)
    metadata: dict[str, Any] = {key: value for key, value in info.metadata.items() if key not in _PARAMETERS}
    if info.domain == DOMAIN and info.reason in Reason.__members__:
        reason = Reason[info.reason]
        return PagepoolError(reason, status.message, field=field, retry_after_s=retry_after_s, **metadata)
    if info.reason:
        metadata["peer_reason"] = info.reason
    metadata["peer_code"] = _CODE_NAMES.get(status.code, str(status.code))
    return ForeignError(status.message, _known_code(status.code), retry_after_s=retry_after_s, **metadata)


def from_rpc_error(error: RpcFailure | grpc.RpcError) -> PagepoolError:
    """The error behind a failed call, sync or aio. Never raises: what it cannot read becomes a ForeignError."""
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNKNOWN and message == _CUT_OFF:
        code = grpc.StatusCode.UNAVAILABLE
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = _parsed(value)
            if status is not None and status.code == code.value[0]:
                return from_status(status)
    return from_status(status_pb2.Status(code=code.value[0], message=message))


_PARAMETERS = frozenset({"self", "reason", "message", "field", "code", "retry_after_s"})
_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def _known_code(number: int) -> Code:
    return Code(number) if number in {code.value for code in Code} else Code.UNKNOWN


def _parsed(data: bytes) -> status_pb2.Status | None:
    try:
        return status_pb2.Status.FromString(data)
    except DecodeError:
        return None


def _metadata(values: dict[str, str]) -> dict[str, str]:
    """The values, each cut to its share of what the ones before it left."""
    left, kept = _MAX_METADATA, {}
    for position, (key, value) in enumerate(values.items()):
        room = left // (len(values) - position) - len(key.encode()) - _ENTRY_OVERHEAD
        if room < len(_ELLIPSIS.encode()):
            continue
        kept[key] = _trimmed(value, room)
        left -= len(key.encode()) + len(kept[key].encode()) + _ENTRY_OVERHEAD
    return kept


def _trimmed(text: str, limit: int, *, quoted: bool = False) -> str:
    """The text, valid UTF-8, cut so that it takes at most `limit` bytes (percent-encoded if `quoted`)."""
    text = text.encode(errors="replace").decode()

    def size(part: str) -> int:
        return len(quote(part, safe=_UNQUOTED)) if quoted else len(part.encode())

    if size(text) <= limit:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(text[:middle] + _ELLIPSIS) <= limit else (low, middle - 1)
    return text[:low] + _ELLIPSIS


_UNQUOTED = "".join(chr(number) for number in range(0x20, 0x7F) if chr(number) != "%")
