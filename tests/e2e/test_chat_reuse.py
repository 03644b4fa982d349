"""Conversations find their own history in the pool, what was asked and what was answered, whoever did it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile

import pytest

from pagepool.inferd.v1 import generation_service_pb2 as pb
from tests.e2e.workers import Continuation, TinyHouse, Worker, household

TURNS = 10
BLOCK = 16
QUESTIONS = [
    "What is a lighthouse for?",
    "And who keeps it when the keeper is ill and the boat cannot land?",
    "Tell me about the lamp.",
    "How far does its light reach on a clear night in winter, and why not farther?",
    "Thanks. What does it burn?",
    "Could I build one of wood on a sandy shore, or would the first storm take it away?",
    "How long would that take?",
    "And what would it cost, roughly, in days of work?",
    "Would you live there?",
    "Goodbye, then.",
]

Turn = Callable[[Worker, bytes, str], Continuation]


class Chat:
    """A conversation of one salt, which knows what has been committed under it so far."""

    def __init__(self, salt: bytes, max_tokens: int) -> None:
        self.salt, self.max_tokens = salt, max_tokens
        self.committed: list[list[int]] = []
        self.answers: list[list[int]] = []
        self.cached: list[int] = []

    def ask(self, worker: Worker, prompt_ids: list[int], **prompt: pb.ChatPrompt | pb.TokenPrompt) -> Continuation:
        """One turn; what is cached of its prompt is at least all that was committed of it, in whole blocks."""
        request = pb.GenerateRequest(
            sampling=pb.SamplingParams(temperature=0),
            max_tokens=self.max_tokens,
            ignore_eos=True,
            cache_salt=self.salt,
            **prompt,  # type: ignore[arg-type]
        )
        run = worker.generate(request)
        usage = run.finished.usage
        assert usage.prompt_tokens == len(prompt_ids)
        common = max((length_in_common(prompt_ids, history) for history in self.committed), default=0)
        assert usage.cached_tokens >= min(common, len(prompt_ids) - 1) // BLOCK * BLOCK
        self.cached.append(usage.cached_tokens)
        self.answers.append(run.token_ids)
        # The last token of an answer is sent, but nothing was computed of it.
        self.committed.append([*prompt_ids, *run.token_ids[:-1]])
        return run


def length_in_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def by_messages(chat: Chat, workers: Sequence[Worker]) -> None:
    """The client keeps the text of both sides, and the template makes tokens of it anew in each turn."""
    messages: list[pb.ChatMessage] = []
    for turn in range(TURNS):
        worker = workers[turn % len(workers)]
        messages.append(pb.ChatMessage(role="user", content=QUESTIONS[turn]))
        ids = list(worker.stub().ApplyChatTemplate(pb.ApplyChatTemplateRequest(messages=messages)).token_ids)
        run = chat.ask(worker, ids, chat=pb.ChatPrompt(messages=messages))
        messages.append(pb.ChatMessage(role="assistant", content=run.text))


def by_tokens(chat: Chat, workers: Sequence[Worker]) -> None:
    """The client keeps token ids, so that all that was answered is found again, but for the last token."""
    ids: list[int] = []
    for turn in range(TURNS):
        worker = workers[turn % len(workers)]
        ids += worker.stub().Tokenize(pb.TokenizeRequest(text=QUESTIONS[turn])).token_ids
        before = len(ids)
        run = chat.ask(worker, list(ids), tokens=pb.TokenPrompt(token_ids=ids))
        ids += run.token_ids
        assert len(ids) == before + chat.max_tokens


def check_conversation(talk: Callable[[Chat, Sequence[Worker]], None], one: Worker, two: Worker, most: int) -> None:
    alone, both = Chat(b"alone " + talk.__name__.encode(), most), Chat(b"both " + talk.__name__.encode(), most)
    talk(alone, [one])
    talk(both, [one, two])
    assert both.answers == alone.answers
    for cached in (alone.cached, both.cached):
        assert cached[0] == 0
        assert all(later > earlier for earlier, later in pairwise(cached)), cached
        assert cached[-1] > 5 * most, "answers are found too"


@pytest.mark.parametrize("talk", [by_messages, by_tokens])
def test_a_chat_of_ten_turns_finds_its_history_whichever_worker_takes_a_turn(
    tiny_house: TinyHouse, talk: Callable[[Chat, Sequence[Worker]], None]
) -> None:
    check_conversation(talk, tiny_house.one, tiny_house.two, most=20)


@pytest.fixture(scope="module")
def default_pair() -> Iterator[tuple[Worker, Worker]]:
    """Two workers of the default model on a memd of their own, which leave each other room on a small machine."""
    flags = ("--dtype", "float32", "--threads", "1", "--spin", "off", "--no-warmup")
    with household("--pool-bytes", "512MiB") as (_, start):
        one, two = start("one", *flags), start("two", *flags)
        yield one.ready(), two.ready()


@pytest.mark.full
@pytest.mark.parametrize("talk", [by_messages, by_tokens])
def test_the_default_model_finds_its_history_whichever_worker_takes_a_turn(
    default_pair: tuple[Worker, Worker], talk: Callable[[Chat, Sequence[Worker]], None]
) -> None:
    check_conversation(talk, *default_pair, most=20)
