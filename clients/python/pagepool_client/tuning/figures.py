"""From what a run's clients heard to figures, and from figures to one score. Pure.

Times are seconds on one clock. A request's clock begins when it was due, not when it was sent: a client that is late
itself must not hide that the service made it wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise


@dataclass(slots=True)
class Heard:
    """One request, as its client saw it."""

    due_s: float
    messages: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many at once."""
    finished: bool = False
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Objective:
    """A service-level objective: most seconds to the first token, and between two tokens on average."""

    first_token_s: float = math.inf
    between_tokens_s: float = math.inf

    def met(self, request: Heard) -> bool:
        """Whether a finished request was served so."""
        if not request.finished or not request.messages:
            return False
        first, last = request.messages[0][0], request.messages[-1][0]
        later = sum(number for _, number in request.messages) - 1
        return first - request.due_s <= self.first_token_s and (last - first) <= self.between_tokens_s * max(later, 0)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run measured. None where nothing is to be measured: between tokens of answers of one."""

    throughput: float
    """Generated tokens a second, from the first request's time to the last token."""
    ttft_p50: float
    """Seconds to the first token, half of the requests."""
    ttft_p99: float
    itl_p50: float | None
    """Seconds between two tokens of an answer, half of them."""
    itl_p99: float | None
    goodput: float
    """Requests a second that met the objective."""
    finished: int
    """Requests that came to their end."""
    seconds: float
    cached_tokens: int
    """Prompt tokens found in the pool."""
    preemptions: int
    """How often requests had to give their blocks up and go on later: the pool is small for them."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that can count."""

    name: str
    label: str
    unit: str
    more_is_better: bool
    value: Callable[[Figures], float | None]


METRICS = {
    one.name: one
    for one in (
        Metric("throughput", "tokens/s", "/s", True, lambda figures: figures.throughput),  # noqa: FBT003
        Metric("ttft-p50", "first p50", "s", False, lambda figures: figures.ttft_p50),  # noqa: FBT003
        Metric("ttft-p99", "first p99", "s", False, lambda figures: figures.ttft_p99),  # noqa: FBT003
        Metric("itl-p50", "next p50", "s", False, lambda figures: figures.itl_p50),  # noqa: FBT003
        Metric("itl-p99", "next p99", "s", False, lambda figures: figures.itl_p99),  # noqa: FBT003
        Metric("goodput", "in time/s", "/s", True, lambda figures: figures.goodput),  # noqa: FBT003
    )
}
"""By name, as --metric takes it."""


def figures(heard: Sequence[Heard], ended_s: float | None = None, objective: Objective | None = None) -> Figures:
    """The figures of a run that was cut at `ended_s`, or not at all. ValueError if no token came.

    Where a cut request had no first token yet, its time to that counts as far as it went.
    """
    times = [(at, number) for request in heard for at, number in request.messages]
    if not times:
        raise ValueError("no token came")
    begun = min(request.due_s for request in heard)
    end = ended_s if ended_s is not None else max(at for at, _ in times)
    seconds = max(end - begun, 1e-9)
    firsts = [(request.messages[0][0] if request.messages else end) - request.due_s for request in heard]
    gaps = [gap for request in heard for gap in _gaps(request)]
    met = sum((objective or Objective()).met(request) for request in heard)
    return Figures(
        throughput=sum(number for _, number in times) / seconds,
        ttft_p50=percentile(firsts, 50),
        ttft_p99=percentile(firsts, 99),
        itl_p50=percentile(gaps, 50) if gaps else None,
        itl_p99=percentile(gaps, 99) if gaps else None,
        goodput=met / seconds,
        finished=sum(request.finished for request in heard),
        seconds=seconds,
        cached_tokens=sum(request.cached_tokens for request in heard),
        preemptions=sum(request.preemptions for request in heard),
    )


def score(run: Figures, metrics: Sequence[str]) -> float | None:
    """The mean of the metrics' logarithms, those of which less is better negated; None if one was not measured.

    A goodput of none counts as half a request, for its logarithm would be endless.
    """
    total = 0.0
    for name in metrics:
        metric = METRICS[name]
        value = metric.value(run)
        if value is None:
            return None
        least = 0.5 / run.seconds if name == "goodput" else 1e-9
        total += math.log(max(value, least)) * (1 if metric.more_is_better else -1)
    return total / len(metrics)


def mean(runs: Sequence[Figures]) -> Figures:
    """The figures of several runs of one setting, each the mean of theirs."""
    means = {}
    for one in fields(Figures):
        values = [value for run in runs if (value := getattr(run, one.name)) is not None]
        means[one.name] = math.fsum(values) / len(values) if values else None
    return Figures(**means)  # type: ignore[arg-type]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many per cent of them do not exceed."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def _gaps(request: Heard) -> list[float]:
    """Seconds between tokens; those of one message share the wait for it."""
    return [
        (later - earlier) / number
        for (earlier, _), (later, number) in pairwise(request.messages)
        for _ in range(number)
    ]
