"""Speculative decoding of the default model through real daemons: the same tokens, in fewer steps."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagepool.inferd.v1 import generation_service_pb2 as pb
from tests.e2e.workers import Worker

LINES = "The old clock struck seven, and nobody came. The door was open, the lamp was lit, the letter lay on the chair."


def copy_of(lines: str, sampling: dict[str, Any], **fields: Any) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", content=f"Repeat this text word for word, twice:\n\n{lines}")
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[message]),
        sampling=pb.SamplingParams(**sampling),
        max_tokens=48,
        ignore_eos=True,
        **fields,
    )


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.9, "seed": 5}])
def test_the_default_model_says_the_same_with_and_without_guesses(worker: Worker, sampling: dict[str, Any]) -> None:
    plain = worker.generate(copy_of(LINES, sampling))
    guessed = worker.generate(copy_of(LINES, sampling, speculate_tokens=8))
    assert (guessed.token_ids, guessed.text) == (plain.token_ids, plain.text)
    used = guessed.finished.usage
    assert 0 < used.accepted_tokens <= used.draft_tokens
    assert (plain.finished.usage.draft_tokens, plain.finished.usage.accepted_tokens) == (0, 0)


@pytest.mark.full
def test_guesses_right_save_steps_beside_others_too(worker: Worker) -> None:
    def steps() -> int:
        time.sleep(1.2)  # the engine tells its counters once a second
        return int(worker.stub().GetModel(pb.GetModelRequest()).counters.steps)

    requests = [copy_of(LINES[at:], {"temperature": 0}, logprobs=1) for at in (0, 9)]
    counts, tokens = [steps()], []
    for speculate_tokens in (0, 8):
        for request in requests:
            request.speculate_tokens = speculate_tokens
        with ThreadPoolExecutor(2) as pool:
            tokens.append([run.token_ids for run in pool.map(worker.generate, requests)])
        counts.append(steps())
    assert tokens[0] == tokens[1]
    assert counts[2] - counts[1] < counts[1] - counts[0]
