"""Which token comes next: one row of logits in, one token id out, whatever else is in the batch.

What a request wants done to its logits is done first (inferd.adjust). Greedy then takes the likeliest token. Sampling
narrows the candidates as transformers' logits processors do and in their order (temperature, top_k, top_p, min_p), then
takes the largest of log-probability plus Gumbel noise (Gumbel-max: a sample of the softmax without a division or a
cumulative sum, so that a last-bit difference in the logits does not flip it). The noise of a token is a function of
(seed, sample index, position, token id) alone.

Hash: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with Stafford's
Mix13), a counter-based generator: output i of the stream that starts at s is mix(s + i * GAMMA).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch

from inferd.adjust import adjusted
from inferd.core.history import Extras
from inferd.core.messages import Sampling

Floats = npt.NDArray[np.float32]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)

# Scores fall into this many bins by their distance from the top, so that only one bin has to be sorted.
_BINS, _BINS_PER_NAT = 4096, 64.0
# The largest noise that 53 bits can give is below this; a token further behind can never win.
_MAX_NOISE = 38
_MIN_TEMPERATURE = 1e-30
_BOUND = np.exp(-np.arange(_MAX_NOISE, dtype=np.float64))


class Row(NamedTuple):
    """How one row of logits is sampled. `position` is that of the token to come in its sequence.

    `extras` is None for a request that asks for nothing of LOGITS_FIELDS; its history is that of the tokens before.
    """

    sampling: Sampling
    position: int
    extras: Extras | None = None


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The token id for each row of float32 [rows, vocab]; -1 where the logits hold a NaN or nothing finite.

    The logits stay as they are.
    """
    values: Floats = logits.numpy()
    tokens: list[int] = values.argmax(axis=1).tolist()  # torch's takes many times as long here
    for index, row in enumerate(rows):
        scores = values[index]
        top = scores[tokens[index]]
        if not np.isfinite(top):
            tokens[index] = -1
            continue
        if row.extras is not None:
            scores = adjusted(scores, row.extras)
            tokens[index] = int(scores.argmax())
            top = scores[tokens[index]]
        if row.sampling.temperature > 0:
            tokens[index] = _sample_row(scores - top, row)
    return tokens


def _sample_row(scores: Floats, row: Row) -> int:
    how = row.sampling
    with np.errstate(over="ignore"):  # far behind the top at a tiny temperature: -inf is what it is
        scores /= np.float32(max(how.temperature, _MIN_TEMPERATURE))
    key = (np.uint64(how.seed), np.uint64(how.sample_index), np.uint64(row.position))
    return int(_gumbel_max(scores, *_cut(scores, how), key))


def _cut(scores: Floats, how: Sampling) -> tuple[float, int]:
    """The last token that is kept, as (score, id): those with a higher score stay, and of its equals the higher ids.

    Scores are log-weights with the top at 0. As in transformers, top_k keeps all that tie with the k-th; top_p keeps a
    token while the share of those before it is below top_p; min_p compares with the top and so needs no order.
    """
    cut = (-np.inf, 0)
    if 0 < how.top_k < len(scores):
        cut = (_edge(scores, np.ones_like(scores), float(how.top_k))[0], 0)
    if how.top_p < 1:
        near = np.flatnonzero(scores >= cut[0])
        weights = np.exp(scores[near])
        score, index = _edge(scores[near], weights, how.top_p * float(weights.sum(dtype=np.float64)))
        cut = (score, int(near[index]))
    if how.min_p > 0:
        cut = max(cut, (float(np.log(how.min_p)), 0))
    return cut


@numba.njit(cache=True, inline="always")
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@numba.njit(cache=True)
def _stream(key):  # type: ignore[no-untyped-def]
    """The start of a row's stream; each word is mixed in before the next, so that no two keys share one by a sum."""
    seed, sample_index, position = key
    stream = _mix(seed + _GAMMA)
    stream = _mix((stream ^ sample_index) + _GAMMA)
    return _mix((stream ^ position) + _GAMMA)


@numba.njit(cache=True, inline="always")
def _uniform(stream, token):  # type: ignore[no-untyped-def]
    """A number strictly between 0 and 1, on the grid of odd multiples of 2**-54."""
    bits = _mix(stream + (np.uint64(token) + np.uint64(1)) * _GAMMA)
    return (np.float64(bits >> _S11) + 0.5) * 2.0**-53


@numba.njit(cache=True)
def _gumbel(uniform):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise; at most -log(uniform), since -log1p(-x) >= x."""
    return -np.log(-np.log1p(-uniform))


@numba.njit(cache=True, nogil=True)
def _gumbel_max(scores, cut, edge, key):  # type: ignore[no-untyped-def]
    """The kept token with the largest score plus noise.

    Logarithms are taken for few tokens only: noise is at most -log(uniform), so a token whose uniform number is above
    exp(-lag), with lag what it lacks to the best so far, cannot win; _BOUND holds that for whole lags, rounded down.
    """
    stream = _stream(key)
    best, winner = -np.inf, -1
    for token in range(scores.shape[0]):
        score = np.float64(scores[token])
        lag = best - score
        if lag >= _MAX_NOISE or score < cut or (score == cut and token < edge):
            continue
        uniform = _uniform(stream, token)
        if lag > 0 and uniform > _BOUND[int(lag)]:
            continue
        total = score + _gumbel(uniform)
        if total > best:
            best, winner = total, token
    return winner


@numba.njit(cache=True, nogil=True)
def _edge(scores, weights, target):  # type: ignore[no-untyped-def]
    """The (score, index) at which the sum of weights reaches `target`, from the top down; of equals the last is first.

    `target` is positive and at most that sum. Only the bin where it happens is sorted.
    """
    target *= 1 - 1e-9  # sums in another order differ in their last bits
    content = np.zeros(_BINS)
    for token in range(scores.shape[0]):
        content[_bin(scores[token])] += weights[token]
    reached, bin_ = 0.0, 0
    while bin_ < _BINS - 1 and reached + content[bin_] < target:
        reached += content[bin_]
        bin_ += 1
    while content[bin_] == 0:  # where rounding let it run past the last weight
        bin_ -= 1
    tokens = np.array([token for token in range(scores.shape[0]) if _bin(scores[token]) == bin_])
    edge = tokens[0]
    for index in np.argsort(scores[tokens], kind="mergesort")[::-1]:
        edge = tokens[index]
        reached += weights[edge]
        if reached >= target:
            break
    return np.float64(scores[edge]), edge


@numba.njit(cache=True, inline="always")
def _bin(score):  # type: ignore[no-untyped-def]
    """The bin of a score, by its distance from the top, 0."""
    return int(min(-score * _BINS_PER_NAT, _BINS - 1.0))
