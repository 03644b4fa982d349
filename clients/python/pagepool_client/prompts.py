"""Generation requests from plain Python values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pagepool.errors import invalid_field
from pagepool.inferd.v1.generation_service_pb2 import (
    BeamSearch,
    ChatMessage,
    ChatPrompt,
    EarlyStopping,
    GenerateRequest,
    KvPrecision,
    SamplingParams,
    TextPrompt,
)
from pagepool.token_ids import pack

Message = Mapping[str, str] | ChatMessage
"""One message of a conversation: {"role": "user", "content": "…"}."""


class Beam(TypedDict, total=False):
    """A beam search; the names and limits are those of BeamSearch in the proto, early_stopping is transformers' own."""

    width: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_return_sequences: int


class Options(TypedDict, total=False):
    """How to continue; the names and limits are those of GenerateRequest and SamplingParams in the proto."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    sample_index: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    max_tokens: int
    stop: Sequence[str] | str
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    cache_salt: bytes
    priority: int
    logprobs: int
    prompt_logprobs: int
    speculate_tokens: int
    kv_precision: Literal["exact", "any"]
    n: int
    best_of: int
    beam: Beam | BeamSearch
    request_id: str
    parse_special_tokens: bool


_STOPPING = {
    False: EarlyStopping.EARLY_STOPPING_HEURISTIC,
    True: EarlyStopping.EARLY_STOPPING_FULL,
    "never": EarlyStopping.EARLY_STOPPING_NEVER,
}
_PRECISIONS = {"exact": KvPrecision.KV_PRECISION_EXACT, "any": KvPrecision.KV_PRECISION_ANY}
_SAMPLING = frozenset(field.name for field in SamplingParams.DESCRIPTOR.fields)
_OTHERS = frozenset(Options.__annotations__) - _SAMPLING - {"parse_special_tokens", "beam", "kv_precision"}


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Messages as the wire has them. Raises INVALID_FIELD on one without role or content."""
    found = []
    for index, message in enumerate(messages):
        if isinstance(message, ChatMessage):
            found.append(message)
        elif set(message) == {"role", "content"}:
            role = valid_text(f"messages[{index}].role", message["role"])
            found.append(ChatMessage(role=role, content=valid_text(f"messages[{index}].content", message["content"])))
        else:
            limit = "a mapping with exactly the keys role and content"
            raise invalid_field(f"messages[{index}]", sorted(message), limit, "correct it")
    return found


def generate_request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> GenerateRequest:
    """The request for exactly one of a text, a conversation and token ids. Raises INVALID_FIELD, naming the value."""
    given = [name for name, value in _prompts(prompt, messages, token_ids).items() if value is not None]
    if len(given) != 1:
        limit = "exactly one of prompt, messages and token_ids"
        raise invalid_field("prompt", " and ".join(given) or "not given", limit, "give one of them")
    request = GenerateRequest()
    for name in _OTHERS & set(options):
        _put(request, name, options)
    if (beam := options.get("beam")) is not None:
        request.beam.CopyFrom(beam if isinstance(beam, BeamSearch) else _beam_search(beam))
    if (precision := options.get("kv_precision")) is not None:
        if precision not in _PRECISIONS:
            raise invalid_field("kv_precision", repr(precision), '"exact" or "any"', "correct it")
        request.kv_precision = _PRECISIONS[precision]
    for name in _SAMPLING & set(options):
        _put(request.sampling, name, options)
    if prompt is not None:
        special = options.get("parse_special_tokens", False)
        request.text.CopyFrom(TextPrompt(text=valid_text("prompt", prompt), parse_special_tokens=special))
    elif messages is not None:
        request.chat.CopyFrom(ChatPrompt(messages=chat_messages(messages)))
    elif token_ids is not None:
        _put_tokens(request, token_ids)
    return request


def _prompts(prompt: object, messages: object, token_ids: object) -> dict[str, object]:
    return {"prompt": prompt, "messages": messages, "token_ids": token_ids}


def valid_text(name: str, value: str) -> str:
    """The text, if the wire can carry it: half a surrogate pair, as undecodable bytes become in Python, it cannot."""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise invalid_field(name, ascii(value), f"valid text ({error})", "correct its encoding") from error
    return value


def _beam_search(beam: Beam) -> BeamSearch:
    fields: dict[str, Any] = dict(beam)
    if "early_stopping" in beam:
        stopping = beam["early_stopping"]
        if not isinstance(stopping, bool) and stopping != "never":
            raise invalid_field("beam.early_stopping", repr(stopping), 'False, True or "never"', "correct it")
        fields["early_stopping"] = _STOPPING[stopping]
    try:
        return BeamSearch(**fields)
    except (TypeError, ValueError) as error:
        raise invalid_field("beam", repr(beam), f"a beam search that fits ({error})", "correct it") from error


def _put_tokens(request: GenerateRequest, token_ids: Sequence[int]) -> None:
    request.tokens.SetInParent()  # also if there are none
    try:
        request.tokens.packed_token_ids = pack(token_ids)
    except (TypeError, ValueError) as error:
        raise invalid_field("token_ids", error, "a sequence of unsigned 32-bit integers", "correct it") from error


def _put(message: GenerateRequest | SamplingParams, name: str, options: Options) -> None:
    value = options[name]  # type: ignore[literal-required]
    if isinstance(value, str) and name == "stop":
        value = [value]
    try:
        message.MergeFrom(type(message)(**{name: value}))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise invalid_field(name, repr(value), f"a value that fits ({error})", "correct it") from error
