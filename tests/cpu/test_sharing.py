"""Copies, forks and pins by example: what is given away to make room, and what never is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memd.copying import copier_of
from memd.core.cached import CachedFrames
from memd.core.errors import InvariantError
from memd.core.geometry import Geometry
from memd.core.operations import Fork, ReserveRequest
from memd.core.pins import PrefixPins
from memd.core.pool import Pool
from memd.core.store import BlockStore
from memd.core.values import BlockState, Commit, PinRequest, Step, TableRequest
from pagekernels.layout import Format, LayerShape
from pagepool.errors import PagepoolError, Reason

B = 8
GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.BF16, False, 1, b"w" * 32, "model")
A, Z = [1] * 4 * B, [9] * 2 * B


@pytest.fixture
def pool() -> Pool:
    made = Pool(7, B, 1 << 30, 8)
    made.declare(GEOMETRY)
    return made


@pytest.fixture
def client(pool: Pool) -> int:
    return pool.create_lease("client", 100.0, 0.0).lease_id


def serve(pool: Pool, tokens: list[int]) -> list[int]:
    """The ids of the blocks of a prefix that a worker has computed and released."""
    worker = pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id
    (grant,) = pool.step(worker, Step(1, creates=[TableRequest(tokens, len(tokens) // B, no_match=True)]), 0.0).grants
    pool.step(worker, Step(2, [Commit(grant.table_id, tokens)], [grant.table_id]), 0.0)
    pool.detach(worker, 0.0)
    return list(grant.blocks.block_ids)


def is_there(pool: Pool, block_id: int) -> bool:
    return any(block.block_id == block_id for block in pool.blocks_between(0, 1 << 20, None, 0.0))


def test_a_copy_evicts_others_but_never_its_sources(pool: Pool, client: int) -> None:
    ids = serve(pool, A)
    pool.allocate_blocks(client, 4, 0.0)
    tail = ids[2:]  # released first, so the first to be evicted
    run, copies = pool.sharing.copy_blocks(client, tail, 1.0)
    assert [is_there(pool, one) for one in ids] == [False, False, True, True]
    assert [(one.source, one.target) for one in copies] == list(
        zip([pool.block(one, 1.0).entry for one in tail], run.entries, strict=True)
    )
    with pytest.raises(PagepoolError) as caught:
        pool.sharing.copy_blocks(client, [tail[0]] * 2, 2.0)
    assert caught.value.reason is Reason.POOL_EXHAUSTED
    assert caught.value.metadata["available"] == "1"
    pool.check()


def test_a_copy_spares_its_sources_whatever_their_priority(pool: Pool, client: int) -> None:
    ids = serve(pool, A)
    wanted = serve(pool, Z)
    pool.prefixes.pin(PinRequest(A, 10.0, b"", -1), 0.0)
    pool.allocate_blocks(client, 2, 0.0)
    run, copies = pool.sharing.copy_blocks(client, ids[:2], 1.0)
    assert [is_there(pool, one) for one in (*ids, *wanted)] == [True, True, False, False, True, True]
    assert [pool.block(one, 1.0).num_tokens for one in run.block_ids] == [B, B]
    assert len({each for one in copies for each in (one.source, one.target)}) == 4
    pool.check()


def evict_one(pool: Pool, client: int) -> None:
    pool.allocate_blocks(client, pool.usage().free + 1, 9.0)


def matched(pool: Pool, client: int, tokens: list[int]) -> int:
    """Blocks that a table with these tokens finds."""
    table = pool.create_table(client, TableRequest([*tokens, 0], 1), 9.0)
    pool.release_table(client, table.table_id, 9.0)
    return table.cached_tokens // B


def test_a_prefix_whose_pin_has_ended_is_eaten_from_its_end(pool: Pool, client: int) -> None:
    serve(pool, A)
    pool.prefixes.pin(PinRequest(A, 5.0, pinned=True), 0.0)
    pool.tick(5.0)
    evict_one(pool, client)
    assert matched(pool, client, A) == 3


def test_a_prefix_whose_head_was_copied_is_eaten_from_its_end(pool: Pool, client: int) -> None:
    ids = serve(pool, Z)
    pool.free_blocks(client, pool.sharing.copy_blocks(client, ids, 0.0)[0].block_ids, 0.0)
    evict_one(pool, client)
    assert matched(pool, client, Z) == 1


def test_what_a_truncated_table_leaves_is_eaten_from_its_end(pool: Pool, client: int) -> None:
    serve(pool, A)
    table = pool.create_table(client, TableRequest([*A, 0], 5), 0.0)
    pool.sharing.truncate_table(client, table.table_id, B + 4, 0.0)
    evict_one(pool, client)
    assert matched(pool, client, A) == 3
    pool.check()


def test_a_copy_of_bytes_that_fails_is_the_end_of_memd(pool: Pool, client: int) -> None:
    class Broken:
        def copy(self, runs: Sequence[tuple[int, int, int]]) -> None:
            raise OSError(f"{len(runs)} runs are lost")

    _, copies = pool.sharing.copy_blocks(client, serve(pool, Z), 0.0)
    with pytest.raises(InvariantError, match="2 blocks were not copied: 2 runs are lost"):
        copier_of(Broken())(copies, pool.unit_bytes)


def test_more_copies_than_the_pool_has_blocks_are_refused_for_good(pool: Pool, client: int) -> None:
    ids = serve(pool, Z)
    with pytest.raises(PagepoolError) as caught:
        pool.sharing.copy_blocks(client, ids * 5, 0.0)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


def test_an_empty_commit_to_a_shared_block_writes_nothing(pool: Pool) -> None:
    worker = pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id
    asked = Step(1, creates=[TableRequest([1, 2, 3], 1, no_match=True)], reserves=[ReserveRequest(0, 1)])
    table, reserve = pool.step(worker, asked, 0.0).grants
    pool.step(worker, Step(2, [Commit(table.table_id, [1, 2])]), 0.0)
    pool.step(worker, Step(3, operations=[Fork(table.table_id, reserve.table_id)]), 0.0)
    pool.step(worker, Step(4, [Commit(table.table_id, [])]), 0.0)
    assert list(pool.table(table.table_id, 0.0).token_ids) == [1, 2]
    pool.check()


def test_the_copy_of_a_sealed_block_takes_its_place_when_that_is_gone(pool: Pool, client: int) -> None:
    ids = serve(pool, Z)
    run, _ = pool.sharing.copy_blocks(client, ids, 0.0)
    pool.allocate_blocks(client, 6, 0.0)
    assert not is_there(pool, ids[0])
    pool.free_blocks(client, run.block_ids, 0.0)
    assert [pool.block(one, 0.0).state for one in run.block_ids] == [BlockState.CACHED] * 2
    assert pool.create_table(client, TableRequest([*Z, 0], 2), 0.0).cached_tokens == 2 * B
    pool.check()


def test_a_fork_outlives_the_table_it_was_forked_from(pool: Pool, client: int) -> None:
    serve(pool, Z)
    first = pool.create_table(client, TableRequest([*Z, 0], 4), 0.0)
    second = pool.sharing.fork_table(client, first.table_id, 0.0)
    pool.release_table(client, first.table_id, 0.0)
    assert pool.usage().held == 4
    assert list(pool.table(second.table_id, 0.0).token_ids) == Z
    pool.check()
    pool.release_lease(client, 0.0)
    assert (pool.usage().held, pool.usage().cached) == (0, 2)


def test_a_pinned_prefix_that_is_matched_costs_no_room(pool: Pool, client: int) -> None:
    serve(pool, A)
    pool.prefixes.pin(PinRequest(A, 10.0, pinned=True), 0.0)
    assert pool.usage().available == 4
    table = pool.create_table(client, TableRequest([*A, 0], 8), 0.0)
    assert (table.cached_tokens, pool.usage().available) == (4 * B, 0)
    pool.release_table(client, table.table_id, 0.0)
    assert pool.usage().available == 4
    pool.tick(10.0)
    assert pool.usage().available == 8
    pool.check()


def test_pinning_again_and_again_keeps_one_note_of_each_block(pool: Pool) -> None:
    serve(pool, A)
    for second in range(100):
        pool.prefixes.pin(PinRequest(A, 1000.0, pinned=True), float(second))
    assert len(pool.prefixes._ends) <= 2 * pool.num_blocks
    pool.tick(1098.9)
    assert pool.usage().pinned == 4, "the last word counts"
    pool.tick(1099.0)
    assert pool.usage().pinned == 0
    pool.check()


def test_who_waits_hears_that_a_pin_has_ended(pool: Pool) -> None:
    serve(pool, A)
    pool.prefixes.pin(PinRequest(A, 5.0, pinned=True), 0.0)
    worker = pool.attach("worker", "other", 100.0, 0.0).lease.lease_id
    assert pool.step(worker, Step(1, creates=[TableRequest([5], 8)]), 0.0).refusals
    assert pool.waiting.take_news() == []
    pool.tick(5.0)
    assert pool.waiting.take_news() == [(worker, 8)]


def test_eviction_goes_by_priority_and_spares_what_is_pinned(pool: Pool, client: int) -> None:
    wanted, plain, pinned, unwanted = (serve(pool, [token] * 2 * B)[0] for token in range(4))
    for token, priority, is_pinned in ((0, 5, False), (2, -9, True), (3, -1, False)):
        pool.prefixes.pin(PinRequest([token] * 2 * B, 10.0, b"", priority, is_pinned), 0.0)
    for gone in (unwanted, plain, wanted):
        pool.allocate_blocks(client, 2, 0.0)
        pool.check()
        assert not is_there(pool, gone)
    with pytest.raises(PagepoolError):
        pool.allocate_blocks(client, 1, 0.0)
    assert is_there(pool, pinned)


def pops_the_most_wanted(frames: CachedFrames) -> int:
    queues = frames.orders()[0]._queues
    return next(queue for _, queue in sorted(queues.items(), reverse=True) if queue).pop()


@pytest.mark.parametrize(
    ("place", "wrong", "test"),
    [
        (
            (BlockStore, "grant_beside"),
            lambda self, count, holders, _, now: self.grant(count, holders, now),
            test_a_copy_evicts_others_but_never_its_sources,
        ),
        (
            (BlockStore, "num_evictable"),
            lambda self, frames: sum(not self.blocks.holders[frame] for frame in frames),
            test_a_pinned_prefix_that_is_matched_costs_no_room,
        ),
        ((CachedFrames, "pop"), pops_the_most_wanted, test_eviction_goes_by_priority_and_spares_what_is_pinned),
        ((PrefixPins, "tick"), lambda *_: None, test_a_pinned_prefix_that_is_matched_costs_no_room),
    ],
)
def test_the_examples_find_a_planted_bug(
    monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], wrong: Any, test: Any
) -> None:
    pool = Pool(7, B, 1 << 30, 8)
    pool.declare(GEOMETRY)
    monkeypatch.setattr(*place, wrong)
    with pytest.raises((AssertionError, InvariantError, PagepoolError)):
        test(pool, pool.create_lease("client", 100.0, 0.0).lease_id)
