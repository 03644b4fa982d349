"""What runs have scored, how much of it is noise, and which differences are more than that. Pure.

A score is a mean of logarithms of figures, so differences of scores are ratios, and the noise of machines, which grows
with the figure, is the same everywhere. It is estimated from all settings that ran more than once together. Before any
did, it is taken to be 2 %, with the weight of three runs more: a scaled inverse chi-squared prior of the variance,
after which a difference of means over its standard error has Student's t distribution (Gelman et al., Bayesian Data
Analysis, 2013, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Point = tuple[int, int, int]
"""Which value of each axis of a space: block size, pool size, batch budget."""

PRIOR_DEVIATION, PRIOR_FREEDOM = 0.02, 3
CONFIDENT = 1.959964
"""Quantile of the normal distribution beyond which lie 2.5 % on either side."""
FAILED = -math.inf


class Trials:
    """Scores of runs by point; None is the score of a run that failed, and a point with one of those is out."""

    def __init__(self) -> None:
        self._scores: dict[Point, list[float]] = {}
        self._failed: set[Point] = set()
        self._spread: tuple[int, float] | None = None

    def add(self, point: Point, score: float | None) -> None:
        """A run's score, or that it failed."""
        self._spread = None
        if score is None:
            self._failed.add(point)
            self._scores.setdefault(point, [])
        else:
            self._scores.setdefault(point, []).append(score)

    def __contains__(self, point: object) -> bool:
        """Whether it has run."""
        return point in self._scores

    def __iter__(self) -> Iterator[Point]:
        """The points that served, in the order in which they first ran."""
        return (point for point in self._scores if point not in self._failed)

    def runs(self, point: Point) -> int:
        """Runs of the point; 0 if one of them failed."""
        return 0 if point in self._failed else len(self._scores.get(point, ()))

    def scores(self, point: Point) -> Sequence[float]:
        """Scores of the runs of the point that did not fail."""
        return tuple(self._scores.get(point, ()))

    def mean(self, point: Point) -> float:
        """Mean score, FAILED if it failed. KeyError if it never ran."""
        scores = self._scores[point]
        return FAILED if point in self._failed else math.fsum(scores) / len(scores)

    def best(self) -> Point | None:
        """The point with the highest mean; None if none served."""
        return max(self, key=self.mean, default=None)

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the noise."""
        return self._estimate()[0]

    @property
    def noise(self) -> float:
        """Standard deviation of the score of one run."""
        return self._estimate()[1]

    def _estimate(self) -> tuple[int, float]:
        if self._spread is None:
            freedom, squares = PRIOR_FREEDOM, PRIOR_FREEDOM * PRIOR_DEVIATION**2
            for point in self:
                scores, mean = self._scores[point], self.mean(point)
                freedom += len(scores) - 1
                squares += math.fsum((score - mean) ** 2 for score in scores)
            self._spread = freedom, math.sqrt(squares / freedom)
        return self._spread

    def error(self, one: Point, other: Point) -> float:
        """Standard error of the difference of two means; both served."""
        return self.noise * math.sqrt(1 / self.runs(one) + 1 / self.runs(other))

    def behind(self, point: Point, leader: Point) -> float:
        """By how many standard errors the point's mean lies under the leader's; infinitely many if it failed."""
        if point == leader:
            return 0.0
        gap = self.mean(leader) - self.mean(point)
        return gap / self.error(point, leader) if math.isfinite(gap) else math.inf

    def differs(self, one: Point, other: Point) -> bool:
        """Whether the two differ by more than noise explains in 19 of 20 cases."""
        return abs(self.behind(one, other)) > student_t(self.freedom)


def student_t(freedom: int) -> float:
    """The quantile beyond which 2.5 % of Student's t distribution lie, within 1 % for three degrees of freedom or more.

    An expansion in powers of 1 / freedom (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5).
    """
    z = CONFIDENT
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
