"""Beam search beside transformers' generate, both on the same logits: every width, penalty and way of stopping."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from inferd.core.beam import BeamSearch, Hypothesis
from inferd.core.beam_values import Beam, EarlyStopping
from inferd.core.messages import Ending

VOCAB = 61
PROMPTS = [[5, 9, 33, 2, 48], [11], [7, 7, 7, 50, 21, 30, 60, 1, 18]]
STOPPING: dict[EarlyStopping, bool | str] = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.FULL: True,
    EarlyStopping.NEVER: "never",
}


@cache
def model() -> PreTrainedModel:
    """A model whose next tokens are spread over many, so that beams cross and end at all lengths."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.35,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).float().eval()


def theirs(prompt: list[int], most: int, how: Beam, ends: list[int]) -> list[tuple[list[int], float]]:
    """The sequences of transformers, without what comes behind an end token, and their scores."""
    asked: dict[str, Any] = {"eos_token_id": ends, "pad_token_id": VOCAB - 1} if ends else {}
    with torch.inference_mode():
        found = model().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=most,
            num_beams=how.width,
            length_penalty=how.length_penalty,
            early_stopping=STOPPING[how.early_stopping],
            num_return_sequences=how.num_return_sequences,
            return_dict_in_generate=True,
            output_scores=True,
            **asked,
        )
    scores = found.sequences_scores.tolist() if how.width > 1 else [None] * how.num_return_sequences
    return [
        (_cut(each[len(prompt) :], ends), score) for each, score in zip(found.sequences.tolist(), scores, strict=True)
    ]


def _cut(tokens: list[int], ends: list[int]) -> list[int]:
    first = next((at for at, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: first + 1]


def ours(prompt: list[int], most: int, how: Beam, ends: list[int]) -> tuple[list[Hypothesis], BeamSearch]:
    """The search on the logits of each beam, computed anew at every step."""
    search = BeamSearch(how, most, dict.fromkeys(ends, Ending.END_OF_SEQUENCE))
    beams = [prompt]
    while beams:
        with torch.inference_mode():
            logprobs = model()(torch.tensor(beams)).logits[:, -1].float().log_softmax(-1)
        top = logprobs.topk(min(search.num_candidates, VOCAB))
        rows = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        beams = [[*beams[each.parent], each.token] for each in search.advance(rows)]
        assert len(beams) <= how.width
    return search.best(), search


def whole(found: Hypothesis) -> list[int]:
    return found.tokens if found.stop_token_id is None else [*found.tokens, found.stop_token_id]


EVERY = [
    Beam(width, penalty, stopping, width)
    for width, penalty, stopping in product(range(1, 9), (0.6, 1.0, 1.4), (EarlyStopping.HEURISTIC, EarlyStopping.FULL))
] + [Beam(width, penalty, EarlyStopping.NEVER, 2) for width, penalty in product((2, 3, 8), (-0.5, 0.0, 1.0, 2.5))]
# Any two values of width, penalty and stopping that are 3 or 2 apart meet.
SOME = EVERY[::5]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ENDS = pytest.mark.parametrize("ends", [[], [9], [9, 55, 57, 24, 40]], ids=["none", "one", "five"])


@ENDS
def test_sequences_and_scores_are_those_of_transformers(ends: list[int]) -> None:
    assert (compare(SOME, ends) >= len(SOME) / 2) == bool(ends), "the case is not covered"


@pytest.mark.full
@ENDS
def test_sequences_and_scores_are_those_of_transformers_for_every_case(ends: list[int]) -> None:
    assert (compare(EVERY, ends) >= len(EVERY) / 2) == bool(ends), "the case is not covered"


def compare(cases: list[Beam], ends: list[int]) -> int:
    """Both on each case; how many continuations ended by an end token."""
    ended = 0
    for at, how in enumerate(cases):
        prompt, most = PROMPTS[at % 3], (12, 7)[at % 2]
        found, _ = ours(prompt, most, how, ends)
        expected = theirs(prompt, most, how, ends)
        assert [whole(each) for each in found] == [tokens for tokens, _ in expected], how
        if how.width > 1:  # with one beam transformers searches greedily and gives no score
            assert [each.score for each in found] == pytest.approx([score for _, score in expected], abs=1e-4), how
        ended += sum(each.ending is Ending.END_OF_SEQUENCE for each in found)
        assert all(each.stop_token_id is None or each.stop_token_id in ends for each in found)
    return ended


def rows_of(*rows: dict[int, float]) -> list[tuple[list[int], list[float]]]:
    return [(list(row), list(row.values())) for row in rows]


@pytest.mark.parametrize(
    ("stopping", "steps"), [(EarlyStopping.FULL, 2), (EarlyStopping.HEURISTIC, 3), (EarlyStopping.NEVER, 4)]
)
def test_the_search_stops_by_each_rule_when_it_says(stopping: EarlyStopping, steps: int) -> None:
    search = BeamSearch(Beam(2, 1.0, stopping, 2), 10, {0: Ending.STOP_TOKEN})
    turns = [
        rows_of({0: -0.5, 1: -0.6, 2: -3.0}),
        rows_of({1: -0.1, 0: -0.4, 2: -9.0}, {1: -6.0, 2: -7.0, 0: -9.0}),  # -0.5 twice; what runs has -0.7 / 2
        rows_of({1: -4.0, 2: -5.0, 0: -9.0}, {1: -6.0, 2: -7.0, 0: -9.0}),  # -4.7 / 3, but / 10 it may become better
        rows_of({1: -1.0, 2: -5.0, 0: -9.0}, {1: -6.0, 2: -7.0, 0: -9.0}),  # -5.7 / 10
    ]
    ran_on = [bool(search.advance(rows)) for rows in turns[:steps]]
    assert ran_on == [True] * (steps - 1) + [False]
    assert search.best() == [
        Hypothesis([], -0.5, Ending.STOP_TOKEN, 0),
        Hypothesis([1], -0.5, Ending.STOP_TOKEN, 0),
    ]


def test_a_beam_with_no_continuation_ends_the_search_with_what_it_has() -> None:
    search = BeamSearch(Beam(2, num_return_sequences=2), 5, {0: Ending.END_OF_SEQUENCE})
    assert search.advance(rows_of({0: -0.1})) == []
    assert search.best() == [Hypothesis([], -0.1, Ending.END_OF_SEQUENCE, 0)]
    assert search.generated == 1


def test_the_last_token_may_be_an_end_token_and_counts_in_the_length() -> None:
    search = BeamSearch(Beam(2, 2.0, num_return_sequences=2), 2, {0: Ending.END_OF_SEQUENCE})
    search.advance(rows_of({3: -0.5, 4: -1.5, 0: -8.0}))
    assert search.advance(rows_of({0: -0.5, 3: -2.0, 4: -2.5}, {4: -0.1, 0: -7.0, 3: -8.0})) == []
    assert search.best() == [
        Hypothesis([3], -1.0 / 4, Ending.END_OF_SEQUENCE, 0),
        Hypothesis([4, 4], -1.6 / 4, Ending.MAX_TOKENS),
    ]
