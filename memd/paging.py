"""Page tokens: opaque to callers, and refused by name when they are of another call, filter or memd life."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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


@dataclass(frozen=True, slots=True)
class Page:
    """What a page is of: `kind` is one byte for the call, `choice` the number of its filter; `size` in messages."""

    kind: bytes
    choice: int
    epoch: int
    size: int

    def cut(self, messages: Sequence[MessageT], id_field: str) -> tuple[Sequence[MessageT], str]:
        """The messages that fit, at least one, and the token of the next page, empty if nothing was left out."""
        fitting, total = 0, 0
        for message in messages[: self.size]:
            total += message.ByteSize() + 8
            if total > MAX_PAGE_BYTES and fitting:
                break
            fitting += 1
        if fitting == len(messages):
            return messages, ""
        return messages[:fitting], self.token_after(getattr(messages[fitting - 1], id_field))

    def token_after(self, last_id: int) -> str:
        """The token of the page that starts after an id."""
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
