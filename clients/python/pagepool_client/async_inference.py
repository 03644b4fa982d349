"""InferenceClient for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.inferd.v1.generation_service_pb2 import (
    GenerateTokens,
)
from pagepool.inferd.v1.generation_service_pb2_grpc import GenerationServiceStub
from pagepool_client.channels import answered, channel_options, default_target, dialled
from pagepool_client.continuations import Continuation, Continuations, Event, Heard
from pagepool_client.inference import DEFAULT_TIMEOUT_S, event_of
from pagepool_client.prompts import Message, Options, chat_messages, generate_request
from pagepool_client.streams import AsyncServerStream


class AsyncGeneration(Heard, AsyncServerStream[Event]):
    """Generation for asyncio; cancelling its reader cancels the work too."""

    def __init__(self, call: Any, convert: Callable[[Any], Event], target: str) -> None:
        super().__init__(call, convert, target)
        self._found = Continuations()

    async def __anext__(self) -> Event:
        event = await super().__anext__()
        self._found.take(event)
        return event

    async def pieces(self) -> AsyncIterator[str]:
        """The text as it comes."""
        async for event in self:
            if isinstance(event, GenerateTokens) and event.text and not event.index:
                yield event.text

    async def text(self) -> str:
        """All text that is still to come; `finished` says afterwards why it ended and what it used."""
        return "".join([piece async for piece in self.pieces()])

    async def all(self) -> list[Continuation]:
        """Every continuation, when all are complete; of best_of and beam the best first."""
        async for _ in self:
            pass
        return self.continuations


class AsyncInferenceClient:
    """A client of inferd at `target` (unix:PATH or HOST:PORT; inferd's default socket if not given).

    For one event loop, and made in it. Every call raises PagepoolError. Unary calls end after `timeout_s`. Close the
    client or use it in an `async with` block.
    """

    def __init__(self, target: str | None = None, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        self.target = target or default_target("inferd")
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(dialled(self.target), options=channel_options())
        self._stub = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> AsyncGeneration:
        """Continue exactly one of a text, a conversation and token ids."""
        request = generate_request(prompt, messages, token_ids, options)
        return AsyncGeneration(self._stub.Generate(request), event_of, self.target)

    async def tokenize(
        self, text: str, *, parse_special_tokens: bool = False, add_special_tokens: bool = False
    ) -> pb.TokenizeResponse:
        """Token ids of a text, and how the vocabulary spells each."""
        request = pb.TokenizeRequest(
            text=text, parse_special_tokens=parse_special_tokens, add_special_tokens=add_special_tokens
        )
        answer: pb.TokenizeResponse = await self._call("Tokenize", request)
        return answer

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = (await self._call("Detokenize", request)).text
        return text

    async def apply_chat_template(self, messages: Sequence[Message]) -> pb.ApplyChatTemplateResponse:
        """The prompt that `generate` would make of the messages."""
        request = pb.ApplyChatTemplateRequest(messages=chat_messages(messages))
        answer: pb.ApplyChatTemplateResponse = await self._call("ApplyChatTemplate", request)
        return answer

    async def model(self) -> pb.GetModelResponse:
        """The model and the worker."""
        answer: pb.GetModelResponse = await self._call("GetModel", pb.GetModelRequest())
        return answer

    async def _call(self, method: str, request: Any) -> Any:
        return await answered(getattr(self._stub, method)(request, timeout=self._timeout_s), self.target)

    async def close(self) -> None:
        """Close the channel; what runs on it is cancelled. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
