"""Simulated machines for the search of `pagepool tune`: response surfaces with noise."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from pagepool_client.tuning.figures import Figures
from pagepool_client.tuning.grid import Grid
from pagepool_client.tuning.result import Result, Run
from pagepool_client.tuning.search import Search
from pagepool_client.tuning.trials import Point

Surface = Callable[[Point], float]
"""A setting's true score: the logarithm of its throughput."""


def grid(blocks: int = 5, pools: int = 3, budgets: int = 4) -> Grid:
    """The default grid, or less of it; blocks of 16 tokens and a budget of 512 are the defaults."""
    return Grid(
        block_sizes=(8, 16, 32, 64, 128)[:blocks],
        pool_tokens=(4096, 8192, 16384, 32768)[-pools:],
        batch_tokens=(128, 256, 512, 1024, 2048)[:budgets],
        block_size=16,
        budget=512,
    )


@dataclass(frozen=True)
class Machine:
    """Throughput falls away from the best block size and budget, and where the pool is too small for the workload.

    A small pool makes large blocks and budgets worse: the axes depend on each other.
    """

    sizes: tuple[int, int, int]
    block: tuple[float, float]
    pool: tuple[float, float]
    budget: tuple[float, float]
    cross: float

    def __call__(self, point: Point) -> float:
        block, pool, budget = point
        small = 1 - pool / max(1, self.sizes[1] - 1)
        large = block / max(1, self.sizes[0] - 1) + budget / max(1, self.sizes[2] - 1)
        return (
            -self.block[1] * (block - self.block[0]) ** 2
            - self.pool[1] * max(0.0, self.pool[0] - pool)
            - self.budget[1] * (budget - self.budget[0]) ** 2
            - self.cross * small * large
        )


def machine(space: Grid, seed: int) -> Machine:
    """One of many: sensitive to all three, to some of them or to none."""
    chance = random.Random(seed)
    blocks, pools, budgets = space.sizes
    return Machine(
        (blocks, pools, budgets),
        (chance.uniform(0, blocks - 1), chance.choice([0, 0.002, 0.01, 0.04])),
        (chance.uniform(-0.5, pools - 1), chance.choice([0, 0.1, 0.3, 0.6])),
        (chance.uniform(0, budgets - 1), chance.choice([0, 0.003, 0.02, 0.06])),
        chance.choice([0, 0.01, 0.03]),
    )


def noisy(surface: Surface, deviation: float, seed: int) -> Callable[[Point], float]:
    """Runs on a machine: each scores the truth and some noise of its own."""
    chance = random.Random(f"noise {seed}")
    return lambda point: surface(point) + chance.gauss(0, deviation)


def loss(space: Grid, surface: Surface, point: Point) -> float:
    """By which share a setting's throughput lies under the best one's."""
    return 1 - math.exp(surface(point) - max(map(surface, space.points)))


def tuned(space: Grid, throughputs: Callable[[Point], float | None], max_runs: int, repetitions: int = 2) -> Result:
    """A whole tuning, with figures; None is a run that fails."""
    runs: list[Run] = []

    def measure(point: Point) -> float | None:
        value = throughputs(point)
        if value is None:
            runs.append(Run(point, None, "memd has ended with signal 9: it said nothing"))
            return None
        figures = Figures(value, 0.2, 1.5, 0.01, 0.05, 1.0, 16, 2.0, 64, 1)
        runs.append(Run(point, figures))
        return math.log(value)

    search = Search(space, max_runs, measure)
    choice = search.choose()
    assert choice is not None
    return Result(space, search.trials, choice, runs, ["throughput"], repetitions * math.prod(space.sizes))


def ladder(*values: float) -> Callable[[Point], float]:
    """Throughputs one after the other, whatever the setting, over and over."""
    turn = itertools.cycle(values)
    return lambda _: next(turn)
