"""Logprobs of rows: log-softmax of the model's logits, whatever is done to them for sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferd.core.messages import Sampling, TokenLogprobs
from inferd.core.ports import Target
from inferd.logprobs import Scores, logprobs_of, score
from inferd.sampler import Row, sample
from tests.cpu.test_adjust import SETTINGS, extras
from tests.cpu.test_sampler import logits_of


def expect_logprobs(found: TokenLogprobs | None, logits: torch.Tensor, token: int, top: int) -> None:
    """As log_softmax in float64 has them."""
    assert found is not None
    wanted = logits.double().log_softmax(-1)
    assert found.token_id == token
    assert found.logprob == pytest.approx(float(wanted[token]), abs=1e-6)
    assert len(found.top_token_ids) == len(set(found.top_token_ids)) == len(found.top_logprobs) == top
    best = wanted.sort(descending=True).values[:top]
    np.testing.assert_allclose(found.top_logprobs, best.numpy(), atol=1e-6)
    np.testing.assert_allclose(found.top_logprobs, wanted[found.top_token_ids].numpy(), atol=1e-6)


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_log_softmax_of_the_logits(top: int, scale: float) -> None:
    for seed in range(5):
        logits = logits_of(49152, seed, scale)[0] + 1000 * seed
        token = int(logits.argmin() if seed else logits.argmax())
        expect_logprobs(logprobs_of(logits.numpy(), token, top), logits, token, top)


def test_of_equal_tokens_the_lower_ids_are_listed_first() -> None:
    logits = np.array([1, 3, 2, 3, 2, 2, 0], np.float32)
    for top, wanted in enumerate([[], [1], [1, 3], [1, 3, 2], [1, 3, 2, 4], [1, 3, 2, 4, 5]]):
        found = logprobs_of(logits, 0, top)
        assert found is not None
        assert found.top_token_ids == wanted


def test_a_small_vocabulary_and_minus_infinity_list_what_there_is() -> None:
    found = logprobs_of(np.array([0.0, -np.inf, 0.0], np.float32), 1, 20)
    assert found is not None
    assert found.top_token_ids == [0, 2]
    assert found.top_logprobs == pytest.approx([-np.log(2)] * 2)
    assert found.logprob == -np.inf


def test_a_token_that_the_model_has_no_logit_for_has_minus_infinity() -> None:
    found = logprobs_of(np.array([0.0, 1.0], np.float32), 2, 1)
    assert found is not None
    assert (found.logprob, found.top_token_ids) == (-np.inf, [1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_have_none(bad: float) -> None:
    logits = logits_of(30)
    logits[0, 5] = bad
    row = Row(Sampling(), 1, extras(None, [1], logprobs=3))
    if bad < 0:
        logits[:] = bad
    scores = score(logits.expand(2, -1), [Target(0, 3, 2)], [row], sample(logits, [row]))
    assert scores == Scores([None], [None])


def test_neither_settings_nor_batch_mates_change_the_logprobs_of_a_token() -> None:
    logits = logits_of(500, 4).expand(40, -1).contiguous()
    rows = []
    for index, how in enumerate([None, *SETTINGS.values()] * 5):
        sampling = Sampling(temperature=[0, 0.2, 1, 3][index % 4], top_k=index % 3, seed=index)
        asked = extras(how, [1, 2, 9], [4, 9], logprobs=6)
        rows.append(Row(sampling, index, asked))
    tokens = sample(logits, rows)
    scores = score(logits, [], rows, tokens)
    assert scores is not None
    assert len(set(tokens)) > 5
    for token, found in zip(tokens, scores.sampled, strict=True):
        expect_logprobs(found, logits[0], token, 6)
        assert found == logprobs_of(logits[0].numpy(), token, 6)


def test_each_row_and_target_gets_what_it_asked_for_and_the_others_nothing() -> None:
    logits = torch.cat([logits_of(90, seed) for seed in range(6)])
    plain = Row(Sampling(temperature=0), 1)
    rows = [
        plain,
        plain._replace(extras=extras(None, [1], logprobs=0)),
        plain,
        plain._replace(extras=extras(SETTINGS["all"], [1])),
    ]
    tokens = sample(logits[:4], rows)
    assert score(logits[:4], [], [plain] * 4, tokens) is None
    scores = score(logits, [Target(7, 11, 2), Target(8, 12, 0)], rows, tokens)
    assert scores is not None
    assert [found is None for found in scores.sampled] == [True, False, True, True]
    expect_logprobs(scores.sampled[1], logits[1], tokens[1], 0)
    expect_logprobs(scores.prompt[0], logits[4], 11, 2)
    expect_logprobs(scores.prompt[1], logits[5], 12, 0)
