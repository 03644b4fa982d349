"""A worker's tables and reserve, beside the pool's own: both must agree after every step, and KV is never another's."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from inferd.core.block_tables import BlockCopy, BlockTables, ReserveShortError
from inferd.core.ports import Grant, Step, TableRequest
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from memd.core.values import BlockState
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import LAYOUT_VERSION, Format, LayerShape, PagedLayout
from pagepool.pool_values import CopyOnWrite, Fork, Take, Truncate
from tests.cpu.memory_pool import MemoryPool
from tests.cpu.sharing_rig import History, Kv, Player

SIZE = 8
LAYERS = (LayerShape(1, 4, 4), LayerShape(2, 4, 8))
LAYOUT = PagedLayout(SIZE, LAYERS, Format.F32)


def make_pool(num_blocks: int) -> Pool:
    pool = Pool(7, SIZE, slab_bytes=1 << 24, max_num_blocks=num_blocks)
    pool.declare(Geometry(LAYERS, Format.F32, False, LAYOUT_VERSION, bytes(32), "fake"))
    return pool


@pytest.fixture
def pool() -> Pool:
    return make_pool(40)


@pytest.fixture
def worker(pool: Pool) -> MemoryPool:
    return MemoryPool(pool, threading.Event())


@pytest.fixture
def tables() -> BlockTables:
    return BlockTables(SIZE)


def send(worker: MemoryPool, tables: BlockTables) -> None:
    for step in tables.take_steps():
        worker.submit(step)
    worker.pool.check()
    for table in worker.pool.tables_after(0, 100, 0.0):
        mine = tables[table.table_id]
        assert (mine.block_ids, list(mine.entries)) == (list(table.blocks.block_ids), list(table.blocks.entries))
        assert (mine.num_tokens, mine.cached_tokens) == (table.num_tokens, table.cached_tokens)


def reserve(worker: MemoryPool, tables: BlockTables, num_blocks: int = 8, num_tables: int = 4) -> None:
    tables.ask(99, num_blocks, num_tables)
    send(worker, tables)
    (grant,) = worker.poll()
    assert isinstance(grant, Grant)
    tables.granted(grant)


def create(worker: MemoryPool, tables: BlockTables, num_blocks: int, tokens: list[int] | None = None) -> int:
    worker.submit(Step(creates=[TableRequest(1, tokens or [], num_blocks)]))
    (grant,) = worker.poll()
    assert isinstance(grant, Grant)
    return tables.created(grant).table_id


def write(worker: MemoryPool, tables: BlockTables, table_id: int, count: int) -> list[BlockCopy]:
    copies = prepare(tables, table_id, count)
    tables.commit(table_id, [5] * count)
    send(worker, tables)
    return copies


def prepare(tables: BlockTables, table_id: int, count: int) -> list[BlockCopy]:
    tables.copied(len(copies := tables.prepare(table_id, count)))
    return copies


def test_the_last_of_those_that_share_a_block_writes_in_place(worker: MemoryPool, tables: BlockTables) -> None:
    reserve(worker, tables)
    first = create(worker, tables, 1)
    write(worker, tables, first, 3)
    shared = tables[first].block_ids[0]
    second = tables.fork(first)
    (copied,) = write(worker, tables, first, 1)
    assert copied == BlockCopy(tables[second].entries[0], tables[first].entries[0])
    assert tables[first].block_ids[0] != shared == tables[second].block_ids[0]
    assert write(worker, tables, second, 1) == []
    assert tables[second].block_ids[0] == shared
    assert worker.pool.block(shared, 0.0).ref_count == 1


def test_a_shared_block_without_tokens_is_replaced_without_a_copy(worker: MemoryPool, tables: BlockTables) -> None:
    reserve(worker, tables)
    first = create(worker, tables, 3)
    write(worker, tables, first, SIZE)
    second = tables.fork(first)
    assert write(worker, tables, second, SIZE + 1) == []
    assert tables[first].block_ids[0] == tables[second].block_ids[0]
    assert not set(tables[first].block_ids[1:]) & set(tables[second].block_ids[1:])


def test_forks_are_written_and_released_without_a_word_from_memd(worker: MemoryPool, tables: BlockTables) -> None:
    reserve(worker, tables)
    first = create(worker, tables, 1)
    write(worker, tables, first, 3)
    worker.held = True
    second = tables.fork(first)
    prepare(tables, second, SIZE)
    tables.commit(second, [6] * SIZE)
    third = tables.fork(second)
    tables.release(second)
    assert tables.truncate(third, SIZE + 1) == []
    send(worker, tables)
    assert [len(step.operations) for step in worker.steps[-2:]] == [3, 3]
    assert list(worker.pool.table(third, 0.0).token_ids) == [5] * 3 + [6] * 6


def test_inside_a_sealed_block_a_table_is_truncated_by_copy(worker: MemoryPool, tables: BlockTables) -> None:
    reserve(worker, tables)
    first = create(worker, tables, 3)
    write(worker, tables, first, 2 * SIZE)
    sealed = tables[first].block_ids[0]
    (copied,) = tables.truncate(first, 5)
    assert copied.target == tables[first].entries[0]
    tables.copied(1)
    send(worker, tables)
    assert len(tables[first].block_ids) == 2, "the block that was never written stays"
    assert worker.pool.block(sealed, 0.0).state is BlockState.CACHED
    assert tables.truncate(first, 3) == [], "the copy is the table's own"
    assert tables.truncate(first, 0) == []
    send(worker, tables)
    again = create(worker, tables, 3, [5] * SIZE + [1])
    assert tables[again].block_ids[0] == sealed


def test_what_the_reserve_cannot_serve_changes_nothing(worker: MemoryPool, tables: BlockTables) -> None:
    first = create(worker, tables, 1)
    write(worker, tables, first, SIZE)
    for call in (lambda: tables.fork(first), lambda: tables.prepare(first, 1), lambda: tables.truncate(first, 1)):
        with pytest.raises(ReserveShortError):
            call()
    assert tables.take_steps() == []
    reserve(worker, tables, 1, 1)
    second = tables.fork(first)
    prepare(tables, second, 1)
    with pytest.raises(ReserveShortError, match="1 blocks are needed, but 0"):
        prepare(tables, first, 1)
    tables.retract(second, SIZE)
    send(worker, tables)


def test_calls_that_make_no_sense_are_refused(worker: MemoryPool, tables: BlockTables) -> None:
    reserve(worker, tables)
    first = create(worker, tables, 2)
    write(worker, tables, first, 3)
    with pytest.raises(ValueError, match="truncated to 4 tokens, but has 3"):
        tables.truncate(first, 4)
    with pytest.raises(ValueError, match=r"1 tokens are committed .* but 0 were prepared"):
        tables.commit(first, [1])
    prepare(tables, first, 2)
    with pytest.raises(ValueError, match=r"2 tokens are being written to table"):
        tables.fork(first)
    with pytest.raises(ValueError, match=r"retracted to 2, but .* are 3 to 5"):
        tables.retract(first, 2)
    tables.retract(first, 3)
    tables.fork(first)
    assert tables.prepare(first, 0) == []
    send(worker, tables)


def test_what_is_asked_for_ahead_counts_and_unused_blocks_go_back(worker: MemoryPool, tables: BlockTables) -> None:
    tables.ask(1, 8, 2)
    tables.ask(2, 8, 2)
    tables.ask(3, 10, 2)
    send(worker, tables)
    grants = worker.poll()
    seen = [(each.ref, len(each.block_ids), each.num_tables) for each in grants if isinstance(each, Grant)]
    assert seen == [(1, 8, 2), (3, 2, 0)]
    for grant in grants:
        assert isinstance(grant, Grant)
        tables.granted(grant)
    assert (tables.spare_blocks, tables.spare_ids, worker.pool.usage().held) == (10, 2, 10)
    tables.give_back(4)
    send(worker, tables)
    assert (tables.spare_blocks, worker.pool.usage().held) == (6, 6)
    tables.ask(4, 100, 0)
    send(worker, tables)
    (refusal,) = worker.poll()
    tables.refused(4)
    assert not isinstance(refusal, Grant)
    assert tables.spare_blocks == 6


def test_a_step_message_says_it_in_the_order_in_which_it_was_done(worker: MemoryPool, tables: BlockTables) -> None:
    reserve(worker, tables)
    first = create(worker, tables, 1)
    prepare(tables, first, 3)
    tables.commit(first, [1, 2, 3])
    second = tables.fork(first)
    prepare(tables, second, SIZE)
    tables.truncate(second, 2)
    (step,) = tables.take_steps()
    kinds = [type(each) for each in step.operations]
    assert (len(step.commits), kinds) == (1, [Fork, CopyOnWrite, Take, Truncate])
    tables.release(second)
    prepare(tables, first, 1)
    tables.commit(first, [4])
    assert [len(each.commits) for each in tables.take_steps()] == [1], "what is released was the table's own"
    third = tables.fork(first)
    tables.release(third)
    prepare(tables, first, 1)
    tables.commit(first, [5])
    assert [len(each.commits) for each in tables.take_steps()] == [0, 1], "memd must not see a shared block written"


def test_a_commit_stands_with_a_block_taken_ahead_but_not_with_one_that_it_fills(
    worker: MemoryPool, tables: BlockTables
) -> None:
    reserve(worker, tables)
    table_id = create(worker, tables, 1)
    prepare(tables, table_id, SIZE)
    assert tables.take_ahead(table_id)
    tables.commit(table_id, list(range(SIZE)))
    (step,) = tables.take_steps()
    assert (len(step.commits), [type(each) for each in step.operations]) == (1, [Take])
    assert tables.take_ahead(table_id)
    prepare(tables, table_id, SIZE + 1)
    tables.commit(table_id, list(range(SIZE + 1)))
    steps = tables.take_steps()
    assert [(len(each.commits), len(each.operations)) for each in steps] == [(0, 1), (1, 0)]


def test_100_random_interleavings_agree_with_the_pool_after_every_step() -> None:
    pool = make_pool(30)
    worker = MemoryPool(pool, threading.Event())
    worker.on_step = lambda step: pool.check()

    def check_tokens(table_id: int, history: History) -> None:
        assert list(pool.table(table_id, 0.0).token_ids) == history.tokens

    player = Player(worker, Kv(CpuOps(np.full(30 * LAYOUT.block_bytes, 0xFF, np.uint8), LAYOUT), LAYOUT), seed=1)
    player.on_check = check_tokens
    for _ in range(100):
        player.play(20)
        assert (pool.num_tables, pool.usage().held) == (0, player.tables.spare_blocks)
    player.finish()
    pool.check()
    assert pool.usage().held == 0
    seen = (player.copied, player.cut_by_copy, player.matched, pool.counters.evicted_blocks)
    assert min(seen) > 50, seen


def part(worker: MemoryPool, tables: BlockTables, kept: int = 5) -> tuple[int, int]:
    """A table that begins with `kept` tokens of a cached block beyond a full one, and that block's entry."""
    first = create(worker, tables, 2)
    write(worker, tables, first, 2 * SIZE)
    source = tables[first].entries[1]
    tables.release(first)
    send(worker, tables)
    prompt = [5] * (SIZE + kept) + [6, 6]
    worker.submit(Step(creates=[TableRequest(1, prompt, 3, partial=True)]))
    (grant,) = worker.poll()
    assert isinstance(grant, Grant)
    return tables.created(grant).table_id, source


@pytest.mark.parametrize("count", [1, 2, SIZE])
def test_a_part_of_a_block_is_copied_before_the_first_write_and_once(
    worker: MemoryPool, tables: BlockTables, count: int
) -> None:
    table, source = part(worker, tables)
    assert tables[table].num_tokens == SIZE + 5
    assert write(worker, tables, table, count) == [BlockCopy(source, tables[table].entries[1])]
    assert write(worker, tables, table, 1) == []


def test_a_table_whose_block_is_still_to_be_copied_is_not_forked(worker: MemoryPool, tables: BlockTables) -> None:
    reserve(worker, tables)
    table, _ = part(worker, tables)
    with pytest.raises(ValueError, match=r"still to be copied into table .*: commit to it before the fork"):
        tables.fork(table)
    write(worker, tables, table, 1)
    tables.fork(table)


@pytest.mark.parametrize(("length", "copies"), [(SIZE + 4, 1), (SIZE, 0), (0, 0)])
def test_no_copy_is_made_into_a_block_that_truncation_has_dropped(
    worker: MemoryPool, tables: BlockTables, length: int, copies: int
) -> None:
    reserve(worker, tables)
    table, _ = part(worker, tables)
    assert tables.truncate(table, length) == []
    send(worker, tables)
    assert len(write(worker, tables, table, 1)) == copies
