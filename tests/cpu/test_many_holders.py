"""Blocks that very many tables share, and the limits of tables, table ids and listed holders."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from memd.core import clients, draft, stepping
from memd.core.block import FEW_HOLDERS, Blocks, ManyHolders
from memd.core.errors import InvariantError
from memd.core.geometry import Geometry
from memd.core.operations import Fork, Release, ReserveRequest
from memd.core.pool import Pool
from memd.core.values import Grant, Step, TableRequest
from memd.core.views import MAX_LISTED_HOLDERS
from memd.messages import block_message
from pagekernels.layout import Format, LayerShape
from pagepool.errors import PagepoolError, Reason

B = 8
GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.BF16, False, 1, b"w" * 32, "model")


@pytest.fixture
def pool() -> Pool:
    made = Pool(7, B, 1 << 30, 600)
    made.declare(GEOMETRY)
    return made


@dataclass
class Worker:
    pool: Pool
    lease: int
    step_id: int = 0

    def step(self, **parts: object) -> list[Grant]:
        self.step_id += 1
        return list(self.pool.step(self.lease, Step(self.step_id, **parts), 0.0).grants)  # type: ignore[arg-type]

    def table(self, num_blocks: int) -> int:
        return self.step(creates=[TableRequest([], num_blocks)])[0].table_id

    def ids(self, count: int) -> list[int]:
        (grant,) = self.step(reserves=[ReserveRequest(0, count)])
        return list(range(grant.table_id, grant.table_id + count))


@pytest.fixture
def worker(pool: Pool) -> Worker:
    return Worker(pool, pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id)


def refusal(call: Callable[[], object]) -> PagepoolError:
    with pytest.raises(PagepoolError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("seed", range(3))
def test_references_are_counted_alike_however_many_there_are(seed: int) -> None:
    chance, blocks, wanted = random.Random(seed), Blocks(1, B), Counter({1: 1})
    blocks.occupy([0], (1,), 0.0)
    kinds = set()
    for _ in range(3000):
        growing = len(list(wanted.elements())) < chance.choice([2, 3 * FEW_HOLDERS])
        if growing:
            holder = chance.randrange(1, 20)
            blocks.add_reference(0, holder)
            wanted[holder] += 1
        elif wanted.total() > 1:
            holder = chance.choice(list(wanted.elements()))
            assert blocks.drop_reference(0, holder) is False
            wanted -= Counter({holder: 1})
        holders = blocks.holders[0]
        kinds.add(type(holders))
        assert Counter(holders) == wanted == blocks.references(0)
        assert len(holders) == wanted.total()
        assert {one for one in range(22) if one in holders} == set(wanted)
    assert kinds == {tuple, ManyHolders}
    with pytest.raises(InvariantError, match="21 drops a reference to block 1"):
        blocks.drop_reference(0, 21)
    *others, last = wanted.elements()
    assert [blocks.drop_reference(0, one) for one in others] == [False] * len(others)
    assert blocks.drop_reference(0, last) is True
    assert blocks.holders[0] == ()


def seconds_to_fork_and_release(worker: Worker, table: int, count: int) -> float:
    new = worker.ids(count)
    begin = time.process_time()
    for first in range(0, count, 1000):
        worker.step(operations=[Fork(table, one) for one in new[first : first + 1000]])
    for first in range(0, count, 1000):
        worker.step(releases=new[first : first + 1000])
    return time.process_time() - begin


def test_a_reference_costs_as_much_among_thousands_as_among_hundreds(pool: Pool, worker: Worker) -> None:
    table = worker.table(20)
    few = min(seconds_to_fork_and_release(worker, table, 400) for _ in range(3)) / 400
    many = seconds_to_fork_and_release(worker, table, 8000) / 8000
    assert many < 4 * few, "it was six times as much while holders were copied"
    pool.check()


def test_a_list_of_blocks_names_some_holders_and_counts_the_rest(pool: Pool, worker: Worker) -> None:
    table, new = worker.table(2), worker.ids(99)
    worker.step(operations=[Fork(table, one) for one in new])
    for listed in pool.blocks_between(0, 10, None, 0.0):
        assert (len(listed.holders), listed.more_holders, listed.ref_count) == (MAX_LISTED_HOLDERS, 36, 100)
        message = block_message(listed)
        assert (len(message.holders), message.more_holders) == (64, 36)
        whole = pool.block(listed.block_id, 0.0)
        assert (sorted(one.table_id for one in whole.holders), whole.more_holders) == (sorted([table, *new]), 0)


# -- limits


def test_a_client_has_so_many_tables_and_no_more(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_TABLES", 3)
    lease = pool.create_lease("client", 100.0, 0.0).lease_id
    tables = [pool.create_table(lease, TableRequest([], 1), 0.0).table_id]
    tables += [pool.sharing.fork_table(lease, tables[0], 0.0).table_id for _ in range(2)]
    for call in (
        lambda: pool.sharing.fork_table(lease, tables[0], 0.0),
        lambda: pool.create_table(lease, TableRequest([], 1), 0.0),
    ):
        error = refusal(call)
        assert (error.reason, error.metadata) == (Reason.TABLE_LIMIT, {"lease_id": str(lease), "limit": "3"})
    pool.release_table(lease, tables[1], 0.0)
    pool.sharing.fork_table(lease, tables[0], 0.0)
    pool.check()


def test_a_worker_has_so_many_tables_and_no_more(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "MAX_TABLES", 3)
    table, new = worker.table(1), worker.ids(5)
    worker.step(operations=[Fork(table, new[0]), Fork(table, new[1])])
    # One is released in the step that makes another, by fork or by request.
    worker.step(operations=[Release(new[0]), Fork(table, new[2])])
    worker.step(releases=[new[1]], creates=[TableRequest([], 1)])
    for parts in ({"operations": [Fork(table, new[3])]}, {"creates": [TableRequest([], 1)]}):
        error = refusal(lambda parts=parts: worker.step(**parts))  # type: ignore[misc]
        assert error.reason is Reason.PROTOCOL_VIOLATION
        assert "creates and forks come to 4 tables, but a lease has at most 3" in error.message
        worker.step_id -= 1


def test_table_ids_that_a_step_uses_make_room_for_those_it_asks_for(pool: Pool, worker: Worker) -> None:
    table, new = worker.table(1), worker.ids(stepping.MAX_RESERVED_IDS)
    error = refusal(lambda: worker.step(reserves=[ReserveRequest(0, 1)]))
    assert (error.reason, "65537 unused table ids" in error.message) == (Reason.PROTOCOL_VIOLATION, True)
    worker.step_id -= 1
    (grant,) = worker.step(operations=[Fork(table, new[0]), Fork(table, new[1])], reserves=[ReserveRequest(0, 2)])
    assert grant.num_tables == 2
    error = refusal(lambda: worker.step(operations=[Fork(table, new[2])], reserves=[ReserveRequest(0, 2)]))
    assert "65537 unused table ids" in error.message
    pool.check()
