"""Lists of blocks and tables, in a memd whose other callers are served meanwhile, and while the pool changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from memd import paging, service
from memd.core import views
from memd.core.block import Blocks
from memd.core.operations import Fork
from memd.core.pool import Pool
from memd.core.values import BlockState, Commit, TableRequest
from memd.service import MemdLife, PoolService
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1 import types_pb2
from tests.cpu.core_worker import B, make_pool
from tests.cpu.test_step_cost import Worker, calls

Answer = TypeVar("Answer")

MANY = 50_000


def serving(pool: Pool) -> PoolService:
    sessions = cast("Any", SimpleNamespace(draining=False, publish=lambda: None))
    return PoolService(MemdLife(pool, time.monotonic, 0.0, sessions, cast("Any", None)), read_only=True)


async def longest_turn(call: Coroutine[Any, Any, Answer]) -> tuple[Answer, int, float]:
    """What a call answers; how often others had their turn meanwhile, and the longest time that they waited for it."""
    task, turns, longest = asyncio.ensure_future(call), 0, 0.0
    while not task.done():
        begin = time.process_time()
        await asyncio.sleep(0)
        longest = max(longest, time.process_time() - begin)
        turns += 1
    return task.result(), turns, longest


def pages_of_blocks(pool: Pool, page_size: int, state: int = 0) -> list[list[int]]:
    async def read() -> list[list[int]]:
        token, pages = "", list[list[int]]()
        while token or not pages:
            request = pb.ListBlocksRequest(page_size=page_size, state=cast("Any", state), page_token=token)
            answer = await serving(pool).list_blocks(request, None)
            pages.append([block.block_id for block in answer.blocks])
            token = answer.next_page_token
        return pages

    return asyncio.run(read())


def test_pages_end_where_they_should_whatever_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_AT_ONCE", 3)
    pool = make_pool(12)
    lease = pool.create_lease("client", 100.0, 0.0).lease_id
    ids = list(pool.allocate_blocks(lease, 12, 0.0).block_ids)
    assert pages_of_blocks(pool, 12) == [ids]
    assert pages_of_blocks(pool, 5) == [ids[:5], ids[5:10], ids[10:]]
    assert pages_of_blocks(pool, 6) == [ids[:6], ids[6:]]
    pool.free_blocks(lease, [*ids[1:5], ids[11]], 0.0)
    left = [ids[0], *ids[5:11]]
    assert pages_of_blocks(pool, 4) == [left[:4], left[4:]]
    assert pages_of_blocks(pool, 4, BlockState.HELD) == [left[:4], left[4:]]
    assert pages_of_blocks(pool, 7, BlockState.HELD) == [left]
    assert pages_of_blocks(pool, 4, BlockState.CACHED) == [[]]


def test_ids_stay_in_order_while_most_of_them_go() -> None:
    blocks, there = Blocks(4, B), list[int]()
    for turn in range(40):
        if len(there) == 4:
            for block_id in there[:3]:
                frame = blocks.frame_of[block_id]
                blocks.drop_reference(frame, 1)
                blocks.vacate(frame)
            there = there[3:]
        free = [frame for frame in range(4) if not blocks.ids[frame]]
        blocks.occupy(free[: 1 + turn % 3], (1,), 0.0)
        there = sorted(blocks.frame_of)
        assert [one for one in blocks.order if one in blocks.frame_of] == there
        assert len(blocks.order) <= 8


def test_the_last_page_costs_as_much_as_the_first_and_a_filter_without_match_keeps_nobody_waiting() -> None:
    pool = make_pool(MANY)
    lease = pool.create_lease("client", 1e6, 0.0).lease_id
    ids = pool.allocate_blocks(lease, MANY, 0.0).block_ids

    def page(after: int) -> int:
        return calls(lambda: pool.blocks_between(after, pool.block_id_after(after, 10), None, 0.0))

    assert page(ids[-11]) == page(0)
    request = pb.ListBlocksRequest(state=types_pb2.BLOCK_STATE_CACHED)
    answer, turns, longest = asyncio.run(longest_turn(serving(pool).list_blocks(request, None)))
    assert (len(answer.blocks), answer.next_page_token) == (0, "")
    assert turns > MANY / 250
    assert longest < 0.1
    request = pb.ListBlocksRequest(page_size=10_000)
    answer, turns, longest = asyncio.run(longest_turn(serving(pool).list_blocks(request, None)))
    assert (len(answer.blocks), bool(answer.next_page_token), turns > 50) == (10_000, True, True)
    assert longest < 0.1, "it was 0.2 s"


def long_tables(count: int, length: int) -> tuple[Pool, list[int]]:
    worker = Worker(length)
    (table,) = worker.tables(1, length)
    new = worker.ids(count - 1)
    for one in new:
        worker.step(operations=[Fork(table, one)])
    return worker.pool, [table, *new]


def test_no_more_tables_are_looked_at_than_a_page_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "MAX_PAGE_BYTES", 200_000)
    pool, tables = long_tables(200, 2000)
    looked_at, table_view = list[int](), views.table_view

    def view(state: Any, one: Any, now: float) -> Any:
        looked_at.append(one.table_id)
        return table_view(state, one, now)

    monkeypatch.setattr(views, "table_view", view)
    request = pb.ListBlockTablesRequest(page_size=1000)
    answer, turns, longest = asyncio.run(longest_turn(serving(pool).list_block_tables(request, None)))
    listed = [one.table_id for one in answer.block_tables]
    assert looked_at == tables[: len(listed) + 1]
    assert len(listed) <= turns
    assert answer.ByteSize() < 210_000
    assert longest < 0.1, "all tables were encoded at once: it was 0.2 s"
    while answer.next_page_token:
        request.page_token = answer.next_page_token
        answer = asyncio.run(serving(pool).list_block_tables(request, None))
        listed += [one.table_id for one in answer.block_tables]
    assert listed == tables


def test_a_list_goes_on_while_its_tables_are_released_and_used() -> None:
    worker = Worker(9)
    one, two, three = worker.tables(3, 3)
    listing = worker.pool.tables_after(0, 9, 5.0)
    assert next(listing).table_id == one
    worker.step(7.0, releases=[two], commits=[Commit(three, [1])], creates=[TableRequest([], 1)])
    (rest,) = listing
    assert (rest.table_id, rest.num_tokens, rest.idle_s) == (three, 1, 0.0)
