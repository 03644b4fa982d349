"""Replays requests at a running inferd, each on a stream of its own, and hears what comes when."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagepool.errors import PagepoolError, Reason
from pagepool.inferd.v1.generation_service_pb2 import GenerateFinished, GenerateTokens
from pagepool_client.async_inference import AsyncInferenceClient
from pagepool_client.diagnosis.words import count
from pagepool_client.tuning.figures import Heard

LEAD_S = 0.05
"""From the making of the streams' tasks to the first request."""
WATCH_S = 0.1
"""Between two looks at whether anything comes."""


@dataclass(frozen=True, slots=True)
class Order:
    """A request to send: when, which tokens, and how many to generate."""

    at_s: float
    token_ids: Sequence[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a replay: what was heard of the requests that were due, and when it was cut, if it was."""

    heard: list[Heard]
    ended_s: float | None


def replay(
    target: str, orders: Sequence[Order], salt: bytes, cut_s: float | None = None, patience_s: float = math.inf
) -> Replay:
    """Send the orders to inferd at `target` and hear all answers out; the streams are cancelled after `cut_s` seconds.

    `salt` keeps the prefixes of this replay to itself. Raises the first error of a request, and INTERNAL_ERROR if for
    `patience_s` nothing comes though requests wait; the rest is cancelled then.
    """
    return asyncio.run(_replay(target, orders, salt, cut_s, patience_s))


async def _replay(target: str, orders: Sequence[Order], salt: bytes, cut_s: float | None, patience_s: float) -> Replay:
    client = AsyncInferenceClient(target)
    begun = time.monotonic() + LEAD_S
    heard = [Heard(begun + order.at_s) for order in orders]
    try:
        async with asyncio.timeout(LEAD_S + cut_s if cut_s else None), asyncio.TaskGroup() as tasks:
            for order, one in zip(orders, heard, strict=True):
                tasks.create_task(_follow(client, order, one, salt))
            tasks.create_task(_watch(heard, patience_s))
    except TimeoutError:
        ended = begun + (cut_s or 0.0)
        return Replay([one for one in heard if one.due_s < ended], ended)
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        await client.close()
    return Replay(heard, None)


async def _watch(heard: Sequence[Heard], patience_s: float) -> None:
    """Ends when all requests have; raises if none of those that are due hears anything for too long."""
    while waiting := [one for one in heard if not one.finished]:
        now = time.monotonic()
        due = [one.due_s for one in waiting if one.due_s <= now]
        last = max([*due, *(one.messages[-1][0] for one in heard if one.messages)], default=now)
        if due and now - last > patience_s:
            wait = count(len(due), "request waits", "requests wait")
            message = f"no token came for {patience_s:g} s, though {wait}; the daemons' logs may say why"
            raise PagepoolError(Reason.INTERNAL_ERROR, message, patience_s=patience_s, waiting=len(due))
        await asyncio.sleep(WATCH_S)


async def _follow(client: AsyncInferenceClient, order: Order, heard: Heard, salt: bytes) -> None:
    await asyncio.sleep(heard.due_s - time.monotonic())
    stream = client.generate(
        token_ids=order.token_ids,
        max_tokens=order.output_tokens,
        ignore_eos=True,
        temperature=0.0,
        cache_salt=salt,
    )
    async for event in stream:
        if isinstance(event, GenerateTokens) and event.token_ids:
            heard.messages.append((time.monotonic(), len(event.token_ids)))
        elif isinstance(event, GenerateFinished):
            heard.cached_tokens, heard.preemptions = event.usage.cached_tokens, event.usage.preemptions
            heard.finished = True
    came = sum(number for _, number in heard.messages)
    if came != order.output_tokens:
        message = f"a request for {order.output_tokens} tokens ended with {came}"
        raise PagepoolError(Reason.INTERNAL_ERROR, message)


def _first(group: BaseExceptionGroup) -> BaseException:
    """What went wrong first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
