"""What one call of a client may cost: memd serves nobody else meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memd import limits
from memd.core import clients, prefix
from memd.core.operations import Fork
from memd.core.pool import Pool
from memd.core.values import Commit, TableRequest
from memd.service import MemdLife, PoolService
from pagepool.errors import Code, PagepoolError, Reason
from pagepool.memd.v1 import pool_service_pb2 as pb
from tests.cpu.core_worker import B, make_pool
from tests.cpu.test_step_cost import Worker, calls, seconds

BOUND_S = 1.0
"""Ten times what these take on a quiet machine."""


def refusal(call: Callable[[], object]) -> PagepoolError:
    with pytest.raises(PagepoolError) as caught:
        call()
    assert (caught.value.reason, caught.value.code) == (Reason.INVALID_FIELD, Code.INVALID_ARGUMENT)
    return caught.value


def new_lease(pool: Pool) -> int:
    return pool.create_lease("client", 100.0, 0.0).lease_id


# -- references


def test_as_many_references_to_one_block_as_there_may_be_are_dropped_at_once() -> None:
    def ending(count: int, end: Callable[[Pool, int, list[int]], None]) -> int:
        pool = make_pool(2)
        lease = new_lease(pool)
        ids = [pool.allocate_blocks(lease, 2, 0.0).block_ids[0]] * count
        pool.share_blocks(lease, ids[1:], 0.0)
        pool.check()
        assert pool.block(ids[0], 0.0).ref_count == count
        made = calls(lambda: end(pool, lease, ids))
        pool.check()
        return made

    def release(pool: Pool, lease: int, _: list[int]) -> None:
        pool.release_lease(lease, 1.0)
        assert pool.usage().free == 2

    def expire(pool: Pool, _: int, __: list[int]) -> None:
        assert len(pool.tick(100.0)) == 1
        assert pool.usage().free == 2

    def free(pool: Pool, lease: int, ids: list[int]) -> None:
        pool.free_blocks(lease, ids, 1.0)
        assert pool.usage().free == 1

    for end in (release, expire, free):
        assert ending(clients.MAX_REFERENCES, end) < 2 * ending(20, end)


def test_the_largest_calls_keep_nobody_waiting() -> None:
    most = clients.MAX_LISTED_BLOCKS
    pool = make_pool(most)
    lease, other = new_lease(pool), new_lease(pool)
    ids = pool.allocate_blocks(lease, most, 0.0).block_ids
    same = [ids[0]] * most
    for what, call in (
        ("sharing", lambda: pool.share_blocks(lease, ids, 1.0)),
        ("sharing one", lambda: pool.free_blocks(lease, ids, 1.0)),
        ("sharing one block", lambda: pool.share_blocks(lease, same[1:], 1.0)),
        ("freeing one block", lambda: pool.free_blocks(lease, same[1:], 1.0)),
        ("the end of a lease", lambda: pool.release_lease(lease, 1.0)),
    ):
        taken = seconds(call)
        assert taken < BOUND_S, f"{what} took {taken:.2f} s"
    pool.release_lease(other, 1.0)
    assert pool.usage().free == most


def test_blocks_are_freed_in_the_order_in_which_one_at_a_time_would_be() -> None:
    def freed(*calls: list[int]) -> list[int]:
        pool = make_pool(6)
        lease = new_lease(pool)
        ids = pool.allocate_blocks(lease, 6, 0.0).block_ids
        pool.share_blocks(lease, [ids[1], ids[4], ids[1]], 0.0)
        for listed in calls:
            pool.free_blocks(lease, [ids[one] for one in listed], 1.0)
        pool.check()
        return list(pool.allocate_blocks(lease, pool.usage().free, 2.0).entries)

    at_once = [1, 0, 4, 1, 5, 1, 4]
    assert freed(at_once) == freed(*([one] for one in reversed(at_once)))
    assert len(freed(at_once)) == 4
    assert len(freed([1, 4, 1, 5])) == 1


def test_blocks_of_thousands_of_tables_are_shared_without_a_look_at_these() -> None:
    def sharing(num_tables: int) -> int:
        worker = Worker(12)
        (table,), lease = worker.tables(1, 12), new_lease(worker.pool)
        worker.step(commits=[Commit(table, list(range(10 * B)))])
        new = worker.ids(num_tables)
        worker.step(operations=[Fork(table, one) for one in new])
        sealed = worker.pool.table(table, 1.0).blocks.block_ids[:10]
        return calls(lambda: worker.pool.share_blocks(lease, sealed, 1.0))

    assert sharing(2000) < 1.1 * sharing(20), "all their holders were copied"


# -- limits


@pytest.mark.parametrize("command", ["free_blocks", "share_blocks"])
def test_so_many_blocks_are_listed_and_no_more(command: str) -> None:
    pool = make_pool(2)
    lease = new_lease(pool)
    (one, _) = pool.allocate_blocks(lease, 2, 0.0).block_ids
    error = refusal(lambda: getattr(pool, command)(lease, [one] * 65_537, 0.0))
    assert (error.field, error.metadata["value"]) == ("block_ids", "65537 ids")
    assert "must be at most 65536 in one call; list the rest in further calls" in error.message
    assert pool.block(one, 0.0).ref_count == 1
    pool.share_blocks(lease, [one] * 65_535, 0.0)
    pool.free_blocks(lease, [one] * 65_536, 0.0)
    assert pool.usage().free == 1


def test_a_lease_has_so_many_references_to_a_block_and_no_more() -> None:
    pool = make_pool(2)
    lease, other = new_lease(pool), new_lease(pool)
    (one, two) = pool.allocate_blocks(lease, 2, 0.0).block_ids
    pool.create_table(other, TableRequest([], 0), 0.0)
    pool.share_blocks(lease, [one] * 65_535, 0.0)
    error = refusal(lambda: pool.share_blocks(lease, [two, one], 0.0))
    assert (error.field, error.metadata["limit"]) == ("block_ids", "65536")
    assert f"would give lease {lease} 65537 references to block {one}, but it may have 65536" in error.message
    assert "under another lease" in error.message
    assert [pool.block(block, 0.0).ref_count for block in (one, two)] == [65_536, 1]
    pool.free_blocks(lease, [one], 0.0)
    pool.share_blocks(lease, [two, one], 0.0)
    pool.check()


# -- tokens


def test_of_more_tokens_than_the_pool_can_hold_no_more_are_looked_at() -> None:
    tokens = list(range(3 * B))
    worker, lease = Worker(4), 0
    (table,) = worker.tables(1, 3)
    worker.step(commits=[Commit(table, tokens)], releases=[table])
    lease = new_lease(worker.pool)

    class Tokens(list[int]):
        looked_at = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            self.looked_at += len(found)
            return found

    long = Tokens(tokens + [7] * 100_000)
    found = worker.pool.create_table(lease, TableRequest(long, 4), 1.0)
    assert (found.cached_tokens, long.looked_at) == (3 * B, 4 * B + 1)
    # All blocks of the pool are found, by one token more than they have.
    worker.pool.release_table(lease, found.table_id, 1.0)
    (table,) = worker.tables(1, 4)
    worker.step(commits=[Commit(table, list(range(4 * B)))], releases=[table])
    assert worker.pool.create_table(lease, TableRequest(list(range(4 * B + 9)), 4), 1.0).cached_tokens == 4 * B


def test_a_prompt_is_hashed_as_far_as_it_is_promised_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, sha256 = list[int](), prefix.sha256

    def counted(data: bytes) -> Any:
        hashed.append(len(data))
        return sha256(data)

    monkeypatch.setattr(prefix, "sha256", counted)
    worker = Worker(1000)
    promised = list(range(10 * B))
    worker.step(creates=[TableRequest([*promised, 1], 11)])

    def asking(prompt: list[int]) -> int:
        hashed.clear()
        worker.step(creates=[TableRequest(prompt, 1000, wait_for_prefix=True)])  # too many blocks: it is refused
        return len(hashed)

    beside = [99] * (900 * B)
    assert asking(beside) <= 4, "the digests of all 900 blocks were made"
    assert asking([*promised, *beside]) <= 10 + 4
    assert worker.pool.counters.prefix_pending_requests == 1


# -- blocks asked for


def test_a_call_asks_for_so_many_blocks_and_no_more() -> None:
    pool = make_pool(2 * limits.MAX_CALL_BLOCKS)
    lease = new_lease(pool)
    sessions = cast("Any", SimpleNamespace(draining=False, publish=lambda: None))
    memd = PoolService(MemdLife(pool, lambda: 0.0, 0.0, sessions, cast("Any", None)), read_only=False)

    def ask(num_blocks: int) -> list[Callable[[], Any]]:
        named = {"epoch": 7, "lease_id": lease, "num_blocks": num_blocks}
        table = pool.create_table(lease, TableRequest([], 0), 0.0).table_id
        return [
            lambda: asyncio.run(memd.allocate_blocks(pb.AllocateBlocksRequest(**named), None)),
            lambda: asyncio.run(memd.create_block_table(pb.CreateBlockTableRequest(**named), None)),
            lambda: asyncio.run(memd.extend_block_table(pb.ExtendBlockTableRequest(table_id=table, **named), None)),
        ]

    for call in ask(16_385):
        error = refusal(call)
        assert (error.field, error.metadata) == ("num_blocks", {"value": "16385", "limit": "at most 16384 in one call"})
        assert error.message.endswith("ask for the rest in further calls")
    assert pool.usage().free == 32_768
    for call in ask(16_384)[:2]:
        call()
    assert pool.usage().free == 0


def test_as_many_blocks_as_a_call_may_ask_for_are_evicted_in_time() -> None:
    most = limits.MAX_CALL_BLOCKS
    worker = Worker(most)
    (table,) = worker.tables(1, most)
    for first in range(0, most, 1024):
        worker.step(commits=[Commit(table, range(first * B, (first + 1024) * B))])
    worker.step(releases=[table])
    lease = new_lease(worker.pool)
    taken = seconds(lambda: worker.pool.allocate_blocks(lease, most, 1.0))
    assert worker.pool.counters.evicted_blocks == most
    assert taken < BOUND_S, f"{taken:.2f} s"
