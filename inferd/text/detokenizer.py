"""Tokens to text, one at a time, without half a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The text of one stream of tokens. What `feed` and `flush` return, joined, is the text of all tokens."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """More tokens in; out comes text that later tokens cannot change, whole characters only."""

    def flush(self) -> str:
        """What was held back, now that no more tokens come; bytes that are no character become U+FFFD."""


class Spelling:
    """How a vocabulary spells bytes: what each token adds to the text, whatever stands beside it.

    Covers byte-level vocabularies (GPT-2's alphabet) and SentencePiece's (a mark for the space, `<0xNN>` for bytes).
    `of` answers None for a tokenizer whose decoder works otherwise.
    """

    def __init__(self, backend: Backend, space: str | None, *, strips_first_space: bool, byte_tokens: bool) -> None:
        self._backend = backend
        self._space = space
        self._byte_tokens = byte_tokens
        self.strips_first_space = strips_first_space
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)

    @classmethod
    def of(cls, backend: Backend) -> Spelling | None:
        """The spelling that the tokenizer's decoder implies."""
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(backend, None, strips_first_space=False, byte_tokens=False)
        if kinds == ["Metaspace"]:
            strips = steps[0].get("prepend_scheme", "always") != "never"
            return cls(backend, steps[0]["replacement"], strips_first_space=strips, byte_tokens=False)
        if kinds[:1] == ["Replace"] and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            pattern = steps[0]["pattern"].get("String")
            strips = [step for step in steps if step["type"] == "Strip"]
            plain = all(step["content"] == " " and step["start"] == 1 and step["stop"] == 0 for step in strips)
            if kinds.count("Replace") == 1 and steps[0]["content"] == " " and pattern and plain:
                return cls(backend, pattern, strips_first_space=bool(strips), byte_tokens="ByteFallback" in kinds)
        return None

    def bytes_of(self, token_id: int, *, skip_special: bool) -> bytes:
        """The bytes that a token adds; none for ids without a token."""
        if skip_special and token_id in self._special:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._space is None:
            return self._alphabet_bytes(token)
        if self._byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace(self._space, " ").encode()

    def _alphabet_bytes(self, token: str) -> bytes:
        alphabet = self._alphabet
        try:
            return bytes([alphabet[letter] for letter in token])
        except KeyError:  # an added token, spelled as it is
            return token.encode()

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """GPT-2's letter for each byte: printable ones stand for themselves, the others count up from 256."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class ByteDetokenizer:
    """Constant work a token: each token's bytes go through an incremental UTF-8 decoder.

    `continues` says that text stands before the first token, so that its leading space is part of the text.
    """

    def __init__(self, spelling: Spelling, *, skip_special: bool, continues: bool) -> None:
        self._spelling = spelling
        self._skip_special = skip_special
        self._strip = spelling.strips_first_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """See Detokenizer."""
        data = b"".join(self._spelling.bytes_of(token, skip_special=self._skip_special) for token in token_ids)
        return self._stripped(self._decoder.decode(data))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For decoders that look at neighbours: decodes a short window of tokens again and shows what it adds.

    Work a token is bounded by the window, which moves on whenever its text ends in a whole character.
    """

    def __init__(self, backend: Backend, *, skip_special: bool, context: Sequence[int] = ()) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder() if skip_special else {}
        self._skipped = frozenset(number for number, token in added.items() if token.special)
        self._window = [token for token in context if token not in self._skipped][-8:]
        self._read = len(self._window)

    def feed(self, token_ids: Iterable[int]) -> str:
        """See Detokenizer."""
        return "".join(self._step(token) for token in token_ids)

    def flush(self) -> str:
        """See Detokenizer."""
        text = self._added()
        self._read = len(self._window)
        return text

    def _step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._added()
        if len(self._window) - self._read < 8 and (not text or text.endswith(_REPLACEMENT)):
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        return text

    def _added(self) -> str:
        before = self._backend.decode(self._window[: self._read], skip_special_tokens=False)
        return self._backend.decode(self._window, skip_special_tokens=False)[len(before) :]


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """The tokenizer's decoder as tokenizer.json has it, sequences flattened."""
    if backend.decoder is None:
        return [{"type": "none"}]
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]
