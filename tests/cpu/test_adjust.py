"""Logit bias and penalties: as transformers and OpenAI define them, alone and in any batch."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inferd.adjust import adjusted
from inferd.core.history import Extras
from inferd.core.messages import Adjustments, Sampling, Submit
from inferd.sampler import Row, sample
from tests.cpu.test_sampler import assert_distributed, logits_of

V = 60
BIAS = Adjustments(bias_token_ids=[3, 7, 41], biases=[2.5, -100.0, 0.75])
SETTINGS = {
    "bias": BIAS,
    "repetition": Adjustments(repetition_penalty=1.3),
    "repetition below 1": Adjustments(repetition_penalty=0.6),
    "presence": Adjustments(presence_penalty=1.1),
    "frequency": Adjustments(frequency_penalty=0.4),
    "negative": Adjustments(presence_penalty=-0.7, frequency_penalty=-0.3),
    "all": replace(BIAS, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25),
}


def extras(how: Adjustments | None, prompt: list[int], generated: list[int] = [], **asked: int) -> Extras:  # noqa: B006
    found = Extras.of(Submit(1, prompt, 9, adjustments=how, **asked))
    assert found is not None
    for token in generated if found.history else ():
        found.history.add(token)
    return found


def reference(logits: torch.Tensor, how: Adjustments, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """transformers' processors in its order, then the formula that OpenAI documents, in float64."""
    steps = LogitsProcessorList()
    if how.bias_token_ids:
        pairs = zip(how.bias_token_ids, how.biases, strict=True)
        steps.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in pairs}))
    if how.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    scores = steps(torch.tensor([prompt + generated]), logits).double()
    for token in range(logits.shape[1]):
        count = generated.count(token)
        scores[0, token] -= count * how.frequency_penalty + (how.presence_penalty if count else 0.0)
    return scores


def histories(count: int, vocab: int = V) -> list[tuple[list[int], list[int]]]:
    chooser = random.Random(5)
    return [
        (
            [chooser.randrange(vocab) for _ in range(chooser.choice([1, 4, 90]))],
            [chooser.randrange(vocab) for _ in range(chooser.choice([0, 1, 70]))],
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_logits_become_what_transformers_and_openai_make_of_them(how: Adjustments) -> None:
    for seed, (prompt, generated) in enumerate(histories(20)):
        logits = logits_of(V, seed, scale=5.0)
        given = logits.clone()
        scores = adjusted(logits.numpy()[0], extras(how, prompt, generated))
        expected = reference(logits, how, prompt, generated)
        np.testing.assert_allclose(scores, expected.numpy()[0], rtol=3e-7, atol=2e-6)
        assert (scores != given.numpy()[0]).any() or not (how.bias_token_ids or how.repetition_penalty != 1)
        assert torch.equal(logits, given), "the logits themselves stay as they are"


def test_repetition_counts_the_prompt_and_presence_and_frequency_do_not() -> None:
    logits = torch.full((1, 4), 2.0)
    prompt, generated = [0, 0, 1], [1, 2, 2]
    repetition = adjusted(logits.numpy()[0], extras(Adjustments(repetition_penalty=2.0), prompt, generated))
    assert repetition.tolist() == [1.0, 1.0, 1.0, 2.0], "once, however often it is there"
    presence = adjusted(logits.numpy()[0], extras(Adjustments(presence_penalty=0.5), prompt, generated))
    assert presence.tolist() == [2.0, 1.5, 1.5, 2.0]
    frequency = adjusted(logits.numpy()[0], extras(Adjustments(frequency_penalty=0.5), prompt, generated))
    assert frequency.tolist() == [2.0, 1.5, 1.0, 2.0]


def test_tokens_without_a_logit_are_passed_over_and_minus_infinity_stays() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 3.0]])
    how = Adjustments([1, 2, 9], [50.0, 1.0, 5.0], 1.5, 0.5, 0.5)
    scores = adjusted(logits.numpy()[0], extras(how, [1, 2, 7], [1, 8]))
    assert scores.tolist() == pytest.approx([1.0, -np.inf, 4.0 / 1.5])


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_greedy_takes_the_likeliest_of_the_adjusted_logits(how: Adjustments) -> None:
    changed = 0
    for seed, (prompt, generated) in enumerate(histories(40)):
        logits = logits_of(V, seed, scale=1.0)
        row = Row(Sampling(temperature=0), 7, extras(how, prompt, generated))
        expected = reference(logits, how, prompt, generated)[0]
        (token,) = sample(logits, [row])
        assert expected[token] == pytest.approx(float(expected.max()), abs=1e-5)
        changed += token != int(logits.argmax())
    assert changed > 0


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.6, top_k=30, top_p=0.9)], ids=["plain", "cut"])
def test_draws_follow_the_distribution_of_the_adjusted_logits(how: Adjustments, sampling: Sampling) -> None:
    prompt, generated = histories(3)[2]
    logits, asked = logits_of(V, scale=1.5), extras(how, prompt, generated[:20])
    rows = [Row(sampling, position, asked) for position in range(6000)]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers += [TopKLogitsWarper(sampling.top_k), TopPLogitsWarper(sampling.top_p)]
    scores = warpers(torch.tensor([[0]]), reference(logits, how, prompt, generated[:20]).float())
    tokens = sample(logits.expand(len(rows), -1).contiguous(), rows)
    assert_distributed(tokens, scores.double().softmax(-1)[0])


def test_a_row_gets_the_same_token_alone_and_beside_rows_of_any_settings() -> None:
    settings = [None, *SETTINGS.values()]
    rows, logits = [], torch.cat([logits_of(700, seed) for seed in range(48)])
    for index, (prompt, generated) in enumerate(histories(48, 700)):
        how = settings[index % len(settings)]
        sampling = Sampling(temperature=(index % 3) * 0.7, seed=index, top_k=(index % 2) * 50)
        asked = extras(how, prompt, generated, logprobs=2) if how or index % 5 else None
        rows.append(Row(sampling, 3 * index, asked))
    given = logits.clone()
    together = sample(logits, rows)
    assert together == [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])
    plain = [index for index, row in enumerate(rows) if row.extras is None or row.extras.adjustments is None]
    without = sample(logits, [row._replace(extras=None) for row in rows])
    assert [together[index] for index in plain] == [without[index] for index in plain]
    assert together != without
    assert torch.equal(logits, given)


def test_adjustments_give_no_token_where_the_logits_are_not_finite() -> None:
    logits = torch.stack([torch.full((V,), torch.nan), torch.full((V,), torch.inf), logits_of(V)[0]])
    asked = extras(SETTINGS["all"], [1, 2], [3])
    tokens = sample(logits, [Row(Sampling(), 1, asked)] * 3)
    assert tokens[:2] == [-1, -1]
    assert tokens[2] >= 0


def test_a_history_is_what_counting_gives() -> None:
    for prompt, generated in histories(30):
        history = extras(SETTINGS["all"], prompt, generated).history
        assert history is not None
        assert list(history.token_ids) == list(dict.fromkeys(prompt + generated))
        assert list(history.counts) == [generated.count(token) for token in history.token_ids]


def test_a_request_that_asks_for_nothing_has_no_extras_and_one_without_penalties_no_history() -> None:
    assert Extras.of(Submit(1, [1], 2)) is None
    assert extras(BIAS, [1]).history is None
    assert extras(None, [1], logprobs=0).history is None
