"""Workers of memd's core, whose every step is followed by check(), and what they ask for; two of them over one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memd.core.geometry import Geometry
from memd.core.operations import ReserveRequest, Suspend
from memd.core.pool import Pool
from memd.core.values import Commit, Grant, Step, StepOutcome, TableRequest
from pagekernels.layout import Format, LayerShape

B = 8
"""Tokens in a block."""

TOTAL = 12
"""Blocks of the pool that `one` and `two` share."""

GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.BF16, False, 1, b"w" * 32, "model")


def make_pool(num_blocks: int) -> Pool:
    pool = Pool(7, B, 1 << 30, num_blocks)
    pool.declare(GEOMETRY)
    return pool


class Worker:
    """A worker's steps, numbered."""

    def __init__(self, pool: Pool, name: str = "one") -> None:
        self.pool = pool
        self.lease = pool.attach(name, name, 100.0, 0.0).lease.lease_id
        self.steps = 0

    def step(self, now: float = 1.0, **words: Any) -> StepOutcome:
        self.steps += 1
        outcome = self.pool.step(self.lease, Step(self.steps, **words), now)
        self.pool.check()
        return outcome

    def table(self, tokens: Sequence[int], num_blocks: int, **more: Any) -> int:
        """A table with these tokens committed as far as they were not found."""
        (grant,) = self.step(creates=[TableRequest(tokens, num_blocks, **more)]).grants
        self.step(commits=[Commit(grant.table_id, tokens[grant.cached_tokens :])])
        return grant.table_id

    def suspend(self, table_id: int, *tokens: int) -> None:
        self.step(operations=[Suspend(table_id, tokens)])


def table(worker: Worker, arrival: float, num_blocks: int, priority: int = 0) -> int:
    (grant,) = worker.step(creates=[TableRequest((), num_blocks, priority=priority, arrival=arrival)]).grants
    return grant.table_id


def grows(worker: Worker, table_id: int, by: int, now: float = 1.0) -> Sequence[Grant]:
    return worker.step(now, reserves=[ReserveRequest(by, 0, for_table_id=table_id)]).grants


def starts(worker: Worker, num_blocks: int, arrival: float = 9.0, priority: int = 0, now: float = 1.0) -> bool:
    request = TableRequest((), num_blocks, priority=priority, arrival=arrival)
    return bool(worker.step(now, creates=[request]).grants)


def named(pool: Pool) -> set[int]:
    news = pool.victims.take_news()
    assert all(pool.table(table_id, 1.0).lease_id == lease_id for lease_id, table_id in news)
    return {table_id for _, table_id in news}


@pytest.fixture
def pool() -> Pool:
    return make_pool(TOTAL)


@pytest.fixture
def one(pool: Pool) -> Worker:
    return Worker(pool, "one")


@pytest.fixture
def two(pool: Pool) -> Worker:
    return Worker(pool, "two")
