"""What the sampler draws: the distribution of transformers' processors, and nothing that a batch mate could change."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inferd.core.messages import Sampling
from inferd.sampler import Row, _cut, sample

SETTINGS = {
    "plain": Sampling(),
    "cool": Sampling(temperature=0.4),
    "hot": Sampling(temperature=2.5),
    "top_k": Sampling(top_k=7),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.1),
    "together": Sampling(temperature=1.4, top_k=25, top_p=0.9, min_p=0.03),
}


def processed(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Probabilities as transformers' generate makes them, in its order."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(how.temperature)])
    if how.top_k:
        steps.append(TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        steps.append(TopPLogitsWarper(how.top_p))
    if how.min_p:
        steps.append(MinPLogitsWarper(how.min_p))
    return steps(torch.zeros(len(logits), 1, dtype=torch.long), logits).double().softmax(-1)


def logits_of(vocab: int, seed: int = 0, scale: float = 2.0, step: float = 0.0) -> torch.Tensor:
    drawn = scale * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    return (drawn / step).round() * step if step else drawn


def draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return sample(logits.expand(len(rows), -1).contiguous(), rows)


def assert_distributed(tokens: list[int], expected: torch.Tensor) -> None:
    """Chi-square over the tokens that can be expected often enough, the others taken together."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    wanted = expected.numpy() * len(tokens)
    assert counts[wanted == 0].sum() == 0, "a token was drawn that transformers would have removed"
    often = wanted >= 5
    observed, hoped = counts[often], wanted[often]
    if (rest := wanted[~often].sum()) >= 1:
        observed, hoped = np.append(observed, counts[~often].sum()), np.append(hoped, rest)
    assert stats.chisquare(observed, hoped * observed.sum() / hoped.sum()).pvalue > 1e-3


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("varied", ["position", "seed", "sample_index"])
def test_draws_follow_the_distribution_of_transformers(how: Sampling, varied: str) -> None:
    logits = logits_of(60)
    if varied == "position":
        rows = [Row(replace(how, seed=3), position) for position in range(6000)]
    else:
        rows = [Row(replace(how, **{varied: number}), 17) for number in range(6000)]
    assert_distributed(draw(logits, rows), processed(logits, how)[0])


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_every_seed_gives_a_stream_of_its_own_with_the_right_distribution(seed: int) -> None:
    logits = logits_of(60)
    rows = [Row(Sampling(seed=seed), position) for position in range(6000)]
    tokens = draw(logits, rows)
    assert_distributed(tokens, processed(logits, Sampling())[0])
    others = draw(logits, [Row(Sampling(seed=seed ^ 1), position) for position in range(6000)])
    agreeing = sum(a == b for a, b in zip(tokens, others, strict=True)) / 6000
    expected = float((processed(logits, Sampling())[0] ** 2).sum())
    assert agreeing == pytest.approx(expected, abs=0.03), "two seeds are not independent"


@pytest.mark.parametrize("other", [{"seed": 1}, {"sample_index": 1}])
def test_seed_and_sample_index_and_position_do_not_stand_in_for_each_other(other: dict[str, int]) -> None:
    logits = torch.zeros(1, 1 << 20)
    base, moved = Row(Sampling(), 0), Row(Sampling(), 1)
    (a, b, c) = draw(logits, [base, moved, Row(Sampling(**other), 0)])
    assert len({a, b, c}) == 3


def test_neighbouring_positions_are_independent() -> None:
    logits = torch.zeros(1, 4)
    tokens = draw(logits, [Row(Sampling(seed=11), position) for position in range(16001)])
    pairs = np.bincount([4 * a + b for a, b in itertools.pairwise(tokens)], minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_every_part_of_a_large_vocabulary_is_drawn_alike() -> None:
    tokens = draw(torch.zeros(1, 49152), [Row(Sampling(seed=5), position) for position in range(1000)])
    assert stats.chisquare(np.bincount(np.array(tokens) // 4096, minlength=12)).pvalue > 1e-3


@pytest.mark.parametrize("step", [0.0, 0.25, 2.0], ids=["no ties", "some ties", "mostly ties"])
@pytest.mark.parametrize("vocab", [1, 2, 33, 5000])
def test_what_is_kept_is_what_transformers_keeps(vocab: int, step: float) -> None:
    generator = np.random.default_rng(vocab)
    for trial in range(25):
        logits = logits_of(vocab, trial, scale=float(generator.choice([0.1, 1, 4])), step=step)
        how = Sampling(
            temperature=float(generator.choice([0.3, 1.0, 1.7])),
            top_k=int(generator.choice([0, 1, 5, 300, 10**6])),
            top_p=float(generator.choice([1.0, 0.97, 0.618, 0.0501])),
            min_p=float(generator.choice([0.0, 0.0123, 0.7])),
        )
        scores = (logits - logits.max()).numpy()[0] / np.float32(how.temperature)
        cut, edge = _cut(scores, how)
        kept = (scores > cut) | ((scores == np.float32(cut)) & (np.arange(vocab) >= edge))
        wanted = (processed(logits, how)[0] > 0).numpy()
        # Of equal tokens at the edge torch's sort may put any last, and its float32 sums decide how many.
        few = max(1, wanted.sum() // 500)
        assert abs(int(kept.sum()) - int(wanted.sum())) <= few, how
        least = min(kept.sum(), wanted.sum())
        assert (np.sort(scores[kept])[::-1][:least] == np.sort(scores[wanted])[::-1][:least]).all(), how


def test_a_row_gets_the_same_token_alone_and_in_any_batch() -> None:
    settings = [*SETTINGS.values(), Sampling(temperature=0)]
    rows = [Row(replace(settings[index % 8], seed=index), 5 * index) for index in range(40)]
    logits = torch.cat([logits_of(3000, seed) for seed in range(40)])
    together = sample(logits, rows)
    assert together == [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_noise_in_the_last_bits_of_the_logits_hardly_ever_changes_a_token() -> None:
    rows = [Row(Sampling(seed=index), 1) for index in range(500)]
    logits = torch.cat([logits_of(2000, seed) for seed in range(500)])
    nudged = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)))
    assert sample(logits, rows) == sample(nudged, rows)


# -- greedy, and the edges


def test_greedy_takes_the_lowest_of_equal_tokens_whatever_else_is_set() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]] * 2)
    how = Sampling(temperature=0, top_k=1, top_p=0.1, min_p=1.0, seed=9)
    assert sample(logits, [Row(how, 0), Row(Sampling(temperature=0), 3)]) == [1, 1] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_and_no_overflow(temperature: float) -> None:
    logits = torch.cat([logits_of(500, seed, scale=30) for seed in range(8)])
    rows = [Row(Sampling(temperature=temperature, top_p=0.9, top_k=50), position) for position in range(8)]
    assert sample(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_a_token_of_minus_infinity_is_never_drawn(how: Sampling) -> None:
    logits = torch.full((1, 40), -torch.inf)
    logits[0, [3, 17]] = 1.0
    tokens = set(draw(logits, [Row(how, position) for position in range(300)]))
    assert tokens == {3, 17}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token_and_leave_the_batch_alone(bad: float, temperature: float) -> None:
    logits = torch.cat([logits_of(40, 1), logits_of(40, 2)])
    logits[0, :] = bad
    rows = [Row(Sampling(temperature=temperature), 0)] * 2
    tokens = sample(logits, rows)
    assert tokens[0] == -1
    assert tokens[1] == sample(logits[1:], rows[1:])[0]
