"""Blocks that move under a worker: whatever it does meanwhile, its tables are memd's, and its steps read its own KV."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from inferd.core.acknowledgements import Acknowledgements
from inferd.core.block_tables import BlockTables
from inferd.core.ports import Grant, Step, TableRequest
from memd.core.errors import InvariantError
from memd.core.pool import Pool
from pagekernels.cpu.ops import CpuOps
from pagepool.errors import PagepoolError
from pagepool.pool_values import Remap
from tests.cpu.flight import LatePool
from tests.cpu.memory_pool import MemoryPool
from tests.cpu.remap_bugs import (
    acknowledges_at_once,
    forgets_forks_under_way,
    gives_away_at_once,
    merges_what_is_not_equal,
    replaces_whatever_is_there,
)
from tests.cpu.sharing_rig import History, Kv, Player
from tests.cpu.test_block_tables import LAYOUT, SIZE, make_pool

PROMPT = [5] * 2 * SIZE
NUM_BLOCKS = 28


@pytest.fixture
def pool() -> Pool:
    return make_pool(40)


class Worker:
    """Tables and their session; news wait until they are heard."""

    def __init__(self, pool: Pool) -> None:
        self.session = MemoryPool(pool, threading.Event(), takes_remaps=True)
        self.tables = BlockTables(SIZE)
        self.news: list[Remap] = []
        self.tables.ask(99, 8, 4)
        (grant,) = self.tell()
        self.tables.granted(grant)

    def tell(self, acknowledged: int = 0) -> list[Grant]:
        for step in [*self.tables.take_steps(), Step(acknowledged=acknowledged)]:
            if step:
                self.session.submit(step)
        events = self.session.poll()
        self.news += [event for event in events if isinstance(event, Remap)]
        return [event for event in events if isinstance(event, Grant)]

    def create(self, num_blocks: int = 4) -> int:
        self.session.submit(Step(creates=[TableRequest(1, PROMPT, num_blocks, no_match=True)]))
        (grant,) = self.tell()
        return self.tables.created(grant).table_id

    def write(self, table_id: int, tokens: list[int]) -> None:
        self.tables.copied(len(self.tables.prepare(table_id, len(tokens))))
        self.tables.commit(table_id, tokens)
        self.tell()

    def hear(self) -> None:
        for news in self.news:
            self.tables.remap(news)

    def check(self) -> None:
        """memd's tables are the worker's."""
        self.session.pool.check()
        seen = {one.table_id: list(one.blocks.block_ids) for one in self.session.pool.tables_after(0, 99, 0.0)}
        assert {one: self.tables[one].block_ids for one in seen} == seen
        for one in seen:
            run = self.session.pool.table(one, 0.0).blocks
            assert list(self.tables[one].entries) == list(run.entries)


@pytest.fixture
def worker(pool: Pool) -> Worker:
    return Worker(pool)


@pytest.fixture
def twins(worker: Worker) -> tuple[int, int]:
    """Two tables that computed the same, so that the second was merged into the first; their worker has not heard."""
    first, second = worker.create(), worker.create()
    worker.write(first, PROMPT)
    worker.write(second, PROMPT)
    assert [(news.table_id, news.index) for news in worker.news] == [(second, 0), (second, 1)]
    return first, second


def test_a_table_has_the_new_blocks_and_steps_in_flight_the_old_entries(worker: Worker, twins: tuple[int, int]) -> None:
    first, second = twins
    before = worker.tables[second].entries
    kept = list(before)
    worker.hear()
    assert worker.tables[second].entries is not before
    assert list(before) == kept
    assert worker.tables[second].block_ids[:2] == worker.tables[first].block_ids[:2]
    worker.check()
    worker.hear()
    worker.check()


def test_a_fork_under_way_is_remapped_too(worker: Worker, twins: tuple[int, int]) -> None:
    first, second = twins
    third = worker.tables.fork(second)
    worker.tell()
    worker.hear()
    assert worker.tables[third].block_ids[:2] == worker.tables[first].block_ids[:2]
    worker.check()


def test_a_truncation_under_way_is_one_of_the_new_block(worker: Worker, twins: tuple[int, int]) -> None:
    _, second = twins
    old = worker.tables[second].block_ids[1]
    (copy,) = worker.tables.truncate(second, SIZE + 3)
    assert worker.session.pool.block(old, 0.0).entry == copy.source
    worker.tables.copied(1)
    worker.tell()
    assert worker.session.pool.block(old, 0.0).sealed, "the source of a copy is kept until the Remap is acknowledged"
    worker.hear()
    worker.check()


def test_a_copy_on_write_under_way_makes_a_block_of_its_own(worker: Worker, twins: tuple[int, int]) -> None:
    _, second = twins
    worker.write(second, [7])
    third = worker.tables.fork(second)
    worker.tables.copied(len(worker.tables.prepare(third, 1)))
    worker.tables.commit(third, [8])
    worker.tell()
    worker.hear()
    worker.check()
    assert worker.tables[second].block_ids[2] != worker.tables[third].block_ids[2]


@pytest.mark.parametrize("how", ["release", "refill"])
def test_news_of_what_is_gone_change_nothing(worker: Worker, twins: tuple[int, int], how: str) -> None:
    _, second = twins
    if how == "release":
        worker.tables.release(second)
    else:
        worker.tables.truncate(second, 0)
        worker.write(second, [6] * SIZE)
        assert worker.tables[second].block_ids[0] != worker.news[0].old_block_id
    worker.tell()
    worker.hear()
    worker.check()
    worker.tell(worker.news[-1].sequence)
    assert worker.session.pool.usage().quarantined == 0


def test_a_remap_is_acknowledged_when_no_step_in_flight_was_launched_before_it() -> None:
    known = Acknowledgements()
    known.heard(1)
    assert (known.take(), known.take()) == (1, 0)
    known.launched()
    known.heard(2)
    known.launched()
    known.heard(3)
    assert known.take() == 0
    known.collected()
    assert (known.take(), known.take()) == (2, 0)
    known.heard(4, prepared=True)
    known.collected()
    assert known.take() == 3
    known.launched()
    assert known.take() == 0
    known.collected()
    assert known.take() == 4
    known.heard(2)
    assert known.take() == 0, "told again on a new stream"


def likely(player: Player) -> Callable[[History], int]:
    """Tokens that other tables often have too."""
    return lambda history: len(history.tokens) // 3 % 2 if player.random.random() < 0.95 else 2


def make_players(pool: Pool) -> list[Player]:
    """Two workers that often compute the same, hear of it late, and run steps late."""
    kv = Kv(CpuOps(np.full(NUM_BLOCKS * LAYOUT.block_bytes, 0xFF, np.uint8), LAYOUT), LAYOUT)
    sessions = [LatePool(MemoryPool(pool, threading.Event(), takes_remaps=True), seed) for seed in range(2)]
    players = [Player(session, kv, seed) for seed, session in enumerate(sessions)]
    players[1].known = players[0].known
    for player in players:
        player.next_token, player.alone = likely(player), 0.6
    return players


def agree(pool: Pool, player: Player) -> None:
    """When it has heard everything, a worker has the tables that memd has."""
    player.pool.wait(0.0)
    player.hear()
    for table_id, history in player.histories.items():
        seen, mine = pool.table(table_id, 0.0), player.tables[table_id]
        assert (list(seen.blocks.block_ids), list(seen.token_ids)) == (mine.block_ids, history.tokens)
        assert list(seen.blocks.entries) == list(mine.entries)


def play(count: int, moves: int = 24) -> tuple[Pool, list[Player]]:
    """Interleavings, step by step in random order; afterwards nothing moves any more."""
    pool, dice = make_pool(NUM_BLOCKS), random.Random(3)
    players = make_players(pool)
    for _ in range(count):
        for number in range(moves):
            player = dice.choice(players)
            player._move()
            player.fly()
            player.send()
            if number % 4 == 0:
                pool.check()
                players[0].check()
                players[1].check()
        for player in players:
            agree(pool, player)
            player.leave()
    for player in players:
        player.finish()
    while pool.usage().quarantined:
        players[0].send()
        players[1].send()
    pool.check()
    return pool, players


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_after_random_interleavings_with_blocks_that_move_every_table_has_its_own_kv(count: int) -> None:
    pool, players = play(count)
    usage = pool.usage()
    assert (usage.quarantined, pool.num_tables) == (0, 0)
    assert usage.held == sum(player.tables.spare_blocks for player in players)
    assert min(pool.counters.merged_blocks, pool.counters.evicted_blocks) > count / 2
    for player in players:
        assert min(player.moved, player.forked, player.copied, player.cut_by_copy) > count / 8
        assert player.flight.landed > count


@pytest.mark.parametrize(
    "plant",
    [
        acknowledges_at_once,
        gives_away_at_once,
        forgets_forks_under_way,
        replaces_whatever_is_there,
        merges_what_is_not_equal,
    ],
)
def test_the_interleavings_find_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, PagepoolError)):
        play(300)
