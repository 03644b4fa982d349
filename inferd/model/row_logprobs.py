"""Logprobs of many rows of logits at once, in torch, wherever the rows lie; inferd.logprobs says what they are.

What is found travels to the host as one array, in which a row is:

    token id, its logprob, the ids of the `count` likeliest, their logprobs

in float64, which holds ids exactly. A row without logprobs (a NaN among its logits, or nothing finite) has NaNs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from inferd.core.messages import TokenLogprobs

_LOW = (1 << 32) - 1


def packed_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """The rows of above, float64 [R, 2 + 2 * count], of logits [R, vocab] and tokens int64 [R].

    count is `top` or the whole vocabulary if that is less. A token of -1 is none; one that the model has no logit for
    has -inf. Sums are in float64: the error is that of exp in float32. Launches, and waits for nothing.
    """
    scores = logits.float()
    vocab = scores.shape[1]
    peak = scores.amax(-1, keepdim=True)
    norm = peak.double() + (scores - peak).exp_().sum(-1, keepdim=True, dtype=torch.float64).log()
    ids = likeliest(scores, min(top, vocab))
    mine = scores.gather(1, tokens.clamp(0, vocab - 1)[:, None]).double()
    mine = mine.masked_fill(tokens[:, None] >= vocab, -math.inf)
    best = scores.gather(1, ids).double()
    return torch.cat([tokens[:, None].double(), mine - norm, ids.double(), best - norm], 1)


def likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ids, int64 [R, count], of the largest of float32 scores [R, vocab], of equals the lower ids first.

    Of rows without a NaN. Score and id are made one integer, since torch says nothing about the order of equals.
    """
    if not count:
        return torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
    bits = (scores + 0.0).view(torch.int32)  # -0 and 0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(scores.shape[1], dtype=torch.int64, device=scores.device)
    keys = ordered.long().mul_(1 << 32).add_(_LOW - ids)
    return _LOW - (keys.topk(count, -1).values & _LOW)


def unpacked(rows: Sequence[Sequence[float]], tops: Sequence[int]) -> list[TokenLogprobs | None]:
    """What packed rows say to those that asked for so many of the likeliest; None for no token, or no logprobs."""
    return [_unpacked(row, top) for row, top in zip(rows, tops, strict=True)]


def _unpacked(row: Sequence[float], top: int) -> TokenLogprobs | None:
    token, logprob, count = int(row[0]), row[1], (len(row) - 2) // 2
    if token < 0 or math.isnan(logprob):
        return None
    best = zip(row[2 : 2 + min(top, count)], row[2 + count :], strict=False)
    found = [(int(each), value) for each, value in best if value > -math.inf]
    return TokenLogprobs(token, logprob, [each for each, _ in found], [value for _, value in found])
