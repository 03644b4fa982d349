"""Open requests by number, and the one engine that they go to."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from inferd.core.beam import Hypotheses, Hypothesis
from inferd.core.messages import (
    Cancel,
    EngineState,
    Failed,
    Finished,
    ModelCard,
    PromptLogprobs,
    ScoredTokens,
    Submit,
    TokenLogprobs,
    Tokens,
)
from pagepool.errors import PagepoolError, Reason

STARTING_RETRY_S, POOL_RETRY_S, DRAINING_RETRY_S = 1.0, 0.5, 1.0

End = Finished | PagepoolError


class TokenStream:
    """The tokens of one continuation as the engine delivers them, for one reader.

    Holds at most the request's max_tokens ids, however slow the reader is, and the logprobs that it asked for. `news`
    is set whenever there is something to take; the continuations of one request share it, and the reader clears it.
    """

    def __init__(self, request: int, news: asyncio.Event) -> None:
        self.request = request
        self.end: End | None = None
        self.hypotheses: list[Hypothesis] = []
        """What a beam search found, when it has ended."""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._news = news

    def deliver(self, tokens: list[int]) -> None:
        """More tokens."""
        self._tokens += tokens
        self._news.set()

    def deliver_scored(self, logprobs: list[TokenLogprobs]) -> None:
        """More tokens of a request that asked for logprobs."""
        self._logprobs += logprobs
        self.deliver([each.token_id for each in logprobs])

    def deliver_prompt(self, part: PromptLogprobs) -> None:
        """Logprobs of more of the prompt."""
        self._prompt_logprobs.append(part)
        self._news.set()

    def finish(self, end: End) -> None:
        """The last word; what comes later is ignored."""
        if self.end is None:
            self.end = end
            self._news.set()

    def take(self) -> list[int]:
        """The tokens since the last call, maybe none. Whether those are the last says `end`, asked before."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def take_logprobs(self) -> tuple[list[PromptLogprobs], list[TokenLogprobs]]:
        """What came beside the tokens of the last `take`: parts of the prompt before them, and one for each of them.

        To be called right after `take`; both are empty unless the request asked for logprobs.
        """
        prompt, self._prompt_logprobs = self._prompt_logprobs, []
        logprobs, self._logprobs = self._logprobs, []
        return prompt, logprobs


class Dispatcher:
    """Hands requests to the engine that is there, and what it says to their streams. For one asyncio loop.

    `on_change` is called after each change of `state`, `card` or `draining`.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.state = EngineState("loading")
        self.card: ModelCard | None = None
        self.draining = False
        self.fatal: PagepoolError | None = None
        """Why the engine said that it cannot start."""
        self._on_change = on_change
        self._send: Callable[[Any], None] | None = None
        self._streams: dict[int, TokenStream] = {}
        self._next = 1

    @property
    def open_requests(self) -> int:
        """Continuations that have not ended."""
        return len(self._streams)

    def require_serving(self) -> None:
        """Raises DRAINING, ENGINE_STARTING or POOL_LOST unless a request can be taken."""
        if self.draining:
            raise _stopping()
        state = self.state
        if self._send is not None and state.phase == "serving":
            return
        if state.phase == "attaching" and state.detail:  # an attempt has failed, or memd is lost
            message = f"the worker waits for memd ({state.detail}); retry in a moment"
            raise PagepoolError(Reason.POOL_LOST, message, retry_after_s=POOL_RETRY_S, detail=state.detail)
        raise self.starting()

    def starting(self) -> PagepoolError:
        """ENGINE_STARTING, to be raised."""
        detail = self.state.detail or self.state.phase
        message = f"the engine is not ready yet ({detail}); retry in a moment"
        found = {"phase": self.state.phase, "detail": detail}
        return PagepoolError(Reason.ENGINE_STARTING, message, retry_after_s=STARTING_RETRY_S, **found)

    def submit(self, draft: Submit, news: asyncio.Event) -> list[TokenStream]:
        """Sends a request, numbered anew, to the engine; a stream for each of its samples, which set `news`.

        Raises what `require_serving` raises. The caller gives each stream back by `release`, in any case.
        """
        self.require_serving()
        first, self._next = self._next, self._next + draft.n
        if not self._tell(dataclasses.replace(draft, request=first)):
            raise self.starting()
        streams = [TokenStream(number, news) for number in range(first, self._next)]
        self._streams.update((stream.request, stream) for stream in streams)
        return streams

    def cancel(self, stream: TokenStream) -> None:
        """Has the engine stop; its Finished comes as the stream's end."""
        if stream.end is None:
            self._tell(Cancel(stream.request))

    def release(self, stream: TokenStream) -> None:
        """The reader is gone: cancels what has not ended, and forgets the stream."""
        if self._streams.pop(stream.request, None) is not None:
            self.cancel(stream)

    def drain(self) -> None:
        """From now on no request is taken."""
        self.draining = True
        self._on_change()

    def connected(self, send: Callable[[Any], None]) -> None:
        """An engine process is there; `send` raises ConnectionError when it is gone."""
        self._send = send
        self._enter(EngineState("loading"))

    def disconnected(self, why: str) -> None:
        """The engine process is gone, and every open request with it."""
        self._send = None
        self._enter(dataclasses.replace(self.state, phase="stopped", detail=why, waiting=0, running=0, pool_epoch=0))
        for stream in self._streams.values():
            stream.finish(_stopping() if self.draining else _engine_failed(why))

    def receive(self, message: Any) -> None:
        """A message of the engine. Those for streams that are gone are ignored."""
        if isinstance(message, Tokens):
            for request, tokens in message.items:
                if stream := self._streams.get(request):
                    stream.deliver(tokens)
        elif isinstance(message, ScoredTokens | PromptLogprobs | Hypotheses):
            self._receive_more(message)
        elif isinstance(message, Finished):
            self._finish(message.request, message)
        elif isinstance(message, Failed) and message.request == 0:
            self.fatal = _error(message)
        elif isinstance(message, Failed):
            self._finish(message.request, _error(message))
        elif isinstance(message, ModelCard):
            self.card = message
            self._on_change()
        elif isinstance(message, EngineState):
            self._enter(message)

    def _receive_more(self, message: ScoredTokens | PromptLogprobs | Hypotheses) -> None:
        """What only some requests ask for."""
        if isinstance(message, Hypotheses):
            if stream := self._streams.get(message.request):
                stream.hypotheses = message.items
            return
        if isinstance(message, PromptLogprobs):
            if stream := self._streams.get(message.request):
                stream.deliver_prompt(message)
            return
        for request, logprobs in message.items:
            if stream := self._streams.get(request):
                stream.deliver_scored(logprobs)

    def _finish(self, request: int, end: End) -> None:
        if stream := self._streams.get(request):
            stream.finish(end)

    def _enter(self, state: EngineState) -> None:
        changed = state.phase != self.state.phase
        self.state = state
        if changed:
            self._on_change()

    def _tell(self, message: Any) -> bool:
        """Sends a message; False if the engine is gone, of which the supervisor hears too and ends what is open."""
        if self._send is None:
            return False
        try:
            self._send(message)
        except ConnectionError:
            return False
        return True


def _stopping() -> PagepoolError:
    message = "the worker is stopping; try another one, or this one after a while"
    return PagepoolError(Reason.DRAINING, message, retry_after_s=DRAINING_RETRY_S)


def _engine_failed(why: str) -> PagepoolError:
    message = f"the engine failed ({why}); retry elsewhere and look into the worker's log"
    return PagepoolError(Reason.ENGINE_FAILED, message, cause=why)


def _error(failed: Failed) -> PagepoolError:
    error = PagepoolError(Reason(failed.reason), failed.message, field=failed.field, retry_after_s=failed.retry_after_s)
    error.metadata = dict(failed.metadata)
    return error
