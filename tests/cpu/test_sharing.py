"""Copies, forks and pins by example: what is given away to make room, and what never is."""

from __future__ import annotations

from typing import Any

import pytest

from memd.core.cached import CachedFrames
from memd.core.errors import InvariantError
from memd.core.geometry import Geometry
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
    return any(block.block_id == block_id for block in pool.blocks_after(0, 100, None, 0.0))


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
    assert pool.available_blocks == 4
    table = pool.create_table(client, TableRequest([*A, 0], 8), 0.0)
    assert (table.cached_tokens, pool.available_blocks) == (4 * B, 0)
    pool.release_table(client, table.table_id, 0.0)
    assert pool.available_blocks == 4
    pool.tick(10.0)
    assert pool.available_blocks == 8
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
    assert pool.take_capacity_news() == []
    pool.tick(5.0)
    assert pool.take_capacity_news() == [(worker, 8)]


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
    return next(queue for _, queue in sorted(frames._queues.items(), reverse=True) if queue).pop()


@pytest.mark.parametrize(
    ("place", "wrong", "test"),
    [
        ((BlockStore, "touch"), lambda *_: None, test_a_copy_evicts_others_but_never_its_sources),
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
