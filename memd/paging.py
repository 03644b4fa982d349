"""Page tokens: opaque to callers, and refused by name when they are of another call, filter or memd life."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.message import Message

from pagepool.errors import PagepoolError, invalid_field

MAX_PAGE_BYTES = 3 << 20
"""A page ends early where it would outgrow the 4 MiB that a client's default limit allows."""

MessageT = TypeVar("MessageT", bound=Message)

_TOKEN = struct.Struct(">cBQQ")


def page_size(asked: int, default: int, largest: int) -> int:
    """The page size in force; raises INVALID_FIELD if it is negative."""
    if asked < 0:
        raise invalid_field("page_size", asked, f"from 0 to {largest}", f"leave it out to get {default}")
    return min(asked or default, largest)


@dataclass(slots=True)
class Page(Generic[MessageT]):
    """A page as it fills: `kind` is one byte for the call, `choice` the number of its filter; `size` in messages.

    It is full when a message was left out: then there is a next one.
    """

    kind: bytes
    choice: int
    epoch: int
    size: int
    messages: list[MessageT] = field(default_factory=list)
    is_full: bool = False
    _bytes: int = 0

    @property
    def room(self) -> int:
        """How many messages to look for: one more than there may be, so that it is known whether there is a rest."""
        return self.size + 1 - len(self.messages)

    def add(self, message: MessageT) -> bool:
        """Add the next message, the first one whatever its size; whether it fitted."""
        self._bytes += message.ByteSize() + 8
        self.is_full |= len(self.messages) == self.size or (self._bytes > MAX_PAGE_BYTES and bool(self.messages))
        if not self.is_full:
            self.messages.append(message)
        return not self.is_full

    def next_token(self, last_id: int) -> str:
        """The token of the page after an id, the last one here; empty if nothing was left out."""
        if not self.is_full:
            return ""
        body = _TOKEN.pack(self.kind, self.choice, self.epoch, last_id)
        return base64.urlsafe_b64encode(body + zlib.crc32(body).to_bytes(4, "big")).decode().rstrip("=")


def decode(token: str, kind: bytes, choice: int, require_epoch: Callable[[int], None]) -> int:
    """The id to go on after; 0 for an empty token. Raises INVALID_FIELD, or what `require_epoch` raises."""
    if not token:
        return 0
    try:
        data = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        body, checksum = data[:-4], int.from_bytes(data[-4:], "big")
        if zlib.crc32(body) != checksum:
            raise _refused(token)
        found_kind, found_choice, epoch, last_id = _TOKEN.unpack(body)
    except (binascii.Error, ValueError, struct.error) as error:
        raise _refused(token) from error
    if (found_kind, found_choice) != (kind, choice):
        raise _refused(token)
    require_epoch(epoch)
    return int(last_id)


def _refused(token: str) -> PagepoolError:
    return invalid_field("page_token", repr(token), "a token that this call returned", "leave it out to start anew")
