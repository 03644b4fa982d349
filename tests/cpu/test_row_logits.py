"""Penalties, bias and logprobs on many rows at once, in torch: what the CPU engine says of each row alone."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from inferd.adjust import adjusted
from inferd.core.history import Extras
from inferd.core.messages import Adjustments, Sampling, TokenLogprobs
from inferd.core.ports import StepInput, Target
from inferd.logprobs import Scores, logprobs_of, score
from inferd.model import cuda_logits
from inferd.model.cuda_steps import short_first
from inferd.model.row_adjust import adjust_
from inferd.model.row_logprobs import likeliest, packed_logprobs, unpacked
from inferd.model.upload import upload
from inferd.sampler import Row, sample
from tests.cpu.logits_work import sampled_work
from tests.cpu.test_adjust import SETTINGS, extras, histories
from tests.cpu.test_sampler import logits_of

CPU = torch.device("cpu")
HOWS = [*SETTINGS.values(), None]


def rows_of(count: int, vocab: int, scale: float = 5.0, step: float = 0.0) -> torch.Tensor:
    return torch.cat([logits_of(vocab, seed, scale, step) for seed in range(count)])


def some_extras(count: int, vocab: int) -> list[Extras]:
    """Rows with every setting in turn; some only ask for logprobs."""
    return [
        extras(HOWS[index % len(HOWS)], prompt, generated, logprobs=index % 4)
        for index, (prompt, generated) in enumerate(histories(count, vocab))
    ]


# -- adjustments


@pytest.mark.parametrize("step", [0.0, 0.5])
@pytest.mark.parametrize("vocab", [60, 700])
def test_each_row_becomes_bit_for_bit_what_it_becomes_alone(vocab: int, step: float) -> None:
    logits, asked = rows_of(40, vocab, step=step), some_extras(40, vocab)
    logits[3, ::2] = -torch.inf
    logits[4] = -logits[4].abs()
    wanted = np.stack([adjusted(row, each) for row, each in zip(logits.numpy(), asked, strict=True)])
    scores = logits.clone()
    adjust_(scores, asked)
    assert np.array_equal(scores.numpy().view(np.int32), wanted.view(np.int32))
    assert not torch.equal(scores, logits)


def test_ids_without_a_logit_are_passed_over() -> None:
    how = Adjustments([1, 2, 9], [50.0, 1.0, 5.0], 1.5, 0.5, 0.5)
    logits = torch.tensor([[1.0, -torch.inf, 3.0]] * 2)
    asked = extras(how, [1, 2, 7], [1, 8])
    wanted = adjusted(logits.numpy()[0].copy(), asked)
    adjust_(logits, [asked, asked])
    assert logits.tolist() == [wanted.tolist()] * 2


def test_a_history_may_grow_as_soon_as_it_was_read() -> None:
    asked = extras(SETTINGS["all"], [1, 2], [3])
    adjust_(torch.zeros(1, 60), [asked])
    assert asked.history is not None
    asked.history.add(59)


def test_arrays_arrive_by_name_whatever_their_sizes() -> None:
    given = {
        "a": np.arange(5, dtype=np.int32),
        "none": np.empty(0, np.float32),
        "b": np.array([1 << 40, -1], np.int64),
        "c": np.array([0.5], np.float32),
    }
    there = upload(CPU, **given)
    assert {name: tensor.tolist() for name, tensor in there.items()} == {n: a.tolist() for n, a in given.items()}
    assert all(tensor.data_ptr() % 16 == 0 for tensor in there.values())


# -- logprobs


def expect_equal(found: TokenLogprobs | None, wanted: TokenLogprobs | None) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert (found.token_id, found.top_token_ids) == (wanted.token_id, wanted.top_token_ids)
        assert found.logprob == pytest.approx(wanted.logprob, abs=2e-6)
        np.testing.assert_allclose(found.top_logprobs, wanted.top_logprobs, rtol=0, atol=2e-6)


def packed(logits: torch.Tensor, tokens: list[int], tops: list[int]) -> list[TokenLogprobs | None]:
    found = packed_logprobs(logits, torch.tensor(tokens), max(tops))
    assert found.shape == (len(tokens), 2 + 2 * min(max(tops), logits.shape[1]))
    return unpacked(found.tolist(), tops)


@pytest.mark.parametrize(("scale", "step"), [(0.1, 0.0), (3.0, 0.5), (40.0, 0.0), (3.0, 3.0)])
@pytest.mark.parametrize("vocab", [1, 2, 60, 49152])
def test_logprobs_are_those_of_each_row_alone(vocab: int, scale: float, step: float) -> None:
    """Tied logits too: steps of 3 leave few values, among them 0 and -0."""
    count = 12
    logits = rows_of(count, vocab, scale, step) + 1000.0 * torch.arange(count)[:, None] * (step == 0)
    chooser = random.Random(1)
    tokens = [chooser.randrange(vocab) for _ in range(count)]
    tops = [index % 7 if index else 40 for index in range(count)]
    for found, row, token, top in zip(packed(logits, tokens, tops), logits.numpy(), tokens, tops, strict=True):
        expect_equal(found, logprobs_of(row, token, top))


def test_of_equal_scores_the_lower_ids_come_first() -> None:
    scores = torch.tensor([[1.0, 3, 2, 3, 2, 2, 0], [0.0, -0.0, -1, 0, -torch.inf, -1, -0.0]])
    assert likeliest(scores, 6).tolist() == [[1, 3, 2, 4, 5, 0], [0, 1, 3, 6, 2, 5]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_have_none_and_change_no_others(bad: float) -> None:
    logits = rows_of(3, 60)
    logits[1, slice(None) if bad < 0 else 5] = bad
    first, second, third = packed(logits, [4, 4, -1], [2, 2, 2])
    expect_equal(first, logprobs_of(logits[0].numpy(), 4, 2))
    assert second is None
    assert third is None, "no token was sampled"


def test_what_has_no_logit_has_minus_infinity_and_what_is_ruled_out_is_not_listed() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]] * 3)
    for found, token in zip(packed(logits, [1, 3, 2], [3, 3, 3]), [1, 3, 2], strict=True):
        assert found is not None
        expect_equal(found, logprobs_of(logits[0].numpy(), token, 3))
        assert found.top_token_ids == [0, 2]
        assert (found.logprob == -math.inf) == (token != 2)


# -- all of it, behind a step

SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(seed=1),
    Sampling(seed=2, temperature=1.7, top_k=30),
    Sampling(seed=3, top_p=0.9),
]


def mixed_rows(count: int, vocab: int) -> list[Row]:
    asked = [None if index % 5 == 4 else each for index, each in enumerate(some_extras(count, vocab))]
    return [Row(SAMPLINGS[index % len(SAMPLINGS)], 3 * index, each) for index, each in enumerate(asked)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_tokens_and_logprobs_of_a_step_are_those_of_the_cpu_engine(
    at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, most, count = 300, 50, 41
    monkeypatch.setattr(cuda_logits, "SLICE", at_once * vocab)
    rows = mixed_rows(count, vocab)
    targets = [Target(0, 7 * index % vocab, index % 3) for index in range(20)]
    # Rows that no sequence has lie between those of sequences and those of targets.
    logits = rows_of(most + len(targets), vocab).to(dtype)
    given = logits.clone()
    work, tokens, sampler = sampled_work(logits, rows, most)
    asked = work.launch(logits, rows, targets)
    values = logits.float()
    expected = sample(values[:count], rows)
    assert tokens[:count].tolist() == expected
    assert tokens[count:].tolist() == [-7] * (most - count)
    assert torch.equal(logits, given), "the logits themselves stay as they are"
    assert max(sampler.calls) <= at_once
    wanted = score(torch.cat([values[:count], values[most:]]), targets, rows, expected)
    assert asked is not None
    assert wanted is not None
    found = asked.scores()
    assert [each is None for each in found.sampled] == [row.extras is None for row in rows]
    for ours, theirs in zip(found.sampled + found.prompt, wanted.sampled + wanted.prompt, strict=True):
        expect_equal(ours, theirs)


def test_rows_and_targets_that_are_not_finite_say_so() -> None:
    logits = rows_of(6, 60)
    logits[1, 3] = torch.nan
    logits[5] = -torch.inf
    rows = [Row(Sampling(), 1, extras(SETTINGS["all"], [1], logprobs=1))] * 2
    work, tokens, _ = sampled_work(logits, rows, 4)
    asked = work.launch(logits, rows, [Target(9, 2, 1), Target(10, 2, 1)])
    assert asked is not None
    assert tokens[1] == -1
    assert [each is None for each in asked.scores().sampled + asked.scores().prompt] == [False, True, False, True]


def test_what_asks_for_no_logprobs_brings_none_to_the_host() -> None:
    logits, plain = rows_of(3, 60), Row(Sampling(seed=1), 4)
    rows = [plain, plain._replace(extras=extras(SETTINGS["bias"], [1])), plain]
    work, tokens, sampler = sampled_work(logits, rows, 4)
    assert work.launch(logits, rows, []) is None
    assert sampler.calls == [1]
    assert tokens[:3].tolist() == sample(logits, rows)
    prompt_only = plain._replace(extras=extras(None, [1], prompt_logprobs=2))
    assert work.launch(logits, [prompt_only], []) is None
    assert sampler.calls == [1]


def test_targets_alone_are_scored() -> None:
    logits = rows_of(5, 60)
    work, _, sampler = sampled_work(logits, [], 4)
    asked = work.launch(logits, [], [Target(3, 11, 2)])
    assert asked is not None
    assert not sampler.calls
    assert asked.scores() == Scores([], asked.scores().prompt)
    expect_equal(asked.scores().prompt[0], logprobs_of(logits[4].numpy(), 11, 2))


def test_warming_up_works_on_as_many_rows_and_targets_as_a_step_may_have() -> None:
    work, _, sampler = sampled_work(rows_of(9, 60), [], 6)
    work.warm_up(rows_of(9, 60), 6, 3)
    assert sampler.calls == [6]


# -- steps with long chunks


def test_targets_move_with_their_tokens_when_short_sequences_go_first() -> None:
    step = StepInput(
        token_ids=[10, 11, 12, 20, 30, 31, 32],
        positions=[0, 1, 2, 5, 0, 1, 2],
        slots=[0, 1, 2, 3, 4, 5, 6],
        q_lens=[3, 1, 3],
        kv_lens=[3, 6, 3],
        tables=[[1], [2], [3]],
        logit_rows=[2, 3, 6],
        targets=[Target(0, 11, 1), Target(5, 32, 0)],
    )
    moved = short_first(step, 2)
    assert moved.q_lens == [1, 3, 3]
    assert [moved.token_ids[row] for row in moved.logit_rows] == [12, 20, 32]
    assert [(moved.token_ids[each.row], each.token_id, each.top) for each in moved.targets] == [
        (10, 11, 1),
        (31, 32, 0),
    ]
    assert short_first(step, 3) is step
