"""Which setting is best, by few runs that are noisy: coordinate descent, then the contenders against each other. Pure.

One axis after the other, every value is tried beside the best values of the other axes so far. The setting in the
middle runs again for each axis, which is what the noise is estimated from. Where the axis' best value and the value
that practitioners prefer are not told apart, both run again; if they still are not, there is no difference, and the
preferred one stays. What runs are left at the end go to whoever leads and whoever is preferred among those not told
apart from it, until they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagepool_client.tuning.trials import Point, Trials, student_t

DESCENT = (2, 0, 1)
"""The order of axes: budget and block size while the pool is the largest, and then how small it may be."""
LEAST_RUNS = 4
SAME, TOLD_APART = 0.7, 2.2
"""Standard errors up to which two settings are taken as equal in the descent, and from which as different."""
DUELS = 2
"""How often two that are neither run again for that."""
RESOLUTION = 0.02
"""A difference that nobody looks for: a pair that is known to this does not run again."""


class Space(Protocol):
    """The settings that there are: every combination of the axes' values."""

    @property
    def sizes(self) -> Sequence[int]:
        """Values on each axis."""
        ...

    @property
    def start(self) -> Point:
        """What practitioners would begin with."""
        ...

    def preference(self, point: Point) -> tuple[int, ...]:
        """Lower is preferred, of settings between which there is no difference."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What came out."""

    point: Point
    """The preferred one of those that are not worse than the best by more than noise."""
    best: Point
    """The one with the highest mean."""
    runs: int


class _SpentError(Exception):
    """There are no runs left."""


class Search:
    """One search. `measure` runs a setting and gives its score, or None if it failed."""

    def __init__(self, space: Space, max_runs: int, measure: Callable[[Point], float | None]) -> None:
        self.trials = Trials()
        self.runs = 0
        self._space, self._max_runs, self._measure = space, max_runs, measure

    def choose(self) -> Choice | None:
        """Run at most `max_runs`; None if every setting failed."""
        try:
            self._descend()
            self._race()
        except _SpentError:
            pass
        best = self.trials.best()
        return None if best is None else Choice(self._preferred(list(self.trials)), best, self.runs)

    def _descend(self) -> None:
        centre = self._space.start
        self._run(centre)
        done: dict[int, tuple[int, ...]] = {}
        while True:
            before = centre
            for axis in DESCENT:
                others = tuple(value for index, value in enumerate(centre) if index != axis)
                again = axis in done
                if done.get(axis) == others or (again and self._left < self._cost(centre, axis) + self._reserve):
                    continue
                done[axis] = others
                centre = self._along(centre, axis)
            if centre == before:
                return

    def _along(self, centre: Point, axis: int) -> Point:
        """Try the values of an axis, those next to the centre's first; the one to go on from."""
        line = self._line(centre, axis)
        if len(line) > 1 and self.trials.runs(centre):
            self._run(centre)
        for point in sorted(line, key=lambda point: abs(point[axis] - centre[axis])):
            if point not in self.trials:
                self._run(point)
        for _ in range(DUELS):
            leader, rival = self._pair(line, SAME, TOLD_APART)
            if leader == rival:
                return leader
            self._run(leader)
            self._run(rival)
        return self._pair(line, 1.0, 1.0)[1]

    def _pair(self, line: Sequence[Point], same: float, apart: float) -> tuple[Point, Point]:
        """Who leads, and the preferred one that is not told apart from it; twice the same one if it is as good."""
        served = [point for point in line if self.trials.runs(point)] or list(line)
        leader = max(served, key=self.trials.mean)
        near = [point for point in served if point == leader or self.trials.behind(point, leader) <= apart]
        rival = min(near, key=self._space.preference)
        return (rival, rival) if self.trials.behind(rival, leader) <= same else (leader, rival)

    def _race(self) -> None:
        """The leader and the preferred one of those not told apart from it, until they are."""
        while (leader := self.trials.best()) is not None:
            rival = self._preferred(list(self.trials))
            known = student_t(self.trials.freedom) * self.trials.error(leader, rival) <= RESOLUTION
            if leader == rival or known:
                return
            self._run(min((rival, leader), key=self.trials.runs))

    def _preferred(self, points: Sequence[Point]) -> Point:
        leader = max(points, key=self.trials.mean)
        near = [point for point in points if point == leader or not self.trials.differs(point, leader)]
        return min(near, key=self._space.preference)

    @property
    def _left(self) -> int:
        return self._max_runs - self.runs

    @property
    def _reserve(self) -> int:
        """Runs that the race should find left."""
        return max(2, self._max_runs // 5)

    def _cost(self, centre: Point, axis: int) -> int:
        return 1 + sum(point not in self.trials for point in self._line(centre, axis))

    def _line(self, centre: Point, axis: int) -> list[Point]:
        block, pool, budget = centre
        values = range(self._space.sizes[axis])
        lines = (
            [(value, pool, budget) for value in values],
            [(block, value, budget) for value in values],
            [(block, pool, value) for value in values],
        )
        return lines[axis]

    def _run(self, point: Point) -> None:
        if self.runs >= self._max_runs:
            raise _SpentError
        self.runs += 1
        self.trials.add(point, self._measure(point))
