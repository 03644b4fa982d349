"""inferd for programs: text in, text out, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.inferd.v1.generation_service_pb2 import (
    GenerateTokens,
)
from pagepool.inferd.v1.generation_service_pb2_grpc import GenerationServiceStub
from pagepool_client.channels import default_target, dialled, failures, reading_options
from pagepool_client.continuations import Continuation, Continuations, Event, Heard
from pagepool_client.prompts import Message, Options, chat_messages, generate_request
from pagepool_client.streams import ServerStream

DEFAULT_TIMEOUT_S = 30.0


def event_of(response: pb.GenerateResponse) -> Event:
    """What a response carries."""
    event: Event = getattr(response, response.WhichOneof("event") or "tokens")
    return event


class Generation(Heard, ServerStream[Event]):
    """The continuations of a prompt: their events, in order. Closing or dropping it cancels the work on the server.

    Without n, best_of and beam there is one continuation. With them `pieces`, `text` and `logprobs` are those of the
    first, which of best_of and beam is the best; `all` gives every one.
    """

    def __init__(self, call: Any, convert: Callable[[Any], Event], target: str) -> None:
        super().__init__(call, convert, target)
        self._found = Continuations()

    def __next__(self) -> Event:
        event = super().__next__()
        self._found.take(event)
        return event

    def pieces(self) -> Iterator[str]:
        """The text as it comes."""
        for event in self:
            if isinstance(event, GenerateTokens) and event.text and not event.index:
                yield event.text

    def text(self) -> str:
        """All text that is still to come; `finished` says afterwards why it ended and what it used."""
        return "".join(self.pieces())

    def all(self) -> list[Continuation]:
        """Every continuation, when all are complete; of best_of and beam the best first."""
        for _ in self:
            pass
        return self.continuations


class InferenceClient:
    """A client of inferd at `target` (unix:PATH or HOST:PORT; inferd's default socket if not given).

    Thread-safe. Every call raises PagepoolError. Unary calls end after `timeout_s`; a continuation runs until it is
    finished, or cancelled by `close`, a `with` block, or by being dropped. Close the client, or use it in a
    `with` block.
    """

    def __init__(self, target: str | None = None, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        self.target = target or default_target("inferd")
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(dialled(self.target), options=reading_options())
        self._stub = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Continue exactly one of a text, a conversation and token ids."""
        request = generate_request(prompt, messages, token_ids, options)
        return Generation(self._stub.Generate(request), event_of, self.target)

    def tokenize(
        self, text: str, *, parse_special_tokens: bool = False, add_special_tokens: bool = False
    ) -> pb.TokenizeResponse:
        """Token ids of a text, and how the vocabulary spells each."""
        request = pb.TokenizeRequest(
            text=text, parse_special_tokens=parse_special_tokens, add_special_tokens=add_special_tokens
        )
        answer: pb.TokenizeResponse = self._call("Tokenize", request)
        return answer

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = self._call("Detokenize", request).text
        return text

    def apply_chat_template(self, messages: Sequence[Message]) -> pb.ApplyChatTemplateResponse:
        """The prompt that `generate` would make of the messages."""
        request = pb.ApplyChatTemplateRequest(messages=chat_messages(messages))
        answer: pb.ApplyChatTemplateResponse = self._call("ApplyChatTemplate", request)
        return answer

    def model(self) -> pb.GetModelResponse:
        """The model and the worker."""
        answer: pb.GetModelResponse = self._call("GetModel", pb.GetModelRequest())
        return answer

    def _call(self, method: str, request: Any) -> Any:
        with failures(self.target):
            return getattr(self._stub, method)(request, timeout=self._timeout_s)

    def close(self) -> None:
        """Close the channel; what runs on it is cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
