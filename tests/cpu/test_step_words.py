"""A worker says in several steps what one may not cost: it counts as memd does, in whatever order things are done."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest

from inferd.core import step_words
from inferd.core.block_tables import BlockTables, ReserveShortError
from inferd.core.ports import Grant, Step, TableRequest
from memd.core import draft, stepping
from pagepool.limits import MAX_STEP_REFERENCES, MAX_STEP_REQUESTS, OPERATION_REFERENCES
from tests.cpu.memory_pool import MemoryPool, make_pool

SIZE = 8


class Tables:
    """A worker's tables beside memd's, which must agree after each step."""

    def __init__(self, num_blocks: int) -> None:
        self.worker, self.own = MemoryPool(make_pool(num_blocks, SIZE), threading.Event()), BlockTables(SIZE)
        self.ids: list[int] = []

    def create(self, num_blocks: int) -> int:
        self.worker.submit(Step(creates=[TableRequest(1, [], num_blocks, no_match=True)]))
        self.ids.append(self.own.created(self._granted()).table_id)
        return self.ids[-1]

    def reserve(self, num_blocks: int, num_tables: int) -> None:
        self.own.ask(99, num_blocks, num_tables)
        if self.own.awaits_reserve:
            self.send()
            self.own.granted(self._granted())

    def _granted(self) -> Grant:
        (grant,) = self.worker.poll()
        assert isinstance(grant, Grant)
        return grant

    def fork(self, table_id: int) -> int:
        self.ids.append(self.own.fork(table_id))
        return self.ids[-1]

    def release(self, table_id: int) -> None:
        self.ids.remove(table_id)
        self.own.release(table_id)

    def write(self, table_id: int, count: int) -> None:
        self.own.copied(len(self.own.prepare(table_id, count)))
        self.own.commit(table_id, [table_id] * count)

    def do_something(self, chance: random.Random) -> None:
        one = chance.choice(self.ids)
        kind = chance.choice(["fork", "write", "write", "write", "cut", "release", "take"])
        try:
            if kind == "fork":
                self.fork(one)
            elif kind == "write" and len(self.own[one].block_ids) < 12:
                self.write(one, chance.randint(1, 2 * SIZE))
            elif kind == "cut":
                self.own.copied(len(self.own.truncate(one, chance.randint(0, self.own[one].num_tokens))))
            elif kind == "release" and len(self.ids) > 1:
                self.release(one)
            elif kind == "take":
                self.own.take_ahead(one)
        except ReserveShortError:
            self.own.give_back(1)

    def send(self) -> list[Step]:
        steps = self.own.take_steps()
        for step in steps:
            self.worker.submit(step)
        self.worker.pool.check()
        told = {one.table_id: one for one in self.worker.pool.tables_after(0, 999, 0.0)}
        assert sorted(told) == sorted(self.ids)
        for table_id, there in told.items():
            mine = self.own[table_id]
            assert (mine.block_ids, list(mine.entries)) == (list(there.blocks.block_ids), list(there.blocks.entries))
            assert mine.num_tokens == there.num_tokens
        return steps


def limit(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(draft, "MAX_STEP_REFERENCES", most)
    monkeypatch.setattr(step_words, "MAX_STEP_REFERENCES", most)
    for module in (stepping, step_words):
        monkeypatch.setattr(module, "MAX_COMMIT_BLOCKS", most // OPERATION_REFERENCES)


def test_forks_and_releases_of_a_long_table_go_into_as_many_steps_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    length, count, most = 200, 20, 8
    limit(monkeypatch, most * (length + OPERATION_REFERENCES))
    tables = Tables(length)
    table = tables.create(length)
    tables.reserve(0, count)
    forks = [tables.fork(table) for _ in range(count)]
    assert [len(step.operations) for step in tables.send()] == [most, most, count - 2 * most]
    for fork in forks:
        tables.release(fork)
    assert [len(step.operations) for step in tables.send()] == [most, most, count - 2 * most]


def test_blocks_given_back_and_requests_are_split_too() -> None:
    most = MAX_STEP_REFERENCES // OPERATION_REFERENCES
    tables = Tables(most + 10)
    tables.reserve(most + 10, 0)
    tables.own.give_back(most + 10)
    assert [len(step.frees) for step in tables.send()] == [most, 10]
    for ref in range(2 * MAX_STEP_REQUESTS + 3):
        tables.own.create(TableRequest(ref, [], 1))
    tables.own.ask(1 << 40, 4, 0)
    steps = tables.own.take_steps()
    assert [(len(step.creates), len(step.reserves)) for step in steps] == [(256, 0), (256, 0), (3, 1)]


def test_commits_are_split_where_they_write_to_more_blocks_than_a_step_may(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 5 * OPERATION_REFERENCES)
    tables = Tables(60)
    long, short, other = tables.create(30), tables.create(2), tables.create(12)
    tables.write(long, 3)
    tables.send()
    # What is one commit for the worker are several, each to the end of a block; what others commit goes along.
    tables.write(long, 17 * SIZE)
    tables.write(short, 1)
    assert [[len(one.token_ids) for one in step.commits] for step in tables.send()] == [
        [5 * SIZE - 3],
        [5 * SIZE],
        [5 * SIZE],
        [2 * SIZE + 3, 1],
    ]
    # Beside others, and before operations: one step counts both.
    tables.write(short, 1)
    tables.write(other, 5 * SIZE)
    tables.release(short)
    steps = tables.send()
    assert [(len(step.commits), len(step.operations)) for step in steps] == [(1, 0), (1, 0), (0, 1)]
    # As many tokens as ever: one step, if they write to few blocks.
    for _ in range(5):
        tables.write(long, 1)
    assert [len(step.commits) for step in tables.send()] == [5]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_done_no_step_costs_more_than_memd_takes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 90)
    chance, tables, sent = random.Random(seed), Tables(300), list[Step]()
    for _ in range(30):
        if len(tables.ids) < 3:
            tables.create(chance.randint(1, 6))
        tables.reserve(6, 6)
        for _ in range(chance.randint(1, 9)):
            tables.do_something(chance)
        sent.append(Step())
        sent += tables.send()
    assert any(first and second for first, second in pairwise(sent)), "nothing was ever split"
    for one in list(tables.ids):
        tables.release(one)
    tables.own.give_back(tables.own.spare_blocks)
    tables.send()
    assert tables.worker.pool.usage().held == 0
