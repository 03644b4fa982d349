"""Logprobs: log-softmax of the model's own logits, for the tokens that requests ask about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inferd.core.messages import TokenLogprobs
from inferd.core.ports import Target
from inferd.sampler import Row

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scores:
    """What the rows of a step asked for beside tokens.

    sampled has an entry for each logit row, None where nothing was asked or no token was sampled. prompt has one for
    each of the step's targets, None where the logits are not finite.
    """

    sampled: list[TokenLogprobs | None]
    prompt: list[TokenLogprobs | None]


def score(logits: torch.Tensor, targets: Sequence[Target], rows: Sequence[Row], tokens: Sequence[int]) -> Scores | None:
    """The logprobs that a step's rows and targets ask for; None if they ask for nothing.

    logits is float32 [rows and then targets, vocab]; tokens are those sampled from the rows.
    """
    wanted = [row.extras is not None and row.extras.logprobs is not None for row in rows]
    if not targets and True not in wanted:
        return None
    values: Floats = logits.numpy()
    return Scores(
        [
            logprobs_of(values[index], tokens[index], row.extras.logprobs or 0) if row.extras and asks else None
            for index, (row, asks) in enumerate(zip(rows, wanted, strict=True))
        ],
        [logprobs_of(values[len(rows) + index], each.token_id, each.top) for index, each in enumerate(targets)],
    )


def logprobs_of(logits: Floats, token: int, top: int) -> TokenLogprobs | None:
    """The logprobs of one row [vocab]: of a token, and of the `top` likeliest, of equals the lower ids.

    None if there is no token (-1) or the logits have none: a NaN, or nothing finite. A token that the model embeds but
    has no logit for has -inf. Sums are in float64; the error is that of exp in float32, below 1e-6.
    """
    peak = logits.max()
    if token < 0 or not np.isfinite(peak):
        return None
    weight = float(np.exp(logits - peak).sum(dtype=np.float64))
    norm = float(peak) + math.log(weight)
    best = _likeliest(logits, top)
    mine = float(logits[token]) if token < len(logits) else -math.inf
    return TokenLogprobs(token, mine - norm, best.tolist(), (logits[best].astype(np.float64) - norm).tolist())


def _likeliest(logits: Floats, count: int) -> npt.NDArray[np.intp]:
    """The ids of the `count` largest finite logits, largest first, of equals the lower ids first."""
    count = min(count, len(logits))
    if not count:
        return np.empty(0, np.intp)
    edge = np.partition(logits, len(logits) - count)[len(logits) - count]
    # Of those that tie with the last one only the first few have a place.
    above = np.flatnonzero(logits > edge)
    found: npt.NDArray[np.intp] = np.concatenate([above, np.flatnonzero(logits == edge)[: count - len(above)]])
    found = found[np.isfinite(logits[found])]
    return found[np.argsort(-logits[found], kind="stable")]
