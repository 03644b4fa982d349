"""The pool's commands by example: geometry, blocks, tables and steps; what is refused changes nothing."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from memd.core.accounts import Usage
from memd.core.errors import InvariantError
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from memd.core.values import BlockState, Commit, ExtendRequest, Holder, RefusalReason, Step, TableRequest
from pagekernels.layout import Format, LayerShape, pack_entry
from pagepool.errors import PagepoolError, Reason

B = 8
GEOMETRY = Geometry((LayerShape(1, 8, 8), LayerShape(2, 4, 4, 16)), Format.BF16, False, 1, b"w" * 32, "model")


@pytest.fixture
def pool() -> Pool:
    made = Pool(7, B, 1 << 30, 8)
    made.declare(GEOMETRY)
    return made


@pytest.fixture
def client(pool: Pool) -> int:
    return pool.create_lease("client", 100.0, 0.0).lease_id


@pytest.fixture
def worker(pool: Pool) -> int:
    return pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id


def everything(pool: Pool) -> Any:
    blocks, tables = pool.blocks_between(0, 1 << 20, None, 0.0), pool.tables_after(0, 100, 0.0)
    return blocks, [pool.table(one.table_id, 0.0) for one in tables], pool.usage(), pool.num_leases


def refusal(pool: Pool, command: Callable[[], object]) -> Reason:
    """Why a command is refused; it must have changed nothing."""
    before = everything(pool)
    with pytest.raises(PagepoolError) as error:
        command()
    assert everything(pool) == before
    pool.check()
    return error.value.reason


# -- geometry


def test_the_pool_is_cut_by_the_first_geometry_and_bounded_by_slab_and_flag() -> None:
    pool = Pool(7, B, 10_000)
    assert (pool.num_blocks, pool.block_bytes, pool.usage(), pool.geometry) == (0, 0, Usage(0, 0, 0, 0, 0), None)
    pool.declare(GEOMETRY)
    elements = B * (16 + 2 * 8)
    assert (pool.unit_bytes, pool.block_bytes) == (384, 768)
    assert pool.unit_bytes >= elements + 4 * 6
    assert (pool.num_blocks, pool.geometry) == (10_000 // 768, GEOMETRY)
    capped = Pool(7, B, 10_000, 5)
    capped.declare(GEOMETRY)
    assert (capped.num_blocks, capped.usage()) == (5, Usage(5, 5, 0, 0, 0))


def test_the_same_weights_by_another_name_share_the_pool(pool: Pool) -> None:
    version = pool.version
    pool.declare(dataclasses.replace(GEOMETRY, model_name="copy"))
    assert (pool.version, pool.num_blocks) == (version, 8)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"format": Format.F16}, "geometry.format", "F16, but the pool was cut with BF16"),
        ({"layers": GEOMETRY.layers[:1]}, "geometry.layers", "1, but the pool was cut with 2"),
        ({"layers": (GEOMETRY.layers[0], LayerShape(2, 4, 4, 32))}, "geometry.layers[1].window", "32, but .* with 16"),
        ({"model_digest": b"v" * 32}, "geometry.model_digest", "other weights, though both are called 'model'"),
        ({"model_digest": b"v" * 32, "model_name": "b"}, "geometry.model_digest", "other weights .'b', not 'model'"),
    ],
)
def test_another_geometry_is_refused_by_its_first_difference(
    pool: Pool, change: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(PagepoolError, match=text) as error:
        pool.declare(dataclasses.replace(GEOMETRY, **change))
    assert (error.value.reason, error.value.field) == (Reason.GEOMETRY_MISMATCH, field)
    assert pool.geometry == GEOMETRY


@pytest.mark.parametrize(("ours", "theirs", "way_out"), [(1, 2, "cpu, or memd with --device cuda"), (2, 1, "cuda, or")])
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_byte_order_of_other_memory_is_refused_with_both_ways_out(
    ours: int, theirs: int, way_out: str, is_cut: bool
) -> None:
    pool = Pool(7, B, 1 << 30, layout_version=ours)
    if is_cut:
        pool.declare(dataclasses.replace(GEOMETRY, layout_version=ours))
    with pytest.raises(PagepoolError, match=f"start the worker with --device {way_out}") as error:
        pool.declare(dataclasses.replace(GEOMETRY, layout_version=theirs))
    assert (error.value.reason, error.value.field) == (Reason.DEVICE_MISMATCH, "geometry.layout_version")
    assert (pool.num_blocks > 0) == is_cut


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": Format.FP8_E4M3}, "geometry.format"),
        ({"key_means": True}, "geometry.key_means"),
        ({"layout_version": 3}, "geometry.layout_version"),
        ({"model_digest": b"short"}, "geometry.model_digest"),
        ({"layers": ()}, "geometry.layers"),
        ({"layers": (LayerShape(0, 8, 8),)}, "geometry.layers"),
    ],
)
def test_an_impossible_geometry_is_refused_and_leaves_the_pool_uncut(change: dict[str, Any], field: str) -> None:
    pool = Pool(7, B, 1 << 30)
    with pytest.raises(PagepoolError) as error:
        pool.declare(dataclasses.replace(GEOMETRY, **change))
    assert (error.value.reason, error.value.field, pool.num_blocks) == (Reason.INVALID_FIELD, field, 0)


def test_a_slab_too_small_for_one_block_names_the_flag_and_the_bytes_needed() -> None:
    with pytest.raises(PagepoolError, match="--pool-bytes is 767, but must be at least 768") as error:
        Pool(7, B, 767).declare(GEOMETRY)
    assert error.value.field == "--pool-bytes"


def test_a_cap_below_one_block_is_refused() -> None:
    with pytest.raises(PagepoolError, match="--max-num-blocks is 0"):
        Pool(7, B, 1 << 30, 0)


def test_another_epoch_is_refused_by_name(pool: Pool) -> None:
    pool.require_epoch(7)
    with pytest.raises(PagepoolError, match="epoch is 8, but this memd life is 7") as error:
        pool.require_epoch(8)
    assert error.value.reason == Reason.EPOCH_MISMATCH


def test_nothing_can_be_allocated_before_the_pool_is_cut() -> None:
    pool = Pool(7, B, 1 << 30)
    lease = pool.create_lease("client", 10.0, 0.0).lease_id
    assert refusal(pool, lambda: pool.allocate_blocks(lease, 1, 0.0)) == Reason.POOL_WITHOUT_GEOMETRY
    assert refusal(pool, lambda: pool.create_table(lease, TableRequest([1], 1), 0.0)) == Reason.POOL_WITHOUT_GEOMETRY
    assert refusal(pool, lambda: pool.free_blocks(lease, [1], 0.0)) == Reason.BLOCK_NOT_FOUND


# -- blocks


def test_allocated_blocks_have_rising_ids_and_packed_places(pool: Pool, client: int) -> None:
    run = pool.allocate_blocks(client, 3, 0.0)
    assert run.block_ids == [1, 2, 3]
    assert run.entries == [pack_entry(Format.BF16, 0, unit) for unit in (0, 2, 4)]
    view = pool.block(2, 5.0)
    assert (view.state, view.ref_count, view.idle_s, view.sealed) == (BlockState.HELD, 1, 5.0, False)
    assert view.holders == [Holder(client, 0, 1)]


def test_ids_are_never_used_twice_though_places_are(pool: Pool, client: int) -> None:
    first = pool.allocate_blocks(client, 8, 0.0)
    pool.free_blocks(client, first.block_ids, 0.0)
    second = pool.allocate_blocks(client, 8, 0.0)
    assert second.block_ids == list(range(9, 17))
    assert sorted(second.entries) == sorted(first.entries)


@pytest.mark.parametrize(
    ("count", "reason"),
    [(0, Reason.INVALID_FIELD), (6, Reason.POOL_EXHAUSTED), (9, Reason.REQUEST_TOO_LARGE)],
)
def test_an_allocation_is_whole_or_nothing(pool: Pool, client: int, count: int, reason: Reason) -> None:
    pool.allocate_blocks(client, 3, 0.0)
    assert refusal(pool, lambda: pool.allocate_blocks(client, count, 0.0)) == reason


def test_a_full_pool_says_when_to_retry_and_what_there_is(pool: Pool, client: int) -> None:
    pool.allocate_blocks(client, 7, 0.0)
    with pytest.raises(PagepoolError, match="2 blocks were asked for, but only 1 of the pool's 8") as error:
        pool.allocate_blocks(client, 2, 0.0)
    assert error.value.retry_after_s is not None
    assert error.value.metadata == {"asked": "2", "available": "1", "total": "8", "pinned": "0"}


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], Reason.INVALID_FIELD),
        ([1, 99], Reason.BLOCK_NOT_FOUND),
        ([1, 2, 1], Reason.BLOCK_NOT_HELD),
        ([1, 4], Reason.BLOCK_NOT_HELD),
    ],
)
def test_freeing_is_whole_or_nothing(pool: Pool, client: int, ids: list[int], reason: Reason) -> None:
    pool.allocate_blocks(client, 3, 0.0)
    other = pool.create_lease("other", 100.0, 0.0).lease_id
    assert pool.allocate_blocks(other, 1, 0.0).block_ids == [4]
    assert refusal(pool, lambda: pool.free_blocks(client, ids, 0.0)) == reason


def test_a_block_freed_twice_is_not_found(pool: Pool, client: int) -> None:
    pool.allocate_blocks(client, 1, 0.0)
    pool.free_blocks(client, [1], 0.0)
    assert refusal(pool, lambda: pool.free_blocks(client, [1], 0.0)) == Reason.BLOCK_NOT_FOUND


def test_a_block_is_freed_as_often_as_it_is_held(pool: Pool, client: int) -> None:
    pool.allocate_blocks(client, 1, 0.0)
    pool.share_blocks(client, [1, 1], 0.0)
    assert pool.block(1, 0.0).holders == [Holder(client, 0, 3)]
    pool.free_blocks(client, [1, 1], 0.0)
    assert pool.block(1, 0.0).ref_count == 1
    pool.free_blocks(client, [1], 0.0)
    assert pool.usage().free == 8


def test_only_its_own_lease_shares_what_may_still_be_written(pool: Pool, client: int) -> None:
    pool.allocate_blocks(client, 1, 0.0)
    other = pool.create_lease("other", 100.0, 0.0).lease_id
    assert refusal(pool, lambda: pool.share_blocks(other, [1], 0.0)) == Reason.BLOCK_NOT_SEALED
    assert refusal(pool, lambda: pool.share_blocks(client, [1, 99], 0.0)) == Reason.BLOCK_NOT_FOUND


def test_a_shared_sealed_block_outlives_its_table(pool: Pool, client: int, worker: int) -> None:
    table = pool.step(worker, Step(1, creates=[TableRequest([], 2)]), 0.0).grants[0]
    pool.step(worker, Step(2, commits=[Commit(table.table_id, [1] * B)]), 0.0)
    pool.share_blocks(client, [table.blocks.block_ids[0]], 0.0)
    pool.detach(worker, 1.0)
    assert pool.block(table.blocks.block_ids[0], 1.0).holders == [Holder(client, 0, 1)]
    assert pool.usage() == Usage(8, 7, 1, 0, 0)
    pool.release_lease(client, 2.0)
    assert pool.usage() == Usage(8, 7, 0, 1, 0)


# -- tables of clients


def test_a_clients_table_can_be_extended_and_released(pool: Pool, client: int) -> None:
    table = pool.create_table(client, TableRequest([1, 2], 2, priority=3), 0.0)
    assert (table.holder, table.priority, table.num_tokens) == ("client", 3, 0)
    assert pool.extend_table(client, table.table_id, 2, 1.0).block_ids == [3, 4]
    view = pool.table(table.table_id, 4.0)
    assert (list(view.blocks.block_ids), view.idle_s, view.token_ids) == ([1, 2, 3, 4], 3.0, ())
    pool.release_table(client, table.table_id, 2.0)
    assert (pool.usage().free, pool.num_tables) == (8, 0)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (TableRequest([1], 9), Reason.REQUEST_TOO_LARGE),
        (TableRequest([1], 7), Reason.POOL_EXHAUSTED),
        (TableRequest([1], 1, b"s" * 65), Reason.INVALID_FIELD),
        (TableRequest([-1], 1), Reason.INVALID_FIELD),
        (TableRequest([1 << 32, 0], 1), Reason.INVALID_FIELD),
    ],
)
def test_a_table_is_created_whole_or_not_at_all(
    pool: Pool, client: int, request_: TableRequest, reason: Reason
) -> None:
    pool.allocate_blocks(client, 2, 0.0)
    assert refusal(pool, lambda: pool.create_table(client, request_, 0.0)) == reason


def test_a_table_is_changed_by_its_own_lease_only(pool: Pool, client: int) -> None:
    table = pool.create_table(client, TableRequest([1], 2), 0.0).table_id
    other = pool.create_lease("other", 100.0, 0.0).lease_id
    assert refusal(pool, lambda: pool.release_table(other, table, 0.0)) == Reason.TABLE_NOT_HELD
    assert refusal(pool, lambda: pool.extend_table(other, table, 1, 0.0)) == Reason.TABLE_NOT_HELD
    assert refusal(pool, lambda: pool.release_table(client, table + 100, 0.0)) == Reason.TABLE_NOT_FOUND
    assert refusal(pool, lambda: pool.extend_table(client, table, 0, 0.0)) == Reason.INVALID_FIELD
    assert refusal(pool, lambda: pool.extend_table(client, table, 7, 0.0)) == Reason.REQUEST_TOO_LARGE
    assert refusal(pool, lambda: pool.release_table(99, table, 0.0)) == Reason.LEASE_NOT_FOUND


# -- steps


def test_commits_seal_what_is_full_and_the_table_shows_its_tokens(pool: Pool, worker: int) -> None:
    table = pool.step(worker, Step(1, creates=[TableRequest([], 3)]), 0.0).grants[0].table_id
    tokens = list(range(B + 3))
    pool.step(worker, Step(2, commits=[Commit(table, tokens[:5]), Commit(table, tokens[5:])]), 1.0)
    view = pool.table(table, 1.0)
    assert (list(view.token_ids), view.num_tokens, view.cached_tokens) == (tokens, B + 3, 0)
    blocks = pool.blocks_between(0, 10, None, 1.0)
    assert [(block.sealed, block.num_tokens, bool(block.digest)) for block in blocks] == [
        (True, B, True),
        (False, 3, False),
        (False, 0, False),
    ]


def test_in_a_step_releases_make_room_for_requests_and_each_request_is_answered_alone(pool: Pool, worker: int) -> None:
    granted = pool.step(worker, Step(1, creates=[TableRequest([], 5), TableRequest([], 2)]), 0.0).grants
    first, second = (grant.table_id for grant in granted)
    outcome = pool.step(
        worker,
        Step(
            2,
            commits=[Commit(first, [1])],
            releases=[first],
            creates=[TableRequest([], 4, ref=1), TableRequest([], 3, ref=2), TableRequest([], 99, ref=3)],
            extends=[ExtendRequest(second, 2, ref=4), ExtendRequest(second, 1, ref=5)],
        ),
        0.0,
    )
    assert [grant.ref for grant in outcome.grants] == [1, 4]
    assert [(one.ref, one.reason, one.available_blocks) for one in outcome.refusals] == [
        (2, RefusalReason.POOL_EXHAUSTED, 2),
        (3, RefusalReason.REQUEST_TOO_LARGE, 2),
        (5, RefusalReason.POOL_EXHAUSTED, 0),
    ]
    assert pool.counters.refused_requests == 3
    pool.check()


@pytest.mark.parametrize(
    "step",
    [
        Step(1),
        Step(3),
        Step(2, commits=[Commit(99, [1])]),
        Step(2, commits=[Commit(2, [1] * (2 * B + 1))]),
        Step(2, commits=[Commit(2, [1] * 2 * B), Commit(2, [1])]),
        Step(2, commits=[Commit(2, [1 << 32])]),
        Step(2, commits=[Commit(2, [1])], releases=[99]),
        Step(2, commits=[Commit(2, [1])], releases=[2, 2]),
        Step(2, commits=[Commit(2, [1])], releases=[2], extends=[ExtendRequest(2, 1)]),
        Step(2, commits=[Commit(2, [1])], extends=[ExtendRequest(2, 0)]),
        Step(2, commits=[Commit(2, [1])], creates=[TableRequest([1], 1, b"s" * 65)]),
        Step(2, commits=[Commit(2, [1])], creates=[TableRequest([-1], 1)]),
    ],
)
def test_a_step_that_breaks_the_protocol_applies_no_part_of_itself(pool: Pool, worker: int, step: Step) -> None:
    assert pool.step(worker, Step(1, creates=[TableRequest([], 2)]), 0.0).grants[0].table_id == 2
    assert refusal(pool, lambda: pool.step(worker, step, 0.0)) == Reason.PROTOCOL_VIOLATION


def test_another_workers_table_cannot_be_named_in_a_step(pool: Pool, worker: int) -> None:
    table = pool.step(worker, Step(1, creates=[TableRequest([], 2)]), 0.0).grants[0].table_id
    other = pool.attach("other", "lock 2", 100.0, 0.0).lease.lease_id
    assert refusal(pool, lambda: pool.step(other, Step(1, releases=[table]), 0.0)) == Reason.PROTOCOL_VIOLATION


# -- looking into it


def test_pages_go_by_rising_id_and_states_are_filtered(pool: Pool, client: int, worker: int) -> None:
    pool.allocate_blocks(client, 2, 0.0)
    table = pool.step(worker, Step(1, creates=[TableRequest([], 2)]), 0.0).grants[0].table_id
    pool.step(worker, Step(2, commits=[Commit(table, [1] * B)], releases=[table]), 0.0)
    assert [block.block_id for block in pool.blocks_between(0, 2, None, 0.0)] == [1, 2]
    assert [block.block_id for block in pool.blocks_between(2, 9, None, 0.0)] == [3]
    assert [block.block_id for block in pool.blocks_between(0, 9, BlockState.CACHED, 0.0)] == [3]
    tables = [pool.create_table(client, TableRequest([], 0), 0.0).table_id for _ in range(3)]
    assert [one.table_id for one in pool.tables_after(tables[0], 9, 0.0)] == tables[1:]


def test_what_is_not_there_is_not_found(pool: Pool) -> None:
    assert refusal(pool, lambda: pool.block(1, 0.0)) == Reason.BLOCK_NOT_FOUND
    assert refusal(pool, lambda: pool.table(1, 0.0)) == Reason.TABLE_NOT_FOUND
    assert refusal(pool, lambda: pool.lease(1)) == Reason.LEASE_NOT_FOUND


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda state: state.store.allocator.give_back(1), "free, but blocks are in them"),
        (lambda state: state.store.blocks.ids.__setitem__(7, 99), "blocks are in them|do not agree"),
        (lambda state: state.store.blocks.holders.__setitem__(0, ()), "as its holders"),
        (lambda state: state.store.cached.remove(next(iter(state.store.cached))), "cached, but nobody refers to"),
        (lambda state: state.store.index.frames.clear(), "cannot be matched|thought to be found"),
        (lambda state: state.store.index._found.__setitem__(0, 0), "thought to be found"),
        (lambda state: state.store.index._found.__setitem__(1, 1), "thought to be found"),
        (lambda state: state.store.blocks.tokens.__setitem__(slice(0, 4), b"spam"), "digest of other tokens"),
        (lambda state: state.tables.popitem(), "as its holders|not the pool's tables"),
        (lambda state: setattr(next(iter(state.tables.values())), "num_tokens", 3), "tokens, not|wrongly sealed"),
        (lambda state: setattr(state.counters, "freed_blocks", 5), "does not agree with"),
        (lambda state: setattr(state, "last_id", 0), "used twice"),
    ],
)
def test_check_finds_each_kind_of_contradiction(
    pool: Pool, worker: int, spoil: Callable[[Any], object], complaint: str
) -> None:
    granted = pool.step(worker, Step(1, creates=[TableRequest([], 3), TableRequest([], 1)]), 0.0).grants
    first, second = (grant.table_id for grant in granted)
    commits = [Commit(first, [1] * (B + 1)), Commit(second, [2] * B)]
    pool.step(worker, Step(2, commits=commits, releases=[second]), 0.0)
    pool.check()
    spoil(pool._state)
    with pytest.raises(InvariantError, match=complaint):
        pool.check()


def test_a_block_costs_under_500_bytes_of_memory_whatever_it_is_doing() -> None:
    """So that 100,000 blocks cost under 50 MB."""
    tracemalloc.start()
    try:
        pool, total = Pool(7, 16, 1 << 30, 10_000), 10_000
        pool.declare(GEOMETRY)
        client = pool.create_lease("client", 100.0, 0.0).lease_id
        pool.allocate_blocks(client, total, 0.0)
        allocated = tracemalloc.get_traced_memory()[0]
        pool.release_lease(client, 0.0)
        worker = pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id
        for table in range(10):
            granted = pool.step(worker, Step(2 * table + 1, creates=[TableRequest([], total // 10)]), 0.0).grants[0]
            tokens = range(table * 1_000_000, table * 1_000_000 + 16 * total // 10)
            pool.step(worker, Step(2 * table + 2, commits=[Commit(granted.table_id, tokens)]), 0.0)
        sealed = tracemalloc.get_traced_memory()[0]
        pool.detach(worker, 0.0)
        cached = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert pool.usage() == Usage(total, 0, 0, total, 0)
    assert max(allocated, sealed, cached) < 500 * total
