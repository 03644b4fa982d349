"""The model's tokenizer and chat template, from a folder that `inferd.text.export` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import structlog
from tokenizers import Tokenizer as Backend

from inferd.text.detokenizer import ByteDetokenizer, Detokenizer, Spelling, WindowDetokenizer
from inferd.text.template import ChatTemplate, Message
from pagepool.errors import PagepoolError, Reason

_log = structlog.get_logger(__name__)

TOKENIZER_FILE, CHAT_FILE = "tokenizer.json", "chat.json"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model sees it."""

    text: str
    token_ids: list[int]


class Tokenizer:
    """Text to token ids and back. One thread at a time.

    A control token is one that the vocabulary calls special, or that the chat template writes. Its text within text
    is plain text unless the caller asks for parse_special_tokens.
    """

    def __init__(self, backend: Backend, template: ChatTemplate | None) -> None:
        self._backend = backend
        self._template = template
        self._spelling = Spelling.of(backend)
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        literal = template.literal_text if template else ""
        written = {token.content for token in added.values() if token.content in literal and token.content.strip()}
        special = {added[number].content for number in self._special}
        self._control = _any_of(special | written)
        self._control_ids = frozenset(number for number, token in added.items() if token.content in special | written)
        self._unmarked = _any_of(written - special)
        self._before, self._after = self._frame()
        self.longest_token = max(map(len, backend.get_vocab()), default=1)
        """Letters of the longest token: a text has at least one token for each that many characters."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json` and `chat.json`; raises OSError or ValueError if they are not what export writes."""
        chat = json.loads((folder / CHAT_FILE).read_text())
        template = _chat_template(chat["template"], chat["special_tokens"])
        backend = Backend.from_file(str(folder / TOKENIZER_FILE))
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, template)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can work."""
        return self._template is not None

    def encode(self, text: str, *, parse_special_tokens: bool = False, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts the model's own before and after it."""
        ids = self._ids(text)
        if not parse_special_tokens and not self._control_ids.isdisjoint(ids):
            ids = self._plain(text)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; "" for ids without a token."""
        return [self._backend.id_to_token(token) or "" for token in token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self._detokenizer((), skip_special=skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.flush()

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """The text of a continuation of the prompt, token by token, control tokens left out."""
        return self._detokenizer(prompt, skip_special=True)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A conversation by the model's chat template: transformers' apply_chat_template with a generation prompt.

        The text of control tokens in the messages is encoded as plain text. Raises NO_CHAT_TEMPLATE or
        CHAT_TEMPLATE_REFUSED.
        """
        if self._template is None:
            message = "the model has no chat template; send the prompt as text"
            raise PagepoolError(Reason.NO_CHAT_TEMPLATE, message, field="chat")
        text = self._template.render(messages)
        values = [value for message in messages for value in message.values()]
        if not any(self._control.search(value) for value in values):
            return Rendered(text, self._ids(text))
        left, right = _absent_characters([text, *values])
        marked = [
            {key: self._control.sub(lambda found: f"{left}{found[0]}{right}", value) for key, value in message.items()}
            for message in messages
        ]
        ids: list[int] = []
        for part, plain in _split_marked(self._template.render(marked), left, right):
            ids += self._inner_ids(part, plain=plain, first=not ids)
        return Rendered(text, ids)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _plain(self, text: str) -> list[int]:
        """Token ids of a text in which control tokens are text."""
        ids: list[int] = []
        self._backend.encode_special_tokens = True
        try:
            for position, part in enumerate(_split_around(self._unmarked, text)):
                ids += self._inner_ids(part, plain=position % 2 == 1, first=not ids)
        finally:
            self._backend.encode_special_tokens = False
        return ids

    def _inner_ids(self, part: str, *, plain: bool, first: bool) -> list[int]:
        """Token ids of a part of a text; `plain` looks for no added token at all.

        A part that is not the first is encoded behind a newline, which is then taken off, since SentencePiece puts a
        space before what it takes for the beginning.
        """
        encode = self._model_ids if plain else self._ids
        if first or not part:
            return encode(part)
        newline = self._ids("\n")
        ids = encode("\n" + part)
        return ids[len(newline) :] if ids[: len(newline)] == newline else encode(part)

    def _model_ids(self, text: str) -> list[int]:
        """The tokenizer's pipeline without the added tokens."""
        backend: Any = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]

    def _frame(self) -> tuple[list[int], list[int]]:
        """The token ids that the model puts before and after a prompt."""
        bare = self._ids("x")
        framed: list[int] = self._backend.encode("x", add_special_tokens=True).ids
        for at in range(len(framed) - len(bare) + 1):
            if framed[at : at + len(bare)] == bare:
                return framed[:at], framed[at + len(bare) :]
        return [], []

    def _detokenizer(self, context: Sequence[int], *, skip_special: bool) -> Detokenizer:
        if self._spelling is None:
            return WindowDetokenizer(self._backend, skip_special=skip_special, context=context)
        continues = any(token not in self._special for token in context)
        return ByteDetokenizer(self._spelling, skip_special=skip_special, continues=continues)


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing if there are none."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


def _split_around(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """Text before the first match, the match, text up to the next, and so on."""
    at = 0
    for found in pattern.finditer(text):
        yield text[at : found.start()]
        yield found[0]
        at = found.end()
    yield text[at:]


def _absent_characters(texts: Sequence[str]) -> tuple[str, str]:
    """Two private-use characters that none of the texts has."""
    used = set().union(*texts)
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    return next(free), next(free)


def _split_marked(text: str, left: str, right: str) -> Iterator[tuple[str, bool]]:
    """Parts of a text, and whether each stood between marks; marks that a template tore apart only split the text."""
    for position, part in enumerate(re.split(f"{left}([^{left}{right}]*){right}|[{left}{right}]", text)):
        if part:
            yield part, position % 2 == 1


def _chat_template(source: str | None, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """A model whose template is broken can still continue texts."""
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateError as error:
        _log.warning("the model's chat template does not compile, so chat is refused", why=str(error))
        return None
