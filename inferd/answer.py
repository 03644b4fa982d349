"""What a request is answered: its continuations as one stream of events, as they come or the best ones at the end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence

from inferd.continuation import MAX_SCORED, Continuation, finished, finished_of, usage
from inferd.core.messages import Used
from inferd.dispatch import TokenStream
from inferd.text.detokenizer import Detokenizer
from pagepool.inferd.v1 import generation_service_pb2 as pb

_OF_EACH = ("generated_tokens", "preemptions", "draft_tokens", "accepted_tokens")
"""Fields of Used that each continuation has by itself; while they are one, computing the prompt, the first has them."""

Events = AsyncGenerator[pb.GenerateResponse, None]


async def as_they_come(continuations: Sequence[Continuation], news: asyncio.Event) -> Events:
    """The events of all continuations, each under its index; the last to end has the usage of all.

    `news` is set whenever there is something to read. Raises what the engine ended any of them with.
    """
    running = list(enumerate(continuations))
    while running:
        await news.wait()
        news.clear()
        for index, continuation in tuple(running):
            for event in continuation.events():
                if continuation.used is not None:
                    running.remove((index, continuation))
                    event.finished.index = index
                    if not running:
                        event.finished.usage.CopyFrom(usage(_together(continuations)))
                elif index and event.HasField("tokens"):
                    event.tokens.index = index
                yield event


async def best_of(continuations: Sequence[Continuation], news: asyncio.Event, returned: int, *, scored: bool) -> Events:
    """The `returned` continuations with the highest logprob per token, best first, when all are complete.

    All must have been asked for with logprobs, which are passed on if `scored`.
    """
    kept: list[list[pb.GenerateResponse]] = [[] for _ in continuations]
    async for event in as_they_come(continuations, news):
        if event.HasField("prompt_logprobs"):
            yield event
            continue
        if event.HasField("finished"):
            event.finished.ClearField("usage")
            kept[event.finished.index].append(event)
        else:
            if not scored:
                del event.tokens.logprobs[:]
            _keep(kept[event.tokens.index], event)
    order = sorted(range(len(kept)), key=lambda index: -continuations[index].mean_logprob)[:returned]
    for place, index in enumerate(order):
        *tokens, end = kept[index]
        for event in tokens:
            event.tokens.index = place
            yield event
        end.finished.index, end.finished.score = place, continuations[index].mean_logprob
        if place == len(order) - 1:
            end.finished.usage.CopyFrom(usage(_together(continuations)))
        yield end


async def beams(stream: TokenStream, news: asyncio.Event, detokenizer: Callable[[], Detokenizer]) -> Events:
    """What a beam search found, best first, when it is over. Raises what the engine ended it with."""
    while stream.end is None:
        await news.wait()
        news.clear()
    used = finished_of(stream).used
    for index, found in enumerate(stream.hypotheses):
        text = detokenizer()
        tokens = pb.GenerateTokens(text=text.feed(found.tokens) + text.flush(), token_ids=found.tokens, index=index)
        if found.tokens:
            yield pb.GenerateResponse(tokens=tokens)
        end = finished(found.ending, None, found.stop_token_id)
        end.finished.index, end.finished.score = index, found.score
        if index == len(stream.hypotheses) - 1:
            end.finished.usage.CopyFrom(usage(used))
        yield end


def _together(continuations: Sequence[Continuation]) -> Used:
    """What continuations of one prompt used together: its tokens and their waiting count once."""
    every = [each.used for each in continuations if each.used is not None]
    sums = {name: sum(getattr(each, name) for each in every) for name in _OF_EACH}
    return dataclasses.replace(every[0], decode_s=max(each.decode_s for each in every), **sums)


def _keep(kept: list[pb.GenerateResponse], event: pb.GenerateResponse) -> None:
    """Keep more tokens, in as few messages as hold them."""
    before = kept[-1].tokens if kept else None
    if before is None or len(before.token_ids) + len(event.tokens.token_ids) > MAX_SCORED:
        kept.append(event)
        return
    before.text += event.tokens.text
    before.token_ids.extend(event.tokens.token_ids)
    before.logprobs.extend(event.tokens.logprobs)
