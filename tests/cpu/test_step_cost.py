"""memd serves nobody else while it applies a step: what one may cost is limited, and found out before it is done."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from memd.core import draft
from memd.core.operations import CopyOnWrite, Fork, Release, ReserveRequest, Suspend, TableOperation, Take, Truncate
from memd.core.pool import Pool
from memd.core.values import Commit, Step, TableRequest
from pagepool.errors import PagepoolError, Reason
from pagepool.limits import MAX_COMMIT_BLOCKS, MAX_STEP_REFERENCES, MAX_STEP_REQUESTS, OPERATION_REFERENCES
from tests.cpu.core_worker import B, make_pool

LONG = 8192
"""Blocks of a long context: 128 Ki tokens, 16 a block."""

MOST = MAX_STEP_REFERENCES // (OPERATION_REFERENCES + 2)
"""Operations on tables of two blocks that fit into a step."""

BOUND_S = 1.0
"""Ten times what a step may take on a quiet machine; what these tests are about took 3 to 80 seconds."""


class Worker:
    """A worker's steps, without a check of the whole pool after each: there are a hundred thousand references."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = make_pool(num_blocks)
        self.lease = self.pool.attach("worker", "lock", 1e6, 0.0).lease.lease_id
        self.steps = 0

    def step(self, now: float = 1.0, **words: Any) -> list[Any]:
        outcome = self.pool.step(self.lease, Step(self.steps + 1, **words), now)
        self.steps += 1
        return list(outcome.grants)

    def tables(self, count: int, num_blocks: int) -> list[int]:
        made: list[int] = []
        while len(made) < count:
            more = min(count - len(made), MAX_STEP_REQUESTS)
            made += [one.table_id for one in self.step(creates=[TableRequest((), num_blocks, no_match=True)] * more)]
        return made

    def ids(self, count: int) -> list[int]:
        (grant,) = self.step(reserves=[ReserveRequest(0, count)])
        return list(range(grant.table_id, grant.table_id + count))

    def blocks(self, count: int) -> list[int]:
        return list(self.step(reserves=[ReserveRequest(count, 0)])[0].blocks.block_ids)

    def refusal(self, **words: Any) -> PagepoolError:
        """The reason of a refused step, which has changed nothing."""
        before = seen(self.pool)
        with pytest.raises(PagepoolError) as caught:
            self.step(2.0, **words)
        assert seen(self.pool) == before
        self.pool.check()
        assert caught.value.reason is Reason.PROTOCOL_VIOLATION
        return caught.value


def seen(pool: Pool) -> Any:
    return pool.usage(), pool.version, list(pool.tables_after(0, 100, 9.0)), pool.blocks_between(0, 100, None, 9.0)


def calls(step: Callable[[], object]) -> int:
    """How many calls, and rounds of generators, Python makes for it: work, whatever the machine does beside."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def seconds(step: Callable[[], object]) -> float:
    gc.collect()
    gc.freeze()  # what the tests before have left in this process is nothing that memd's collector would look through
    try:
        begin = time.process_time()
        step()
        return time.process_time() - begin
    finally:
        gc.unfreeze()


# -- as much for each operation, however many there are, and however many tables


def suspending(count: int, beside: int) -> int:
    worker = Worker(2 * (count + beside))
    tables = worker.tables(count + beside, 2)[:count]
    return calls(lambda: worker.step(operations=[Suspend(one, (7,)) for one in tables]))


def forking(count: int, beside: int) -> int:
    worker = Worker(2 + beside)
    table, *_ = worker.tables(1 + beside, 1)
    new = worker.ids(count)
    return calls(lambda: worker.step(operations=[Fork(table, one) for one in new], releases=new))


def resuming(count: int, beside: int) -> int:
    worker = Worker(2 * (count + beside))
    tables = worker.tables(count + beside, 2)[:count]
    worker.step(operations=[Suspend(one, (7,)) for one in tables])
    return calls(lambda: worker.step(creates=[TableRequest((), 2, resume_table_id=one) for one in tables]))


@pytest.mark.parametrize("kind", [suspending, forking, resuming])
def test_an_operation_costs_the_same_beside_few_and_beside_many(kind: Callable[[int, int], int]) -> None:
    once, twice = kind(100, 0), kind(200, 0)
    assert twice < 2.1 * once, "all were looked at for each"
    assert kind(100, 300) < 1.1 * once, "tables that the step does not name were looked at"


def test_a_block_more_costs_a_long_table_as_much_as_a_short_one() -> None:
    def taking(length: int) -> float:
        worker = Worker(32 * length + 32)
        tables, blocks = worker.tables(32, length), worker.blocks(32)
        takes = [Take(table, [block]) for table, block in zip(tables, blocks, strict=True)]
        return seconds(lambda: worker.step(operations=takes))

    assert min(taking(2048) for _ in range(3)) < 10 * min(taking(2) for _ in range(3)), "it was 70 times as much"


# -- the largest steps that there may be


def largest_steps() -> list[tuple[str, Worker, dict[str, Any]]]:
    short = Worker(2 * MOST)
    small = [Suspend(one, (7,)) for one in short.tables(MOST, 2)]
    forks = MAX_STEP_REFERENCES // (LONG + OPERATION_REFERENCES)
    long = Worker((forks + 1) * LONG)
    source, *alone = long.tables(forks + 1, LONG)
    new = long.ids(forks)
    spare = Worker(MAX_STEP_REFERENCES)
    count = MAX_STEP_REFERENCES // OPERATION_REFERENCES - 1
    (copied,), blocks = spare.tables(1, count), spare.blocks(count)
    return [
        ("suspensions", short, {"operations": small}),
        ("forks of a long table", long, {"operations": [Fork(source, one) for one in new]}),
        ("releases of these", long, {"releases": new}),
        ("releases of long tables", long, {"releases": alone}),
        ("copies", spare, {"operations": [CopyOnWrite(copied, 0, blocks)]}),
    ]


def test_the_largest_steps_keep_nobody_waiting() -> None:
    for what, worker, words in largest_steps():
        taken = seconds(lambda worker=worker, words=words: worker.step(**words))  # type: ignore[misc]
        assert taken < BOUND_S, f"{what} took {taken:.2f} s"
        worker.pool.usage()


def test_what_is_beyond_is_refused_before_it_is_done() -> None:
    worker = Worker(LONG)
    (table,), new = worker.tables(1, LONG), worker.ids(3000)
    forks = [Fork(table, one) for one in new]
    before = worker.pool.usage(), worker.pool.version, worker.pool.num_tables

    def refuse() -> None:
        with pytest.raises(PagepoolError, match="but may come to 65536 in a step; say the rest in further steps"):
            worker.step(operations=forks)

    assert seconds(refuse) < BOUND_S / 10, "the rest was drafted too"
    assert (worker.pool.usage(), worker.pool.version, worker.pool.num_tables) == before
    worker.step(operations=forks[:7])


def test_a_fork_too_many_is_refused_before_those_after_it_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "MAX_TABLES", 3)
    worker = Worker(9)
    (table,), new = worker.tables(1, 2), worker.ids(900)

    def refuse(count: int) -> int:
        forks = [Fork(table, one) for one in new[:count]]
        with pytest.raises(PagepoolError):
            worker.step(operations=forks[:1] * 2)  # the same error, for what comes with it
        return calls(lambda: worker.refusal(operations=forks))

    error = worker.refusal(operations=[Fork(table, one) for one in new])
    assert "creates and forks come to 4 tables, but a lease has at most 3" in error.message
    assert refuse(900) < 1.1 * refuse(3)
    # Those released before make room, those released after do not.
    worker.step(operations=[Fork(table, new[0]), Fork(table, new[1])])
    assert "4 tables" in worker.refusal(operations=[Fork(table, new[2]), Release(new[0])]).message
    worker.step(operations=[Release(new[0]), Fork(table, new[2])])
    worker.pool.check()


def test_requests_of_a_step_are_limited() -> None:
    worker = Worker(2 * MAX_STEP_REQUESTS)
    (table,) = worker.tables(1, 1)
    many = [ReserveRequest(1, 0)] * MAX_STEP_REQUESTS
    for words in ({"reserves": [*many, many[0]]}, {"reserves": many, "creates": [TableRequest((), 1)]}):
        error = worker.refusal(releases=[table], **words)
        assert "creates, extends and reserves are 257, but may be 256 in a step; ask for the rest" in error.message
    assert len(worker.step(reserves=many)) == MAX_STEP_REQUESTS


@pytest.mark.parametrize("count", [MAX_COMMIT_BLOCKS * B + 1, 4 * MAX_COMMIT_BLOCKS * B])
def test_commits_to_more_blocks_than_a_step_may_write_to_are_refused(count: int) -> None:
    worker = Worker(5 * MAX_COMMIT_BLOCKS)
    (table, other) = worker.tables(2, 2 * MAX_COMMIT_BLOCKS)
    half = [7] * (count // 2)
    error = worker.refusal(commits=[Commit(table, half), Commit(other, half), Commit(other, [7])])
    assert "but may write to 4096 in a step; commit the rest in further steps" in error.message
    most = [Commit(table, [7] * (MAX_COMMIT_BLOCKS * B))]
    taken = seconds(lambda: worker.step(commits=most))
    assert taken < BOUND_S, f"the largest commit took {taken:.2f} s"
    assert worker.pool.table(table, 1.0).num_tokens == MAX_COMMIT_BLOCKS * B


def test_a_commit_counts_for_each_block_that_it_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, size = Worker(20), OPERATION_REFERENCES
    (table, other) = worker.tables(2, 8)
    for tokens, blocks in ((3, 1), (B, 2), (B - 3, 1), (0, 1), (3 * B, 3), (1, 1)):
        free = worker.blocks(1)
        monkeypatch.setattr(draft, "MAX_STEP_REFERENCES", (blocks + 2) * size - 1)
        words = {"commits": [Commit(other, ()), Commit(table, [7] * tokens)], "frees": free}
        error = worker.refusal(**words)
        assert f"commits, operations, releases and frees come to {(blocks + 2) * size} references" in error.message
        monkeypatch.setattr(draft, "MAX_STEP_REFERENCES", (blocks + 2) * size)
        worker.step(**words)
    worker.pool.check()


# -- what counts how much


def lone_costs(worker: Worker) -> Sequence[tuple[TableOperation, int]]:
    """An operation of each kind, and its references: on tables of four blocks, two and a half of them written."""
    size = OPERATION_REFERENCES
    one, two, three, four, five = tables = worker.tables(5, 4)
    worker.step(commits=[Commit(table, [table] * (2 * B + 3)) for table in tables])
    blocks, (new, *_) = worker.blocks(6), worker.ids(2)
    return [
        (Fork(one, new), size + 4),
        (Take(two, blocks[:3]), 4 * size),
        (CopyOnWrite(two, 0, blocks[3:5]), 3 * size),
        (Truncate(three, B), size + 2),
        (Truncate(two, 3, blocks[5]), 2 * size + 2),
        (Suspend(four, (1,)), size + 4),
        (Release(five), size + 4),
        (Release(three), size + 2),
    ]


def test_each_operation_counts_what_the_protocol_says(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(80)
    spare = worker.blocks(20)
    for operation, cost in lone_costs(worker):
        words = {"frees": spare[-1:], "operations": [operation]}
        monkeypatch.setattr(draft, "MAX_STEP_REFERENCES", cost + OPERATION_REFERENCES - 1)
        error = worker.refusal(**words)
        assert f"come to {cost + OPERATION_REFERENCES} references" in error.message
        monkeypatch.setattr(draft, "MAX_STEP_REFERENCES", cost + OPERATION_REFERENCES)
        worker.step(**words)
        spare.pop()
        worker.pool.check()


def test_a_table_longer_than_a_step_may_be_is_forked_and_released_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(50)
    (table, other), (new,) = worker.tables(2, 20), worker.ids(1)
    monkeypatch.setattr(draft, "MAX_STEP_REFERENCES", 30)
    worker.refusal(operations=[Release(other), Fork(table, new)])
    worker.refusal(releases=[table, other])
    worker.step(operations=[Fork(table, new)])
    for one in (table, new, other):
        worker.step(releases=[one])
    worker.pool.check()
    assert worker.pool.usage().free == 50
