"""The one vocabulary of errors. Standard library only, so that the pure cores may raise it.

An error carries a status code, a reason, a message for people, and metadata with every dynamic value of that message.
`pagepool.status` maps it to and from a gRPC status; nothing else in the project speaks of status codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Any


class Code(Enum):
    """The gRPC status codes in use; the value is the wire number."""

    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Reason(StrEnum):
    """Why a call failed. The protos' comments say what the caller does next."""

    BLOCK_COMPRESSED = "BLOCK_COMPRESSED"
    BLOCK_FIXED = "BLOCK_FIXED"
    BLOCK_MOVING = "BLOCK_MOVING"
    BLOCK_NOT_FOUND = "BLOCK_NOT_FOUND"
    BLOCK_NOT_HELD = "BLOCK_NOT_HELD"
    BLOCK_NOT_SEALED = "BLOCK_NOT_SEALED"
    BLOCK_WANTED_EXACT = "BLOCK_WANTED_EXACT"
    CHAT_TEMPLATE_REFUSED = "CHAT_TEMPLATE_REFUSED"
    COMPRESSION_OFF = "COMPRESSION_OFF"
    DEVICE_MISMATCH = "DEVICE_MISMATCH"
    DRAINING = "DRAINING"
    ENGINE_FAILED = "ENGINE_FAILED"
    ENGINE_STARTING = "ENGINE_STARTING"
    EPOCH_MISMATCH = "EPOCH_MISMATCH"
    GEOMETRY_MISMATCH = "GEOMETRY_MISMATCH"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    INVALID_FIELD = "INVALID_FIELD"
    LEASE_IS_WORKERS = "LEASE_IS_WORKERS"
    LEASE_LIMIT = "LEASE_LIMIT"
    LEASE_LOST = "LEASE_LOST"
    LEASE_NOT_FOUND = "LEASE_NOT_FOUND"
    MALFORMED_REQUEST = "MALFORMED_REQUEST"
    NO_CHAT_TEMPLATE = "NO_CHAT_TEMPLATE"
    NO_WORKER = "NO_WORKER"
    PIN_LIMIT = "PIN_LIMIT"
    POOL_EXHAUSTED = "POOL_EXHAUSTED"
    POOL_LOST = "POOL_LOST"
    POOL_WITHOUT_GEOMETRY = "POOL_WITHOUT_GEOMETRY"
    PREFIX_NOT_FOUND = "PREFIX_NOT_FOUND"
    PROMPT_EMPTY = "PROMPT_EMPTY"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    PROTOCOL_VIOLATION = "PROTOCOL_VIOLATION"
    QUEUE_FULL = "QUEUE_FULL"
    READ_ONLY_LISTENER = "READ_ONLY_LISTENER"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    TABLE_LIMIT = "TABLE_LIMIT"
    TABLE_NOT_FOUND = "TABLE_NOT_FOUND"
    TABLE_NOT_HELD = "TABLE_NOT_HELD"


CODES: Mapping[Reason, Code] = {
    Reason.BLOCK_COMPRESSED: Code.FAILED_PRECONDITION,
    Reason.BLOCK_FIXED: Code.FAILED_PRECONDITION,
    Reason.BLOCK_MOVING: Code.FAILED_PRECONDITION,
    Reason.BLOCK_NOT_FOUND: Code.NOT_FOUND,
    Reason.BLOCK_NOT_HELD: Code.FAILED_PRECONDITION,
    Reason.BLOCK_NOT_SEALED: Code.FAILED_PRECONDITION,
    Reason.BLOCK_WANTED_EXACT: Code.FAILED_PRECONDITION,
    Reason.CHAT_TEMPLATE_REFUSED: Code.INVALID_ARGUMENT,
    Reason.COMPRESSION_OFF: Code.FAILED_PRECONDITION,
    Reason.DEVICE_MISMATCH: Code.FAILED_PRECONDITION,
    Reason.DRAINING: Code.UNAVAILABLE,
    Reason.ENGINE_FAILED: Code.INTERNAL,
    Reason.ENGINE_STARTING: Code.UNAVAILABLE,
    Reason.EPOCH_MISMATCH: Code.FAILED_PRECONDITION,
    Reason.GEOMETRY_MISMATCH: Code.FAILED_PRECONDITION,
    Reason.INTERNAL_ERROR: Code.INTERNAL,
    Reason.INVALID_FIELD: Code.INVALID_ARGUMENT,
    Reason.LEASE_IS_WORKERS: Code.FAILED_PRECONDITION,
    Reason.LEASE_LIMIT: Code.RESOURCE_EXHAUSTED,
    Reason.LEASE_LOST: Code.FAILED_PRECONDITION,
    Reason.LEASE_NOT_FOUND: Code.NOT_FOUND,
    Reason.MALFORMED_REQUEST: Code.INVALID_ARGUMENT,
    Reason.NO_CHAT_TEMPLATE: Code.INVALID_ARGUMENT,
    Reason.NO_WORKER: Code.FAILED_PRECONDITION,
    Reason.PIN_LIMIT: Code.RESOURCE_EXHAUSTED,
    Reason.POOL_EXHAUSTED: Code.RESOURCE_EXHAUSTED,
    Reason.POOL_LOST: Code.UNAVAILABLE,
    Reason.POOL_WITHOUT_GEOMETRY: Code.FAILED_PRECONDITION,
    Reason.PREFIX_NOT_FOUND: Code.NOT_FOUND,
    Reason.PROMPT_EMPTY: Code.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: Code.INVALID_ARGUMENT,
    Reason.PROTOCOL_VIOLATION: Code.FAILED_PRECONDITION,
    Reason.QUEUE_FULL: Code.RESOURCE_EXHAUSTED,
    Reason.READ_ONLY_LISTENER: Code.PERMISSION_DENIED,
    Reason.REQUEST_ID_REUSED: Code.INVALID_ARGUMENT,
    Reason.REQUEST_TOO_LARGE: Code.INVALID_ARGUMENT,
    Reason.TABLE_LIMIT: Code.RESOURCE_EXHAUSTED,
    Reason.TABLE_NOT_FOUND: Code.NOT_FOUND,
    Reason.TABLE_NOT_HELD: Code.FAILED_PRECONDITION,
}


class PagepoolError(Exception):
    """A failure that a user can meet.

    `reason` decides the status code. `metadata` holds every dynamic value of `message` (values become strings).
    `field` names the request field or flag at fault. `retry_after_s` says when a retry makes sense; None says never.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        retry_after_s: float | None = None,
        **metadata: Any,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = {key: str(value) for key, value in metadata.items()}

    @property
    def code(self) -> Code:
        """The status code that belongs to the reason."""
        return CODES[self.reason]


def invalid_field(field: str, value: object, limit: str, remedy: str) -> PagepoolError:
    """An INVALID_ARGUMENT that names the field, the value it had, its limit, and the way out."""
    message = f"{field} is {value!s}, but must be {limit}; {remedy}"
    return PagepoolError(Reason.INVALID_FIELD, message, field=field, value=value, limit=limit)
