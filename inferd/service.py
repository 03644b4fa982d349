"""GenerationService: requests in, the engine's tokens out as text. Translation only; the proto states the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from inferd.answer import Events, as_they_come, beams, best_of
from inferd.continuation import Continuation
from inferd.core.messages import Counters, ModelCard
from inferd.dispatch import Dispatcher, TokenStream
from inferd.text.detokenizer import Detokenizer
from inferd.text.stops import StopFinder
from inferd.text.tokenizer import Tokenizer
from inferd.validation import (
    Checked,
    check,
    check_messages,
    check_token_ids,
    prompt_empty,
    prompt_too_long,
    token_prompt,
)
from pagepool.durations import to_duration
from pagepool.errors import invalid_field
from pagepool.inferd.v1 import generation_service_pb2 as pb

T = TypeVar("T")


class GenerationService:
    """Serves every listener of a worker, on one asyncio loop.

    The tokenizer works on a thread of its own, one text after the other, so that a long text never holds up the
    tokens of others. `model` is the name that inferd was given.
    """

    def __init__(self, model: str, dispatcher: Dispatcher) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._tokenizer: Tokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Ends the tokenizer's thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def use(self, load: Callable[[], Tokenizer]) -> None:
        """Takes a new tokenizer; until the first, calls answer ENGINE_STARTING."""
        self._tokenizer = await asyncio.get_running_loop().run_in_executor(self._thread, load)

    async def generate(self, request: pb.GenerateRequest, _: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Started, then tokens and finished of each continuation. Leaving it early cancels them in the engine."""
        self._dispatcher.require_serving()
        card, tokenizer = self._ready()
        checked = check(request, card)
        prompt = await self._prompt(request, card, tokenizer)
        submit, news = checked.submit(prompt, card), asyncio.Event()
        streams = self._dispatcher.submit(submit, news)
        try:
            started = pb.GenerateStarted(
                request_id=checked.request_id,
                seed=submit.sampling.seed,
                prompt_tokens=len(prompt),
                num_continuations=checked.strategy.returned,
            )
            yield pb.GenerateResponse(started=started)
            detokenizer = partial(tokenizer.detokenizer, prompt)
            async with aclosing(self._events(checked, streams, news, detokenizer)) as events:
                async for event in events:
                    yield event
        finally:
            for stream in streams:
                self._dispatcher.release(stream)

    def _events(
        self, checked: Checked, streams: list[TokenStream], news: asyncio.Event, detokenizer: Callable[[], Detokenizer]
    ) -> Events:
        strategy = checked.strategy
        if strategy.beam is not None:
            return beams(streams[0], news, detokenizer)
        continuations = [
            Continuation(self._dispatcher, stream, detokenizer(), StopFinder(checked.stops)) for stream in streams
        ]
        if strategy.ranked:
            return best_of(continuations, news, strategy.returned, scored=checked.scored)
        return as_they_come(continuations, news)

    async def tokenize(self, request: pb.TokenizeRequest, _: Any) -> pb.TokenizeResponse:
        """Text to ids."""
        _, tokenizer = self._ready()

        def work() -> pb.TokenizeResponse:
            token_ids = tokenizer.encode(
                request.text,
                parse_special_tokens=request.parse_special_tokens,
                add_special_tokens=request.add_special_tokens,
            )
            return pb.TokenizeResponse(token_ids=token_ids, pieces=tokenizer.pieces(token_ids))

        return await self._on_thread(work)

    async def detokenize(self, request: pb.DetokenizeRequest, _: Any) -> pb.DetokenizeResponse:
        """Ids to text."""
        card, tokenizer = self._ready()
        check_token_ids("token_ids", request.token_ids, card)
        decode = partial(tokenizer.decode, request.token_ids, skip_special_tokens=request.skip_special_tokens)
        return pb.DetokenizeResponse(text=await self._on_thread(decode))

    async def apply_chat_template(self, request: pb.ApplyChatTemplateRequest, _: Any) -> pb.ApplyChatTemplateResponse:
        """Messages to the prompt that Generate would use."""
        _, tokenizer = self._ready()
        messages = check_messages("messages", request.messages)
        rendered = await self._on_thread(lambda: tokenizer.render(messages))
        return pb.ApplyChatTemplateResponse(text=rendered.text, token_ids=rendered.token_ids)

    async def get_model(self, _request: pb.GetModelRequest, _: Any) -> pb.GetModelResponse:
        """What is served, and how busy the worker is."""
        card, tokenizer = self._ready()
        state = self._dispatcher.state
        return pb.GetModelResponse(
            model=self._model,
            architecture=card.architecture,
            max_context_tokens=card.max_context_tokens,
            vocab_size=card.vocab_size,
            dtype=card.dtype,
            eos_token_ids=card.eos_token_ids,
            has_chat_template=tokenizer.has_chat_template,
            model_digest=card.digest,
            block_size=state.block_size,
            pool_epoch=state.pool_epoch,
            waiting_requests=state.waiting,
            running_requests=state.running,
            counters=_counters(state.counters),
            unsupported_fields=card.unsupported_fields,
            prefix_waiting_requests=state.awaiting_prefix,
        )

    def _ready(self) -> tuple[ModelCard, Tokenizer]:
        card = self._dispatcher.card
        if card is None or self._tokenizer is None:
            raise self._dispatcher.starting()
        return card, self._tokenizer

    async def _prompt(self, request: pb.GenerateRequest, card: ModelCard, tokenizer: Tokenizer) -> Sequence[int]:
        """The prompt's token ids, whatever it came as."""
        kind = request.WhichOneof("prompt")
        if kind == "tokens":
            return token_prompt(request.tokens, card)
        if kind == "text":
            return await self._text_prompt(request.text, card, tokenizer)
        if kind == "chat":
            messages = check_messages("chat.messages", request.chat.messages)
            _refuse_endless(sum(len(message["content"]) for message in messages), card, tokenizer)
            return (await self._on_thread(lambda: tokenizer.render(messages))).token_ids
        raise invalid_field("prompt", "not set", "set", "give one of text, chat and tokens")

    async def _text_prompt(self, prompt: pb.TextPrompt, card: ModelCard, tokenizer: Tokenizer) -> list[int]:
        if not prompt.text:
            raise prompt_empty("text.text")
        _refuse_endless(len(prompt.text), card, tokenizer)
        encode = partial(
            tokenizer.encode,
            prompt.text,
            parse_special_tokens=prompt.parse_special_tokens,
            add_special_tokens=True,
        )
        return await self._on_thread(encode)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _refuse_endless(characters: int, card: ModelCard, tokenizer: Tokenizer) -> None:
    """Refuses a text that cannot fit before time is spent on it."""
    least = characters // tokenizer.longest_token
    if least > card.max_context_tokens:
        raise prompt_too_long(least, 1, card, at_least=True)


def _counters(counters: Counters) -> pb.EngineCounters:
    return pb.EngineCounters(
        steps=counters.steps,
        prefill_tokens=counters.prefill_tokens,
        generated_tokens=counters.generated_tokens,
        cached_tokens=counters.cached_tokens,
        forward_time=to_duration(counters.forward_s),
        step_time=to_duration(counters.step_s),
        memd_unary_calls=counters.memd_unary_calls,
        memd_steps=counters.memd_steps,
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        starved_steps=counters.starved_steps,
        prefix_waits=counters.prefix_waits,
        prefix_waits_overdue=counters.prefix_waits_overdue,
    )
