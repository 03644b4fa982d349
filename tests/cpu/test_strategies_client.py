"""Several continuations of one prompt, as the Python clients and the command show them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagepool.errors import PagepoolError
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.inferd.v1 import generation_service_pb2_grpc as inferd_grpc
from pagepool_client import AsyncInferenceClient, InferenceClient
from pagepool_client.prompts import generate_request
from tests.cpu.cli_rig import Start, default_signals, served, start

__all__ = ["default_signals", "start"]


class Sampler(inferd_grpc.GenerationServiceServicer):
    """Continues with the words of the prompt, one for each continuation, a letter of each in turn."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []

    def Generate(self, request: Any, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802 gRPC's name
        self.requests.append(request)
        words = request.text.text.split()
        yield pb.GenerateResponse(started=pb.GenerateStarted(request_id="r", num_continuations=len(words)))
        yield pb.GenerateResponse(prompt_logprobs=pb.GeneratePromptLogprobs(first_position=1, logprobs=[{}]))
        longest = max(map(len, words))
        for at in range(longest + 1):
            for index, word in enumerate(words):
                if at < len(word):
                    tokens = pb.GenerateTokens(
                        text=word[at], token_ids=[index], logprobs=[{"logprob": -1}], index=index
                    )
                    yield pb.GenerateResponse(tokens=tokens)
                elif at == len(word):
                    last = at == longest and index == max(i for i, each in enumerate(words) if len(each) == longest)
                    finished = pb.GenerateFinished(reason=pb.FINISH_REASON_MAX_TOKENS, index=index, score=-index / 2)
                    if last:
                        finished.usage.generated_tokens = sum(map(len, words))
                    yield pb.GenerateResponse(finished=finished)


@pytest.fixture
def inferd(tmp_path: Path) -> Iterator[Sampler]:
    with served(Sampler(), tmp_path) as servicer:
        yield servicer


def expect(generation: Any, words: list[str]) -> None:
    found = generation.continuations
    assert [each.text for each in found] == words
    assert [each.index for each in found] == list(range(len(words)))
    assert [each.token_ids for each in found] == [[index] * len(word) for index, word in enumerate(words)]
    assert [len(each.logprobs) for each in found] == list(map(len, words))
    assert [each.finished.score for each in found] == [-index / 2 for index in range(len(words))]
    assert len(generation.prompt_logprobs) == 1
    assert generation.started.num_continuations == len(words)
    assert generation.finished.usage.generated_tokens == sum(map(len, words))


def test_a_client_has_every_continuation_by_its_index(inferd: Sampler, tmp_path: Path) -> None:
    with InferenceClient(f"unix:{tmp_path / 'inferd.sock'}") as client:
        generation = client.generate("one three four", n=3)
        assert generation.all() == generation.continuations
        expect(generation, ["one", "three", "four"])
        first = client.generate("one three four", best_of=4, n=3)
        assert first.text() == "one", "the first continuation is the best"
        expect(first, ["one", "three", "four"])
    assert (inferd.requests[0].n, inferd.requests[1].best_of) == (3, 4)


async def test_so_has_an_async_client(inferd: Sampler, tmp_path: Path) -> None:
    async with AsyncInferenceClient(f"unix:{tmp_path / 'inferd.sock'}") as client:
        generation = client.generate("one three four", n=3)
        assert await generation.all() == generation.continuations
        expect(generation, ["one", "three", "four"])
        first = client.generate("one three four", n=3)
        assert await first.text() == "one"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"width": 3}, pb.BeamSearch(width=3)),
        ({"width": 3, "early_stopping": False}, pb.BeamSearch(width=3, early_stopping=pb.EARLY_STOPPING_HEURISTIC)),
        ({"width": 3, "early_stopping": True}, pb.BeamSearch(width=3, early_stopping=pb.EARLY_STOPPING_FULL)),
        (
            {"width": 3, "early_stopping": "never", "length_penalty": 0.0, "num_return_sequences": 2},
            pb.BeamSearch(width=3, early_stopping="EARLY_STOPPING_NEVER", length_penalty=0, num_return_sequences=2),
        ),
        (pb.BeamSearch(width=2), pb.BeamSearch(width=2)),
    ],
)
def test_a_beam_search_is_asked_for_in_the_words_of_transformers(given: Any, found: pb.BeamSearch) -> None:
    request = generate_request("x", None, None, {"beam": given})
    assert request.beam == found
    assert not generate_request("x", None, None, {}).HasField("beam")


@pytest.mark.parametrize(
    ("beam", "field"),
    [
        ({"width": -1}, "beam"),
        ({"width": 2, "breadth": 3}, "beam"),
        ({"width": 2, "early_stopping": 1}, "beam.early_stopping"),
        ({"width": 2, "early_stopping": "always"}, "beam.early_stopping"),
    ],
)
def test_a_beam_search_that_is_none_is_refused_by_field(beam: Any, field: str) -> None:
    with pytest.raises(PagepoolError) as caught:
        generate_request("x", None, None, {"beam": beam})
    assert caught.value.field == field


def test_the_command_shows_each_continuation_when_it_is_complete(inferd: Sampler, start: Start) -> None:
    out, err = start("generate", "three one four", "--n", "3", "--best-of", "5").communicate(timeout=30)
    assert out.splitlines() == ["one", "four", "three"]
    assert [line for line in err.splitlines() if line.startswith("continuation")] == [
        "continuation 1, score -0.5000:",
        "continuation 2, score -1.0000:",
        "continuation 0, score 0.0000:",
    ]
    assert "12 generated" in err
    assert (inferd.requests[0].n, inferd.requests[0].best_of) == (3, 5)


def test_the_command_passes_a_beam_search_on(inferd: Sampler, start: Start) -> None:
    flags = ["--beam-width", "4", "--length-penalty", "1.5", "--early-stopping", "full", "--num-return-sequences", "2"]
    out, _ = start("generate", "a b", *flags, "--json").communicate(timeout=30)
    beam = {"width": 4, "length_penalty": 1.5, "early_stopping": "EARLY_STOPPING_FULL", "num_return_sequences": 2}
    assert inferd.requests[0].beam == pb.BeamSearch(**beam)
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["finished"].get("index", 0) for event in events if "finished" in event] == [0, 1]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--length-penalty", "1"], "--length-penalty is given without --beam-width"),
        (["--early-stopping", "never"], "--early-stopping is given without --beam-width"),
        (["--early-stopping", "late", "--beam-width", "2"], "invalid choice: 'late'"),
        (["--n", "-1"], "n is -1"),
        (["--beam-width", "-1"], "beam is"),
    ],
)
def test_flags_that_do_not_fit_are_refused(inferd: Sampler, start: Start, flags: list[str], line: str) -> None:
    process = start("generate", "hi", *flags)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert line in err
    assert not inferd.requests
