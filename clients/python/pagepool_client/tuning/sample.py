"""The part of a workload that a run replays. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagepool_client.workload.format import WorkloadRequest

WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8


def sample(requests: Sequence[WorkloadRequest], number: int, within_s: float | None) -> list[WorkloadRequest]:
    """The first `number` requests, so that prefixes are shared as they are in the workload.

    The first comes at once. With `within_s` the times between them are stretched or pressed by one factor, so that the
    last comes after so many seconds; None leaves them as they are.
    """
    first = requests[0].at_s
    chosen = [replace(request, at_s=request.at_s - first) for request in requests[:number]]
    if within_s is None or not chosen[-1].at_s:
        return chosen
    factor = within_s / chosen[-1].at_s
    return [replace(request, at_s=request.at_s * factor) for request in chosen]


def warm_up(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """A few of the requests, at once and with short answers: what a fresh worker gets before it is measured."""
    few = requests[:WARM_UP_REQUESTS]
    return [replace(one, at_s=0.0, output_tokens=min(WARM_UP_TOKENS, one.output_tokens)) for one in few]


def longest(requests: Sequence[WorkloadRequest]) -> int:
    """Tokens of the longest request, prompt and answer together."""
    return max(request.prompt_tokens + request.output_tokens for request in requests)
