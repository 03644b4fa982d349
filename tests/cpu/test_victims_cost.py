"""What it costs to find out who has to yield: all workers wait meanwhile."""

from __future__ import annotations

import pytest

from memd.core.operations import Fork, ReserveRequest
from memd.core.pool import Pool
from memd.core.table import Table
from memd.core.values import TableRequest
from memd.core.victims import MAX_LOOKED, Freed
from pagepool.limits import MAX_STEP_REQUESTS
from tests.cpu.core_worker import B, Worker, grows, make_pool, named, one, pool, table, two

__all__ = ["one", "pool", "two"]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks of each table were looked at."""
    counts: list[int] = []

    def add(self: Freed, table: Table) -> None:
        counts.append(len(table.frames))
        original(self, table)

    original = Freed.add
    monkeypatch.setattr(Freed, "add", add)
    return counts


def test_a_step_full_of_refused_requests_looks_at_each_block_once(looked: list[int]) -> None:
    pool = make_pool(1000)
    low, high = Worker(pool, "low"), Worker(pool, "high")
    for _ in range(9):
        table(low, 1.0, 100)
    asked = [TableRequest((), 1000, ref=ref, priority=1, headroom=100) for ref in range(MAX_STEP_REQUESTS)]
    refused = high.step(creates=[*asked[:-1], TableRequest((), 900, ref=999, priority=2)]).refusals
    assert len(refused) == MAX_STEP_REQUESTS
    assert looked == [100] * 8, "for the most urgent one alone"
    assert len(named(pool)) == 8


def test_no_more_than_so_many_blocks_are_looked_at_for_one_asker(looked: list[int]) -> None:
    """A family of forks that frees nothing before its last member has gone."""
    pool = make_pool(400)
    low, high = Worker(pool, "low"), Worker(pool, "high")
    first, num_forks = low.table([1] * (64 * B), 65), 2 * MAX_LOOKED // 64
    (grant,) = low.step(reserves=[ReserveRequest(0, num_forks)]).grants
    low.pool.check = lambda: None  # type: ignore[method-assign]  # takes as long as all the rest here
    forks = [Fork(first, grant.table_id + index) for index in range(num_forks)]
    for start in range(0, num_forks, 500):
        low.step(operations=forks[start : start + 500])
    assert not high.step(creates=[TableRequest((), 399, priority=1)]).grants
    assert MAX_LOOKED <= sum(looked) < MAX_LOOKED + 65
    assert named(pool) == set()
    looked.clear()
    old = table(high, 0.5, 10, priority=1)
    grows(high, old, 380)
    assert MAX_LOOKED <= sum(looked) < MAX_LOOKED + 65
    assert named(pool) == {forks[-1].new_table_id}, "the least urgent one: the others may follow it"


def test_who_yields_already_may_be_more_than_is_looked_at(pool: Pool, one: Worker, two: Worker) -> None:
    pool.victims.max_looked = 4
    old, middle, young = table(one, 1.0, 4), table(two, 2.0, 4), table(two, 3.0, 4)
    assert not grows(one, old, 6)
    assert named(pool) == {young}, "not enough, but more is not looked at"
    assert not grows(one, old, 6)
    assert named(pool) == set(), "what is on its way is waited for"
    two.suspend(young)
    assert not grows(one, old, 6)
    assert named(pool) == {middle}


def test_of_what_a_step_asks_in_vain_the_most_urgent_calls(pool: Pool, one: Worker, two: Worker) -> None:
    low, lower = table(two, 1.0, 6, priority=-1), table(two, 2.0, 6, priority=-2)
    asked = [
        TableRequest((), 12, ref=1, priority=-1),
        TableRequest((), 6, ref=2, arrival=2.0),
        TableRequest((), 9, ref=3, arrival=3.0),
    ]
    assert len(one.step(creates=asked).refusals) == 3
    assert named(pool) == {lower}
    assert not pool.table(low, 1.0).suspended
