"""One continuation: tokens in, text and ids out, and how it ended."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from inferd.core.messages import Ending, Finished, PromptLogprobs, TokenLogprobs, Used
from inferd.dispatch import Dispatcher, TokenStream
from inferd.text.detokenizer import Detokenizer
from inferd.text.stops import StopFinder
from pagepool.durations import to_duration
from pagepool.errors import PagepoolError, Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb

_REASONS = {
    Ending.END_OF_SEQUENCE: pb.FINISH_REASON_END_OF_SEQUENCE,
    Ending.STOP_TOKEN: pb.FINISH_REASON_STOP,
    Ending.MAX_TOKENS: pb.FINISH_REASON_MAX_TOKENS,
}


MAX_SCORED = 1024
"""Tokens with logprobs in one message: 170 KB of them with 20 others each, where gRPC takes 4 MB."""


class Continuation:
    """Turns a stream into events. Every token is given out once, with the text that is certain by then.

    While nobody takes what is given out, tokens pile up in the stream and then come as one message, or as few as hold
    their logprobs.
    """

    def __init__(
        self, dispatcher: Dispatcher, stream: TokenStream, detokenizer: Detokenizer, stops: StopFinder
    ) -> None:
        self.used: Used | None = None
        """What it used, when it is complete."""
        self._dispatcher = dispatcher
        self._stream = stream
        self._detokenizer = detokenizer
        self._stops = stops
        self._generated = 0
        self._logprobs: list[float] = []

    @property
    def mean_logprob(self) -> float:
        """Of its tokens so far, the one that ended it included; 0 if there are none. Only of those with logprobs."""
        return math.fsum(self._logprobs) / len(self._logprobs) if self._logprobs else 0.0

    def events(self) -> Iterator[pb.GenerateResponse]:
        """Tokens since the last call, then, if that was all, finished, without usage: `used` is set just before it.

        Raises what the engine ended the request with.
        """
        ended = self._stream.end is not None  # asked before the tokens are taken, which then are all there are
        tokens, logprobs = self._stream.take(), self._stream.take_logprobs()
        if self._stops.found is None:
            yield from self._news(tokens, *logprobs)
            if self._stops.found is not None:
                self._dispatcher.cancel(self._stream)
        if ended:
            yield from self._end()

    def _end(self) -> Iterator[pb.GenerateResponse]:
        cut = self._stops.found is not None
        end = finished_of(self._stream, cut=cut)
        if not cut and (text := self._rest()):
            yield _tokens(text, [])
        if not cut and end.stop_logprob is not None:
            self._logprobs.append(end.stop_logprob)
        self.used = dataclasses.replace(end.used, generated_tokens=self._generated)
        yield finished(end.ending, self._stops.found, end.stop_token_id)

    def _news(
        self, token_ids: list[int], prompt: Sequence[PromptLogprobs], logprobs: list[TokenLogprobs]
    ) -> Iterator[pb.GenerateResponse]:
        """Events for all that a read has brought."""
        if not prompt and not logprobs:
            yield from self._tokens(token_ids)
            return
        for part in prompt:
            found = pb.GeneratePromptLogprobs(
                first_position=part.first_position, logprobs=[_logprobs(each) for each in part.logprobs]
            )
            yield pb.GenerateResponse(prompt_logprobs=found)
        for first in range(0, len(token_ids), MAX_SCORED):
            if self._stops.found is not None:
                return
            last = first + MAX_SCORED
            for event in self._tokens(token_ids[first:last]):
                some = logprobs[first : first + len(event.tokens.token_ids)]
                self._logprobs += [each.logprob for each in some]
                event.tokens.logprobs.extend(_logprobs(each) for each in some)
                yield event

    def _tokens(self, token_ids: list[int]) -> list[pb.GenerateResponse]:
        """The event for new tokens, if any; those behind a stop text were not asked for."""
        text, taken = "", 0
        for token in token_ids:
            text += self._stops.feed(self._detokenizer.feed((token,)))
            taken += 1
            if self._stops.found is not None:
                break
        self._generated += taken
        return [_tokens(text, token_ids[:taken])] if taken else []

    def _rest(self) -> str:
        """What was held back; a stop text in it counts."""
        text = self._stops.feed(self._detokenizer.flush())
        return text if self._stops.found is not None else text + self._stops.flush()


def finished_of(stream: TokenStream, *, cut: bool = False) -> Finished:
    """The engine's account of a stream that has ended. Raises what it ended with, if that is an error.

    DRAINING if the engine cancelled it, unless it was `cut` by a stop text.
    """
    end = stream.end
    if isinstance(end, PagepoolError):
        raise end
    assert end is not None
    if end.ending is Ending.CANCELLED and not cut:
        raise PagepoolError(Reason.DRAINING, "the worker stopped before the request ended", retry_after_s=1.0)
    return end


def _tokens(text: str, token_ids: list[int]) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=pb.GenerateTokens(text=text, token_ids=token_ids))


def _logprobs(found: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=found.token_id,
        logprob=found.logprob,
        top_token_ids=found.top_token_ids,
        top_logprobs=found.top_logprobs,
    )


def finished(ending: Ending, stop_text: str | None, stop_token_id: int | None) -> pb.GenerateResponse:
    """The event of a continuation that ended so, without usage; a stop text that was found is the reason."""
    if stop_text is not None:
        return pb.GenerateResponse(finished=pb.GenerateFinished(reason=pb.FINISH_REASON_STOP, stop_text=stop_text))
    return pb.GenerateResponse(finished=pb.GenerateFinished(reason=_REASONS[ending], stop_token_id=stop_token_id))


def usage(used: Used) -> pb.Usage:
    """What was used, as the wire has it."""
    return pb.Usage(
        prompt_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        generated_tokens=used.generated_tokens,
        queue_time=to_duration(used.queue_s),
        prefill_time=to_duration(used.prefill_s),
        decode_time=to_duration(used.decode_s),
        preemptions=used.preemptions,
        draft_tokens=used.draft_tokens,
        accepted_tokens=used.accepted_tokens,
        lossy_tokens=used.lossy_tokens,
    )
