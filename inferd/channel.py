"""The wire between the front process and the engine process: a socket pair that the child inherits.

A message is a frozen dataclass of `inferd.core.messages`. On the wire it is its length and that of its UTF-8 JSON, each
4 bytes, big-endian, then the JSON, then all bytes that the JSON points to; dataclasses and bytes carry their type's
name under `$type`. No pickle: what arrives can only become a known message.

The engine has `EngineChannel` (two threads, so that a token never waits for a slow front), the front `FrontChannel`
(asyncio). An end that is gone shows at the other as the end of its messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self

from inferd.core import messages
from inferd.core.beam import Hypotheses, Hypothesis
from inferd.core.beam_values import Beam, EarlyStopping
from inferd.core.messages import (
    Ending,
    Finished,
    ScoredTokens,
    Submit,
    TokenLogprobs,
    Tokens,
)
from pagepool.token_ids import pack, unpack

Message = Any
"""One of the dataclasses of inferd.core.messages, or Hypotheses; `encode` refuses anything else."""

_LENGTH = struct.Struct(">I")
_TYPE = "$type"
_MESSAGES: dict[str, type] = {
    name: value for name, value in vars(messages).items() if isinstance(value, type) and dataclasses.is_dataclass(value)
}
_MESSAGES |= {each.__name__: each for each in (Hypotheses, Hypothesis)}
_FIELDS = {name: [field.name for field in dataclasses.fields(value)] for name, value in _MESSAGES.items()}


def _plain(attached: bytearray, value: object) -> dict[str, object]:
    if isinstance(value, bytes):
        attached += value
        return {_TYPE: "bytes", "end": len(attached), "size": len(value)}
    name = type(value).__name__
    if _MESSAGES.get(name) is not type(value):
        raise TypeError(f"{name} is no message of inferd.core.messages")
    plain = {_TYPE: name} | {field: getattr(value, field) for field in _FIELDS[name]}
    if isinstance(value, Submit):
        # Numbers of JSON would be read and written one by one, while the prompt's first token is waited for.
        plain["prompt"] = pack(value.prompt)
    return plain


def _revive(attached: bytes, plain: dict[str, Any]) -> object:
    name = plain.pop(_TYPE, None)
    if name is None:
        return plain
    if name == "bytes":
        return attached[plain["end"] - plain["size"] : plain["end"]]
    if name in (Tokens.__name__, ScoredTokens.__name__):
        plain["items"] = [(request, tokens) for request, tokens in plain["items"]]
    if name in (Finished.__name__, Hypothesis.__name__):
        plain["ending"] = Ending(plain["ending"])
    elif name == Beam.__name__:
        plain["early_stopping"] = EarlyStopping(plain["early_stopping"])
    elif name == Submit.__name__:
        plain["prompt"] = unpack(plain["prompt"])
    return _MESSAGES[name](**plain)


def encode(message: Message) -> bytes:
    """The frame of a message, length included. TypeError if it is none."""
    attached = bytearray()
    plain = partial(_plain, attached)
    text = json.dumps(plain(message), default=plain, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(_LENGTH.size + len(text) + len(attached)), _LENGTH.pack(len(text)), text, attached))


def decode(body: bytes) -> Message:
    """The message of a frame without its length. ValueError, KeyError, TypeError or struct.error if it holds none."""
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    return json.loads(body[_LENGTH.size : end], object_hook=partial(_revive, body[end:]))


def coalesce(batch: Iterable[Message]) -> Iterator[Message]:
    """The same messages in the same order, neighbours that are tokens made one of a kind with one entry per request.

    All tokens of a request come as one kind, so it does not matter which of the two goes first.
    """
    pending: dict[int, list[int]] = {}
    scored: dict[int, list[TokenLogprobs]] = {}
    for message in batch:
        if isinstance(message, Tokens):
            for request, tokens in message.items:
                pending.setdefault(request, []).extend(tokens)
        elif isinstance(message, ScoredTokens):
            for request, logprobs in message.items:
                scored.setdefault(request, []).extend(logprobs)
        else:
            yield from _together(pending, scored)
            pending, scored = {}, {}
            yield message
    yield from _together(pending, scored)


def _together(pending: dict[int, list[int]], scored: dict[int, list[TokenLogprobs]]) -> Iterator[Message]:
    if pending:
        yield Tokens(list(pending.items()))
    if scored:
        yield ScoredTokens(list(scored.items()))


class EngineChannel:
    """The engine's end.

    `start` has every arriving message handed to `receive` on a thread of the channel, and None after the last one,
    when the front is gone. `send` may be called from any thread and never waits: what the socket does not take at once
    queues up, and tokens of several steps then go as one message. After the front is gone they are dropped.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._outgoing: list[Message] = []
        self._unsent = b""  # the end of a frame that the socket took a part of
        self._writing = False
        self._changed = threading.Condition()
        self._closing = False
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)

    def start(self, receive: Callable[[Message | None], None]) -> None:
        """Begin to read and write. Once."""
        threading.Thread(target=self._read, args=(receive,), name="channel-reader", daemon=True).start()
        self._writer.start()

    def send(self, message: Message) -> None:
        """Send a message, or queue it."""
        with self._changed:
            if not (self._writing or self._unsent or self._outgoing or self._closing):
                self._unsent = self._at_once(encode(message))  # no other thread has to be waited for
            else:
                self._outgoing.append(message)
            if self._unsent or self._outgoing:
                self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, waiting at most `timeout_s` for a slow front, then close."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join(timeout_s)
        # A thread blocked in recv keeps a closed socket's file alive; shutting it down ends the call.
        _shut_down(self._socket)
        self._socket.close()

    def _read(self, receive: Callable[[Message | None], None]) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                    size = _LENGTH.unpack(head)[0]
                    body = stream.read(size)
                    if len(body) < size:  # the front was killed while it wrote
                        break
                    receive(decode(body))
        except OSError:  # a front killed with unread messages resets the connection
            pass
        finally:
            receive(None)

    def _at_once(self, frame: bytes) -> bytes:
        """What is left of a frame when the socket has taken what it takes without waiting."""
        try:
            return frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
        except OSError:  # it takes nothing now; or the front is gone, which the writer finds and the reader reports
            return frame

    def _write(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.wait_for(lambda: self._unsent or self._outgoing or self._closing)
                unsent, self._unsent = self._unsent, b""
                batch, self._outgoing = self._outgoing, []
                if not (unsent or batch):
                    return
                self._writing = True
            try:
                self._socket.sendall(unsent + b"".join(map(encode, coalesce(batch))))
            except OSError:  # the reader reports that the front is gone
                return


class FrontChannel:
    """The front's end, for one asyncio loop: `async for message in channel` until the engine is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        """Take over one end of a socket pair."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, message: Message) -> None:
        """Queue a message; never waits, since the engine always reads. ConnectionError if the engine is gone."""
        if self._writer.is_closing() or self._reader.at_eof():
            raise ConnectionResetError("the engine process is gone")
        self._writer.write(encode(message))

    async def close(self) -> None:
        """Close; the engine takes it as the front's end."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:  # the engine was gone first
            return

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            return decode(await self._reader.readexactly(_LENGTH.unpack(head)[0]))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise StopAsyncIteration from None


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end was faster
        return
