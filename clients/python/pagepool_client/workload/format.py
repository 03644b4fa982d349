"""The file format of a workload: JSON Lines, one request a line. Pure, but for opening the file.

A line is an object with these fields, all of them required:

    {"at": 1.25, "prompt": [["system", 214], ["chat-17", 380]], "output_tokens": 96}

`at` is when the request comes, in seconds from the start of the workload. `prompt` lists pieces, each a name and a
number of tokens: the first so many tokens of the text with that name, which is the same wherever the name appears.
Requests whose first pieces are equal therefore share a prefix, and a longer piece of the same text continues a shorter
one, as the next turn of a conversation does. `output_tokens` is how many tokens are generated. Blank lines are skipped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagepool.errors import PagepoolError, Reason, invalid_field

MAX_SECONDS = 86_400.0
MAX_PIECES = 64
MAX_NAME_BYTES = 128
MAX_TOKENS = 1 << 20
FIELDS = ("at", "prompt", "output_tokens")


@dataclass(frozen=True, order=True, slots=True)
class Piece:
    """The first `tokens` tokens of the text called `name`."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: when it comes (seconds from the start), its prompt, and how many tokens it generates."""

    at_s: float
    prompt: tuple[Piece, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(piece.tokens for piece in self.prompt)


def read(path: Path, flag: str = "--workload") -> list[WorkloadRequest]:
    """The requests of a file, which `flag` named, by the time they come.

    Raises INVALID_FIELD, naming file, line, field and limit.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise invalid_field(flag, path, f"a readable file ({reason})", "name a workload") from error
    return parse(text.splitlines(), str(path))


def parse(lines: Iterable[str], name: str) -> list[WorkloadRequest]:
    """The requests of these lines, at least one, by the time they come; `name` is what errors call the file."""
    found = [_request(line, f"{name}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise invalid_field("workload", name, "a file with at least one request", "write one JSON object a line")
    return sorted(found, key=lambda request: request.at_s)


def line(request: WorkloadRequest) -> str:
    """A request as a line, without its end."""
    prompt = [[piece.name, piece.tokens] for piece in request.prompt]
    return json.dumps({"at": round(request.at_s, 6), "prompt": prompt, "output_tokens": request.output_tokens})


def token_ids(prompt: Sequence[Piece], vocab_size: int, reserved: frozenset[int] = frozenset()) -> list[int]:
    """Token ids of a prompt, each below `vocab_size` and not `reserved`: for equal pieces the same, everywhere."""
    return [token for piece in prompt for token in _text(piece, vocab_size, reserved)]


def _text(piece: Piece, vocab_size: int, reserved: frozenset[int]) -> Iterator[int]:
    # Seeded by the text's name alone: what comes of it does not depend on how much is taken. Of Python's random
    # numbers, those of random() are promised to stay the same in every version.
    source = random.Random(piece.name)  # noqa: S311
    left = piece.tokens
    while left:
        if (token := int(source.random() * vocab_size)) not in reserved:
            yield token
            left -= 1


def _request(text: str, place: str) -> WorkloadRequest:
    fields = _json(text, place)
    if not isinstance(fields, dict):
        raise invalid_field(place, _shown(fields), "an object", f"write one with {', '.join(FIELDS)}")
    for name in (*FIELDS, *fields):
        if name not in fields:
            raise invalid_field(f"{place}: {name}", "missing", "given", "every request has one")
        if name not in FIELDS:
            raise invalid_field(
                f"{place}: {_shown(name)}", "an unknown field", f"one of {', '.join(FIELDS)}", "leave it out"
            )
    output = _integer(fields["output_tokens"], f"{place}: output_tokens")
    return WorkloadRequest(_seconds(fields["at"], f"{place}: at"), _prompt(fields["prompt"], place), output)


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        trouble = f"is no JSON: {error}"
    except ValueError:  # Python reads no integer of more than 4,300 digits
        trouble = "has a number of thousands of digits"
    except RecursionError:
        trouble = "has too many brackets within each other"
    raise PagepoolError(
        Reason.INVALID_FIELD, f"{place} {trouble}; write one request a line", field=place, detail=trouble
    )


def _seconds(value: Any, field: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= MAX_SECONDS):  # which NaN is not
        raise invalid_field(
            field, _shown(value), f"a number from 0 to {MAX_SECONDS:.0f}", "give seconds from the start"
        )
    return float(value)


def _integer(value: Any, field: str) -> int:
    if not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_TOKENS):
        raise invalid_field(field, _shown(value), f"a whole number from 1 to {MAX_TOKENS}", "give a number of tokens")
    return value


def _prompt(value: Any, place: str) -> tuple[Piece, ...]:
    if not (isinstance(value, list) and 1 <= len(value) <= MAX_PIECES):
        limit = f"a list of 1 to {MAX_PIECES} pieces"
        raise invalid_field(f"{place}: prompt", _shown(value), limit, 'write it as [["name", tokens], ...]')
    return tuple(_piece(piece, f"{place}: prompt[{index}]") for index, piece in enumerate(value))


def _piece(value: Any, field: str) -> Piece:
    if not (isinstance(value, list) and len(value) == 2):
        raise invalid_field(field, _shown(value), "a name and a number of tokens", 'write it as ["name", tokens]')
    name = value[0]
    if not (isinstance(name, str) and 1 <= _bytes(name) <= MAX_NAME_BYTES):
        raise invalid_field(f"{field}[0]", _shown(name), f"a text of 1 to {MAX_NAME_BYTES} bytes", "name the piece")
    return Piece(name, _integer(value[1], f"{field}[1]"))


def _bytes(name: str) -> int:
    """Bytes of a name in UTF-8; 0 if it is no text, as half a surrogate pair is none."""
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return 0


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:  # json reads deeper brackets than it writes
        return "brackets within brackets"
    return text if len(text) <= 60 else f"{text[:57]}..."
