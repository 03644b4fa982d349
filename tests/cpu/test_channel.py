"""The wire between front and engine."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inferd.channel import EngineChannel, FrontChannel, coalesce, decode, encode
from inferd.core.beam import Hypotheses, Hypothesis
from inferd.core.beam_values import Beam, EarlyStopping
from inferd.core.messages import (
    Adjustments,
    Cancel,
    Counters,
    Ending,
    EngineState,
    Failed,
    Finished,
    ModelCard,
    PromptLogprobs,
    Sampling,
    ScoredTokens,
    Setup,
    Shutdown,
    Submit,
    TokenLogprobs,
    Tokens,
    Used,
)

MESSAGES = [
    Setup(model="m", memd="unix:/run/memd.sock", warmup=False),
    ModelCard("f", "t", "Llama", 2048, 49152, "float32", [0, 2], bytes(range(32))),
    Submit(7, [1, 2, 3], 5, Sampling(0.5, 0.9, 40, 0.1, 2**64 - 1, 3), [4], ignore_eos=True, salt=b"\x00\xff"),
    Submit(8, [1], 5, adjustments=Adjustments([3, 4], [0.1, -7.0], 1.1, 0.5, -0.25), logprobs=0, prompt_logprobs=20),
    Submit(9, [1], 5, speculate_tokens=0),
    Submit(9, [1], 5, n=8),
    Submit(10, [1], 5, beam=Beam(4, 1.4, EarlyStopping.NEVER, 3)),
    Cancel(7),
    Shutdown(1.5),
    Tokens([(1, [2, 3]), (4, [5])]),
    ScoredTokens([(1, [TokenLogprobs(2, -0.1, [2, 9], [-0.1, -4.3])]), (4, [TokenLogprobs(5, -float("inf"), [], [])])]),
    PromptLogprobs(4, 17, [TokenLogprobs(3, -1 / 3, [7], [-0.2])]),
    Finished(1, Ending.STOP_TOKEN, Used(3, 2, 1, 0.1, 0.2, 0.3, draft_tokens=7, accepted_tokens=4), stop_token_id=9),
    Finished(1, Ending.STOP_TOKEN, Used(3, 2, 1, 0.1, 0.2, 0.3), stop_token_id=9, stop_logprob=-1.5),
    Hypotheses(2, [Hypothesis([3, 4], -1 / 3, Ending.END_OF_SEQUENCE, 9), Hypothesis([], -7.0, Ending.MAX_TOKENS)]),
    Failed(1, "POOL_LOST", "memd ist fort: ‰", retry_after_s=1.0, metadata={"a": "b"}),
    EngineState("serving", "", 2**64 - 1, 16, 100, 1, 2, Counters(steps=3, forward_s=0.25)),
]


def listed(message: Any) -> Any:
    """With its prompt, which arrives as an array, as the list that was sent."""
    return dataclasses.replace(message, prompt=list(message.prompt)) if isinstance(message, Submit) else message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_arrives_as_it_was_sent(message: Any) -> None:
    arrived = decode(encode(message)[4:])
    assert listed(arrived) == message
    assert type(arrived) is type(message)
    if isinstance(message, Finished):
        assert arrived.ending is Ending.STOP_TOKEN
    if isinstance(message, Hypotheses):
        assert [each.ending for each in arrived.items] == [Ending.END_OF_SEQUENCE, Ending.MAX_TOKENS]
        assert isinstance(arrived.items[0].ending, Ending)
    if isinstance(message, Submit) and message.beam:
        assert isinstance(arrived.beam.early_stopping, EarlyStopping)
    if isinstance(message, Tokens | ScoredTokens):
        assert isinstance(arrived.items[0], tuple)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(TypeError, match="no message"):
        encode(object())
    with pytest.raises(KeyError):
        decode(b"\0\0\0\x15" + b'{"$type":"os.system"}')


def test_tokens_coalesce_but_never_overtake_what_came_before_them() -> None:
    done = Finished(1, Ending.MAX_TOKENS, Used(1, 0, 2, 0, 0, 0))
    batch = [Tokens([(1, [10]), (2, [20])]), Tokens([(2, [21]), (1, [11])]), done, Tokens([(2, [22])])]
    assert list(coalesce(batch)) == [Tokens([(1, [10, 11]), (2, [20, 21])]), done, Tokens([(2, [22])])]


def test_tokens_with_logprobs_coalesce_beside_those_without() -> None:
    a, b, c, d = (TokenLogprobs(token, -1.0, [], []) for token in range(4))
    prompt = PromptLogprobs(2, 1, [d])
    batch = [
        prompt,
        ScoredTokens([(2, [a])]),
        Tokens([(1, [10])]),
        ScoredTokens([(2, [b]), (3, [d])]),
        Tokens([(1, [11])]),
    ]
    assert list(coalesce([*batch, prompt, ScoredTokens([(2, [c])])])) == [
        prompt,
        Tokens([(1, [10, 11])]),
        ScoredTokens([(2, [a, b]), (3, [d])]),
        prompt,
        ScoredTokens([(2, [c])]),
    ]


@pytest.fixture
async def ends() -> AsyncIterator[tuple[FrontChannel, EngineChannel, queue.Queue[Any]]]:
    ours, theirs = socket.socketpair()
    inbox: queue.Queue[Any] = queue.Queue()
    engine = EngineChannel(theirs)
    front = await FrontChannel.open(ours)
    yield front, engine, inbox
    await front.close()
    engine.close()


async def test_messages_pass_both_ways(ends: tuple[FrontChannel, EngineChannel, queue.Queue[Any]]) -> None:
    front, engine, inbox = ends
    engine.start(inbox.put)
    for message in MESSAGES:
        front.send(message)
        engine.send(message)
    assert [listed(await asyncio.to_thread(inbox.get, timeout=5)) for _ in MESSAGES] == MESSAGES
    assert [listed(await anext(front)) for _ in MESSAGES] == MESSAGES


async def test_a_slow_front_gets_the_tokens_of_many_steps_in_few_messages(
    ends: tuple[FrontChannel, EngineChannel, queue.Queue[Any]],
) -> None:
    front, engine, inbox = ends
    steps = 20_000  # far more than the socket and the reader buffer hold
    engine.start(inbox.put)
    for step in range(steps):
        engine.send(Tokens([(1, [step]), (2, [step])]))
    received: dict[int, list[int]] = {1: [], 2: []}
    count = 0
    while len(received[2]) < steps:
        count += 1
        for request, tokens in (await anext(front)).items:
            received[request] += tokens
    assert received == {1: list(range(steps)), 2: list(range(steps))}
    assert count < steps / 2


async def test_what_the_socket_takes_in_parts_arrives_whole_and_in_order(
    ends: tuple[FrontChannel, EngineChannel, queue.Queue[Any]],
) -> None:
    front, engine, inbox = ends
    engine.start(inbox.put)
    sent = [message for n in range(8) for message in (EngineState("loading", str(n) * 1_000_000), Tokens([(1, [n])]))]
    for message in sent:
        engine.send(message)
    assert [await anext(front) for _ in sent] == sent


def test_a_frame_that_was_cut_off_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    inbox: queue.Queue[Any] = queue.Queue()
    engine = EngineChannel(theirs)
    engine.start(inbox.put)
    ours.sendall(encode(MESSAGES[0])[:-8])
    ours.close()
    assert inbox.get(timeout=5) is None
    engine.close()


async def test_the_engine_is_told_that_the_front_is_gone(
    ends: tuple[FrontChannel, EngineChannel, queue.Queue[Any]],
) -> None:
    front, engine, inbox = ends
    engine.start(inbox.put)
    front.send(Cancel(1))
    await front.close()
    assert await asyncio.to_thread(inbox.get, timeout=5) == Cancel(1)
    assert await asyncio.to_thread(inbox.get, timeout=5) is None


async def test_the_front_sees_what_was_sent_before_the_engine_went_and_then_the_end(
    ends: tuple[FrontChannel, EngineChannel, queue.Queue[Any]],
) -> None:
    front, engine, inbox = ends
    engine.start(inbox.put)
    engine.send(EngineState("stopped"))
    await asyncio.to_thread(engine.close)
    assert [message async for message in front] == [EngineState("stopped")]
    with pytest.raises(ConnectionError):
        front.send(Cancel(1))
