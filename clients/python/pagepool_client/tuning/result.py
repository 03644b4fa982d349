"""What a tuning found: its runs, and each setting's difference to the one that is recommended. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagepool_client.tuning.figures import Figures, mean
from pagepool_client.tuning.grid import Grid
from pagepool_client.tuning.search import Choice
from pagepool_client.tuning.trials import Point, Trials, student_t

FLAGS = ("--block-size", "--max-num-blocks", "--max-batch-tokens")
"""What each axis of a point is set by."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its figures, or why there are none."""

    point: Point
    figures: Figures | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Against:
    """A setting beside the recommended one."""

    share: float
    """By how much it is better, as a share: -0.08 is 8 % worse."""
    none: bool
    """Whether the difference is within the noise, and so is none."""


@dataclass(frozen=True, slots=True)
class Result:
    """All of it. At least one setting served, and `choice` is one of those."""

    grid: Grid
    trials: Trials
    choice: Choice
    runs: Sequence[Run]
    metrics: Sequence[str]
    sweep_runs: int
    """Runs that an exhaustive sweep would take."""

    @property
    def points(self) -> list[Point]:
        """The settings that ran, in the order of their values."""
        return sorted({run.point for run in self.runs})

    def figures(self, point: Point) -> Figures | None:
        """Means over the runs of a setting; None if one failed."""
        runs = [run.figures for run in self.runs if run.point == point]
        served = [one for one in runs if one is not None]
        return mean(served) if served and len(served) == len(runs) else None

    def trouble(self, point: Point) -> str:
        """What went wrong first with a setting; empty if nothing did."""
        return next((run.trouble for run in self.runs if run.point == point and run.trouble), "")

    def against(self, point: Point) -> Against | None:
        """The setting beside the recommended one; None if a run of it failed."""
        if not self.trials.runs(point):
            return None
        gap = self.trials.mean(point) - self.trials.mean(self.choice.point)
        return Against(math.expm1(gap), not self.trials.differs(point, self.choice.point))

    def line(self, axis: int) -> list[Point]:
        """For each value of an axis that ran the setting nearest to the recommended one, which is one of them.

        Nearest is who differs from it in the fewest other flags, of equals who scored best.
        """
        found: dict[int, Point] = {}
        for point in self.points:
            other = found.get(point[axis])
            if other is None or self._nearness(point) > self._nearness(other):
                found[point[axis]] = point
        return [found[value] for value in sorted(found)]

    def differs_elsewhere(self, point: Point, axis: int) -> bool:
        """Whether a setting differs from the recommended one in other flags than the axis' too."""
        return any(point[i] != self.choice.point[i] for i in range(3) if i != axis)

    def _nearness(self, point: Point) -> tuple[int, float]:
        same = sum(mine == theirs for mine, theirs in zip(point, self.choice.point, strict=True))
        return same, self.trials.mean(point)

    def margin(self, point: Point) -> float:
        """How far off the mean score of a setting that served may be, in 19 of 20 cases."""
        return student_t(self.trials.freedom) * self.trials.noise / math.sqrt(self.trials.runs(point))

    @property
    def least_difference(self) -> float:
        """The least share by which the recommended setting and one that ran once must differ to be told apart."""
        runs = self.trials.runs(self.choice.point)
        return math.expm1(student_t(self.trials.freedom) * self.trials.noise * math.sqrt(1 + 1 / runs))

    def value(self, point: Point, axis: int) -> int:
        """What the axis' flag would be with the point's value of it, and the recommended one's of the others."""
        chosen = list(self.choice.point)
        chosen[axis] = point[axis]
        setting = self.grid.setting((chosen[0], chosen[1], chosen[2]))
        return (setting.block_size, setting.num_blocks, setting.batch_tokens)[axis]
