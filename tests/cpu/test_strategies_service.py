"""n, best_of and beam at the front: what is refused, what the engine is asked, and how continuations come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from inferd.core.beam import Hypotheses, Hypothesis
from inferd.core.beam_values import Beam, EarlyStopping
from inferd.core.messages import (
    Cancel,
    Ending,
    Failed,
    Finished,
    PromptLogprobs,
    ScoredTokens,
    Submit,
    TokenLogprobs,
    Tokens,
    Used,
)
from inferd.text.tokenizer import Tokenizer
from pagepool.errors import PagepoolError, Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from tests.cpu.test_inferd_service import (
    Script,
    ScriptedEngine,
    failure,
    folder,
    rest,
    saying,
    text_request,
    tokenizer,
    world,
)

__all__ = ["folder", "tokenizer"]

TEXTS = ["alpha one", "beta", "gamma two three"]
NOT_ALONE = {"beam": {"width": 3}}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "too many samples": ({"n": 65}, "n", "at most 64"),
    "too many to choose from": ({"best_of": 65}, "best_of", "at most 64"),
    "fewer than are returned": ({"n": 3, "best_of": 2}, "best_of", "at least n (3)"),
    "no width": ({"beam": {}}, "beam.width", "from 1 to 64"),
    "too wide": ({"beam": {"width": 65}}, "beam.width", "from 1 to 64"),
    "no penalty": ({"beam": {"width": 2, "length_penalty": float("nan")}}, "beam.length_penalty", "finite"),
    "a large penalty": ({"beam": {"width": 2, "length_penalty": -10.5}}, "beam.length_penalty", "from -10 to 10"),
    "unknown stopping": ({"beam": {"width": 2, "early_stopping": 9}}, "beam.early_stopping", "one of EARLY_STOPPING_"),
    "more than beams": (
        {"beam": {"width": 2, "num_return_sequences": 3}},
        "beam.num_return_sequences",
        "at most beam.width (2)",
    ),
    "beam with n": (NOT_ALONE | {"n": 2}, "n", "left out beside beam"),
    "beam with best_of": (NOT_ALONE | {"best_of": 1}, "best_of", "left out beside beam"),
    "beam with stop": (NOT_ALONE | {"stop": ["x"]}, "stop", "give stop_token_ids instead"),
    "beam with logprobs": (NOT_ALONE | {"logprobs": 0}, "logprobs", "left out beside beam"),
    "beam with prompt_logprobs": (NOT_ALONE | {"prompt_logprobs": 1}, "prompt_logprobs", "left out beside beam"),
} | {
    f"beam with {name}": (NOT_ALONE | {"sampling": {name: value}}, f"sampling.{name}", "left out beside beam")
    for name, value in (
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("seed", 1),
        ("sample_index", 1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
    )
}


def numbered(request: int, most: int) -> Iterator[tuple[int, int, str]]:
    for index in range(most):
        yield request + index, index, TEXTS[index % len(TEXTS)]


def sampling(tokenizer: Tokenizer, logprob: float | None = None, stop_logprob: float | None = None) -> Script:
    """A script that answers each sample with a text of its own, a token of each a message; samples end at any time.

    With a logprob each token of sample i has it times i + 1.
    """

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Cancel):
            engine.send(Finished(message.request, Ending.CANCELLED, used(99)))
        if not isinstance(message, Submit):
            return
        samples = [
            (number, index, tokenizer.encode(text)) for number, index, text in numbered(message.request, message.n)
        ]
        for step in zip_longest(*(ids for _, _, ids in samples)):
            some = [(sample, token) for sample, token in zip(samples, step, strict=True) if token is not None]
            if logprob is None:
                engine.send(Tokens([(number, [token]) for (number, _, _), token in some]))
            else:
                engine.send(ScoredTokens([(n, [said(token, logprob * (at + 1))]) for (n, at, _), token in some]))
        for number, index, ids in reversed(samples):
            ending = Ending.MAX_TOKENS if index % 2 else Ending.END_OF_SEQUENCE
            engine.send(Finished(number, ending, used(len(ids), index / 2, index), stop_logprob=stop_logprob))

    return script


def said(token: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, [], [])


def used(generated: int, decode_s: float = 1.5, preemptions: int = 0) -> Used:
    return Used(3, 2, generated, 0.25, 0.5, decode_s, preemptions)


def texts(events: list[pb.GenerateResponse]) -> dict[int, str]:
    """The text of each continuation. Each has one finished, behind its tokens, and the last of all has the usage."""
    found: dict[int, str] = {}
    done: set[int] = set()
    assert events[0].HasField("started")
    for event in events[1:]:
        if event.HasField("tokens"):
            assert event.tokens.index not in done
            found[event.tokens.index] = found.get(event.tokens.index, "") + event.tokens.text
        elif event.HasField("finished"):
            assert event.finished.index not in done
            done.add(event.finished.index)
            assert event.finished.HasField("usage") == (event is events[-1])
            found.setdefault(event.finished.index, "")
    assert set(found) == done == set(range(events[0].started.num_continuations))
    return found


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_by_field_with_the_way_out(tmp_path: Path, folder: Path, case: str) -> None:
    fields, field, words = BAD[case]
    async with world(tmp_path, folder) as here:
        error = await failure(here.stub.Generate(text_request(**fields)))
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
    assert words in error.message


async def test_a_plain_request_is_one_sample_and_one_continuation(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "fine")) as here:
        for fields in ({}, {"n": 1}):
            events = await rest(here.stub.Generate(text_request(**fields)))
            assert texts(events) == {0: "fine"}
            asked = await here.engine.expect(Submit)
            assert (asked.n, asked.beam, asked.logprobs) == (1, None, None)
            assert not events[-1].finished.HasField("score")


async def test_samples_come_as_they_are_drawn_each_with_its_index_and_its_end(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder, sampling(tokenizer)) as here:
        events = await rest(here.stub.Generate(text_request(n=3, max_tokens=9)))
        assert (await here.engine.expect(Submit)).n == 3
        again = await rest(here.stub.Generate(text_request(n=3)))
    assert texts(events) == texts(again) == dict(enumerate(TEXTS))
    ends = {each.finished.index: each.finished for each in events if each.HasField("finished")}
    assert [ends[index].reason for index in range(3)] == [
        pb.FINISH_REASON_END_OF_SEQUENCE,
        pb.FINISH_REASON_MAX_TOKENS,
        pb.FINISH_REASON_END_OF_SEQUENCE,
    ]
    usage = events[-1].finished.usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (3, 2)
    assert usage.generated_tokens == sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert usage.decode_time.ToMilliseconds() == 1000, "that of the last to end"
    assert usage.preemptions == 0 + 1 + 2, "those of each"


async def test_a_stop_text_ends_one_sample_and_not_the_others(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            first, second = message.request, message.request + 1
            engine.send(Tokens([(first, tokenizer.encode("go STOP on")), (second, tokenizer.encode("never"))]))
        elif isinstance(message, Cancel):
            engine.send(Tokens([(message.request + 1, tokenizer.encode(" mind"))]))
            engine.send(Finished(message.request, Ending.CANCELLED, used(99)))
            engine.send(Finished(message.request + 1, Ending.MAX_TOKENS, used(2)))

    async with world(tmp_path, folder, script) as here:
        events = await rest(here.stub.Generate(text_request(n=2, stop=["STOP"])))
        cancelled = await here.engine.expect(Cancel)
        assert here.engine.heard.empty(), "one cancellation, of the first sample"
    assert texts(events) == {0: "go ", 1: "never mind"}
    ends = {each.finished.index: each.finished for each in events if each.HasField("finished")}
    assert (ends[0].stop_text, ends[0].reason) == ("STOP", pb.FINISH_REASON_STOP)
    assert cancelled.request % 2 == 1


async def test_leaving_cancels_every_sample(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(Tokens([(message.request + 2, tokenizer.encode("x"))]))

    async with world(tmp_path, folder, script) as here:
        call = here.stub.Generate(text_request(n=4))
        while not (await call.read()).HasField("tokens"):
            pass
        call.cancel()
        first = (await here.engine.expect(Submit)).request
        assert {(await here.engine.expect(Cancel)).request for _ in range(4)} == set(range(first, first + 4))


async def test_what_fails_one_sample_fails_the_request(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(Tokens([(message.request, tokenizer.encode("x"))]))
            engine.send(Failed(message.request + 1, "ENGINE_FAILED", "a step failed"))

    async with world(tmp_path, folder, script) as here:
        error = await failure(here.stub.Generate(text_request(n=2)))
        assert error.reason is Reason.ENGINE_FAILED
        assert (await here.engine.expect(Cancel)).request == 1, "the sample that had not failed"


@pytest.mark.parametrize("scored", [False, True])
async def test_the_best_come_at_the_end_best_first_by_logprob_per_token(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer, scored: bool
) -> None:
    wishes = {"logprobs": 0} if scored else {}
    async with world(tmp_path, folder, sampling(tokenizer, -0.5, stop_logprob=-9.0)) as here:
        events = await rest(here.stub.Generate(text_request(n=2, best_of=3, **wishes)))
        asked = await here.engine.expect(Submit)
    assert (asked.n, asked.logprobs) == (3, 0)
    sizes = [len(tokenizer.encode(text)) for text in TEXTS]
    means = [(-0.5 * (at + 1) * size - 9) / (size + 1) for at, size in enumerate(sizes)]
    order = sorted(range(3), key=lambda at: -means[at])[:2]
    assert texts(events) == {place: TEXTS[at] for place, at in enumerate(order)}
    assert [event.WhichOneof("event") for event in events] == ["started", *["tokens", "finished"] * 2]
    ends = [event.finished for event in events if event.HasField("finished")]
    assert [end.score for end in ends] == pytest.approx([means[at] for at in order])
    assert [len(event.tokens.logprobs) for event in events[1::2]] == [sizes[at] if scored else 0 for at in order]
    assert ends[-1].usage.generated_tokens == sum(sizes), "those of the sample that was thrown away too"


async def test_the_best_of_samples_that_a_stop_text_cut_and_of_long_ones_come_whole(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    long = tokenizer.encode("a longer text. ") * 400

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(PromptLogprobs(message.request, 1, [said(4, -1.0)]))
            engine.send(ScoredTokens([(message.request, [said(each, -2.0) for each in long])]))
            cut = [said(each, -1.0) for each in tokenizer.encode("cut STOP away")]
            engine.send(ScoredTokens([(message.request + 1, cut)]))
            engine.send(Finished(message.request, Ending.MAX_TOKENS, used(len(long))))
        elif isinstance(message, Cancel):
            engine.send(Finished(message.request, Ending.CANCELLED, used(99), stop_logprob=-50.0))

    async with world(tmp_path, folder, script) as here:
        wishes: dict[str, Any] = {"logprobs": 0, "prompt_logprobs": 0, "stop": ["STOP"]}
        events = await rest(here.stub.Generate(text_request(n=2, best_of=2, **wishes)))
    assert events[1].HasField("prompt_logprobs")
    assert texts([events[0], *events[2:]]) == {0: "cut ", 1: "a longer text. " * 400}
    scored = [each for event in events if event.HasField("tokens") for each in event.tokens.logprobs]
    assert [each.token_id for each in scored][-len(long) :] == long
    assert max(len(event.tokens.token_ids) for event in events if event.HasField("tokens")) <= 1024
    assert [event.finished.score for event in events if event.HasField("finished")] == pytest.approx([-1, -2])


async def test_beams_come_when_the_search_is_over_with_their_scores(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    found = [
        Hypothesis(tokenizer.encode("first wörld"), -0.25, Ending.END_OF_SEQUENCE, 0),
        Hypothesis([], -0.5, Ending.STOP_TOKEN, 7),
        Hypothesis(tokenizer.encode("third"), -2.5, Ending.MAX_TOKENS),
    ]

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(Hypotheses(message.request, found), Finished(message.request, Ending.END_OF_SEQUENCE, used(40)))

    beam = {"width": 4, "length_penalty": 0.0, "early_stopping": "EARLY_STOPPING_NEVER", "num_return_sequences": 3}
    async with world(tmp_path, folder, script) as here:
        events = await rest(here.stub.Generate(text_request(beam=beam, sampling={"temperature": 0}, n=1)))
        asked = await here.engine.expect(Submit)
    assert (asked.beam, asked.n) == (Beam(4, 0.0, EarlyStopping.NEVER, 3), 1)
    assert texts(events) == {0: "first wörld", 1: "", 2: "third"}
    ends = [event.finished for event in events if event.HasField("finished")]
    assert [end.score for end in ends] == [-0.25, -0.5, -2.5]
    assert [end.reason for end in ends] == [
        pb.FINISH_REASON_END_OF_SEQUENCE,
        pb.FINISH_REASON_STOP,
        pb.FINISH_REASON_MAX_TOKENS,
    ]
    assert [end.stop_token_id for end in ends[:2]] == [0, 7]
    assert ends[-1].usage.generated_tokens == 40


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (Failed(1, "ENGINE_FAILED", "a step failed"), Reason.ENGINE_FAILED),
        (Finished(1, Ending.CANCELLED, used(0)), Reason.DRAINING),
    ],
)
async def test_a_search_that_fails_says_so(
    tmp_path: Path, folder: Path, end: Failed | Finished, reason: Reason
) -> None:
    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(end)

    async with world(tmp_path, folder, script) as here:
        async with asyncio.timeout(10):
            error: PagepoolError = await failure(here.stub.Generate(text_request(beam={"width": 2})))
    assert error.reason is reason
