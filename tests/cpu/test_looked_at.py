"""Looking is no use: a table that a step only asks about keeps its time of last use, and its blocks as they are."""

from __future__ import annotations

from typing import Any

import pytest

from memd.core.operations import CopyOnWrite, Fork, Release, ReserveRequest, Suspend, Take, Truncate
from memd.core.pool import Pool
from memd.core.values import Commit, ExtendRequest, Step, TableRequest
from memd.messages import block_message, pool_message, table_message
from pagepool.durations import to_seconds
from pagepool.errors import PagepoolError
from pagepool_client.diagnosis.diagnose import diagnose
from pagepool_client.diagnosis.observation import Observation
from tests.cpu.core_worker import B, Worker, make_pool

BEGIN, LATER, END = 1.0, 990.0, 1000.0


@pytest.fixture
def pool() -> Pool:
    return make_pool(8)


@pytest.fixture
def worker(pool: Pool) -> Worker:
    made = Worker(pool)
    pool._state.leases[made.lease].ttl_s = 1e6
    return made


def idle(pool: Pool, table_id: int) -> float:
    """As ListBlockTables and GetBlockTable have it."""
    (listed,) = [one for one in pool.tables_after(0, 99, END) if one.table_id == table_id]
    got = pool.table(table_id, END)
    assert got.idle_s == listed.idle_s == to_seconds(table_message(listed).idle_time)
    return got.idle_s


def doctor(pool: Pool) -> list[str]:
    """Lines of `pagepool doctor` about tables that nobody uses."""
    seen = Observation(
        pool_message(pool, None, 0.0),
        [block_message(one) for one in pool.blocks_between(0, 1 << 20, None, END)],
        [table_message(one) for one in pool.tables_after(0, 99, END)],
        at_s=END,
    )
    return [line for one in diagnose(seen) if one.code == "idle_tables" for line in (one.detail, *one.evidence)]


def two_tables(worker: Worker) -> tuple[int, int, list[int], int]:
    """The one that is operated on and the one that is not, of two blocks each; blocks and a table id in reserve."""
    one, other = (worker.table([number] * (B + 3), 2) for number in (1, 2))
    (grant,) = worker.step(reserves=[ReserveRequest(2, 1)]).grants
    return one, other, list(grant.blocks.block_ids), grant.table_id


@pytest.mark.parametrize("kind", ["take", "copy", "cut", "fork", "release", "free"])
def test_a_table_that_is_asked_for_beside_operations_on_another_stays_as_it_was(
    pool: Pool, worker: Worker, kind: str
) -> None:
    one, other, blocks, new = two_tables(worker)
    words: dict[str, Any] = {
        "take": {"operations": [Take(one, blocks[:1])]},
        "copy": {"operations": [CopyOnWrite(one, 1, blocks[:1])]},
        "cut": {"operations": [Truncate(one, B)]},
        "fork": {"operations": [Fork(one, new)]},
        "release": {"operations": [Release(one)]},
        "free": {"frees": blocks[:1]},
    }[kind]
    frames = pool._state.tables[other].frames
    asked = {"reserves": [ReserveRequest(9, 0, 1, other)], "extends": [ExtendRequest(other, 9, 2)]}
    assert len(worker.step(LATER, **words, **asked).refusals) == 2
    assert (idle(pool, other), pool.block(pool.table(other, END).blocks.block_ids[0], END).idle_s) == (END - BEGIN,) * 2
    assert pool._state.tables[other].frames is frames, "its blocks were written anew"
    assert any(f"table {other} " in line for line in doctor(pool)), "the doctor does not see that nobody uses it"
    if kind != "release":
        changed = kind in ("take", "copy", "cut")
        assert idle(pool, one) == (END - LATER if changed else END - BEGIN)


def test_a_suspended_table_whose_resumption_is_refused_stays_as_it_was(pool: Pool, worker: Worker) -> None:
    one, other, blocks, _ = two_tables(worker)
    worker.suspend(other)
    words = {"operations": [Take(one, blocks)], "creates": [TableRequest((), 8, resume_table_id=other)]}
    assert len(worker.step(LATER, **words).refusals) == 1
    assert idle(pool, other) == END - BEGIN
    worker.step(LATER, releases=[one], creates=[TableRequest((), 2, resume_table_id=other)])
    assert idle(pool, other) == END - LATER


def test_what_a_step_does_to_a_table_is_a_use_of_it(pool: Pool, worker: Worker) -> None:
    one, other, _, _ = two_tables(worker)
    worker.step(LATER, commits=[Commit(one, [1])], operations=[Suspend(other, ())])
    assert (idle(pool, one), idle(pool, other)) == (END - LATER,) * 2


def test_a_refused_step_is_no_use(pool: Pool, worker: Worker) -> None:
    one, other, blocks, _ = two_tables(worker)
    with pytest.raises(PagepoolError):
        pool.step(worker.lease, Step(worker.steps + 1, operations=[Take(one, blocks), Truncate(other, 99)]), LATER)
    pool.check()
    assert (idle(pool, one), idle(pool, other)) == (END - BEGIN,) * 2
