"""The continuations of one request, put together from its events."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagepool.inferd.v1.generation_service_pb2 import (
    GenerateFinished,
    GeneratePromptLogprobs,
    GenerateStarted,
    GenerateTokens,
    TokenLogprobs,
)

Event = GenerateStarted | GeneratePromptLogprobs | GenerateTokens | GenerateFinished
"""One event of a continuation, as `pagepool.inferd.v1` documents it."""


@dataclass(slots=True)
class Continuation:
    """One of them, as far as it has come: a sample, or one of the best. `finished` says how it ended, and its score."""

    index: int
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: GenerateFinished | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Continuations:
    """All that a request's events have said so far.

    every has the continuations by index. finished is the last message, which has the usage of all. prompt_logprobs are
    those of the prompt's tokens from the second on.
    """

    started: GenerateStarted | None = None
    finished: GenerateFinished | None = None
    every: list[Continuation] = field(default_factory=lambda: [Continuation(0)])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """One more event."""
        if isinstance(event, GenerateTokens):
            continuation = self._of(event.index)
            continuation.pieces.append(event.text)
            continuation.token_ids.extend(event.token_ids)
            if event.logprobs:
                continuation.logprobs.extend(event.logprobs)
        elif isinstance(event, GenerateStarted):
            self.started = event
        elif isinstance(event, GenerateFinished):
            self._of(event.index).finished = event
            if event.HasField("usage"):
                self.finished = event
        else:
            self.prompt_logprobs.extend(event.logprobs)

    def _of(self, index: int) -> Continuation:
        while len(self.every) <= index:
            self.every.append(Continuation(len(self.every)))
        return self.every[index]


class Heard:
    """What has come of a request so far, by name: the same for readers of every kind, which keep it in `_found`."""

    _found: Continuations

    @property
    def started(self) -> GenerateStarted | None:
        """The first message, once it has come."""
        return self._found.started

    @property
    def finished(self) -> GenerateFinished | None:
        """The last message, once it has come: it has the usage of the request."""
        return self._found.finished

    @property
    def continuations(self) -> list[Continuation]:
        """Every continuation as far as it has come, by index."""
        return self._found.every

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens that have come so far, if the request asked for them."""
        return self._found.every[0].logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Those of the prompt's tokens from the second on, as far as they have come, if the request asked for them."""
        return self._found.prompt_logprobs
