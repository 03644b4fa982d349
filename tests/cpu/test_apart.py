"""Requests that clients and lost workers leave no room for: they hold up no other worker, and end by name."""

from __future__ import annotations

import pytest

from inferd.core.admission import CLAIM_EVERY_S, HELD_PATIENCE_S
from memd.core.pool import Pool
from memd.core.values import PinRequest, RefusalReason, TableRequest
from pagepool.errors import Reason
from tests.cpu.core_worker import TOTAL, B, Worker, grows, make_pool, named, one, pool, starts, table, two
from tests.cpu.engine_rig import Rig

__all__ = ["one", "pool", "two"]


def client_holds(pool: Pool, num_blocks: int) -> int:
    lease = pool.create_lease("client", 1000.0, 0.0).lease_id
    pool.allocate_blocks(lease, num_blocks, 0.0)
    return lease


def stopped_holds(pool: Pool, num_blocks: int) -> int:
    """A worker that nothing is heard from, and whose process is there."""
    lease = Worker(pool, "stopped")
    table(lease, 1.0, num_blocks)
    pool.fail_lease(lease.lease, 1.0)
    return lease.lease


# -- memd


@pytest.mark.parametrize("hold", [client_holds, stopped_holds])
@pytest.mark.parametrize("priority", [0, 1])
def test_what_others_than_workers_hold_makes_nobody_wait_and_nobody_yield_in_vain(
    pool: Pool, one: Worker, two: Worker, hold: object, priority: int
) -> None:
    assert callable(hold)
    holder = hold(pool, 6)
    assert isinstance(holder, int)
    running = table(two, 2.0, 2)
    (no,) = one.step(creates=[TableRequest((), 7, priority=priority, arrival=3.0)]).refusals
    assert (no.reason, no.held_blocks, no.available_blocks) == (RefusalReason.POOL_EXHAUSTED, 6, 4)
    assert starts(two, 1, arrival=9.0), "a younger request waits for what nobody gives back"
    assert grows(two, running, 3)
    assert named(pool) == set()
    pool.process_gone(holder, 2.0)
    if hold is client_holds:
        pool.release_lease(holder, 2.0)
    assert dict(pool.waiting.take_news()) == {one.lease: 6}
    (no,) = one.step(creates=[TableRequest((), 7, priority=priority, arrival=3.0)]).refusals
    assert no.held_blocks == 0
    assert not starts(two, 1, arrival=9.0), "now the workers can give it what it needs"
    assert len(named(pool)) == priority


def test_a_request_that_the_others_can_make_room_for_claims_as_before(pool: Pool, one: Worker, two: Worker) -> None:
    client_holds(pool, 5)
    table(two, 2.0, 3)
    (no,) = one.step(creates=[TableRequest((), 7, arrival=3.0)]).refusals
    assert no.held_blocks == 0
    assert not starts(two, 1, arrival=9.0)


def test_a_block_that_a_client_has_more_than_once_counts_once(pool: Pool, one: Worker, two: Worker) -> None:
    client = pool.create_lease("client", 1000.0, 0.0).lease_id
    first = pool.create_table(client, TableRequest((), 4), 0.0)
    for _ in range(4):
        pool.sharing.fork_table(client, first.table_id, 0.0)
    table(two, 2.0, 4)
    (no,) = one.step(creates=[TableRequest((), 8, arrival=3.0)]).refusals
    assert no.held_blocks == 0
    assert not starts(two, 1, arrival=9.0)
    (no,) = two.step(creates=[TableRequest((), 9, arrival=9.0)]).refusals
    assert no.held_blocks == 4


def test_what_it_finds_is_no_obstacle_whoever_holds_it_too(pool: Pool, one: Worker, two: Worker) -> None:
    tokens = [1] * (6 * B)
    shared = two.table(tokens, 6)
    client = pool.create_lease("client", 1000.0, 0.0).lease_id
    pool.share_blocks(client, pool.table(shared, 1.0).blocks.block_ids, 1.0)
    table(two, 2.0, 4)
    (no,) = one.step(creates=[TableRequest([*tokens, 2], 12, arrival=3.0)]).refusals
    assert no.held_blocks == 0, "6 that it finds, and 6 that come back"
    assert not starts(two, 1, arrival=9.0)
    (no,) = one.step(creates=[TableRequest([3] * (6 * B + 1), 7, arrival=3.0)]).refusals
    assert no.held_blocks == 6


def test_pinned_and_held_blocks_count_together(pool: Pool, one: Worker, two: Worker) -> None:
    tokens = [1] * (4 * B)
    one.step(releases=[one.table(tokens, 4)])
    pool.prefixes.pin(PinRequest(tokens, 50.0, pinned=True), 1.0)
    stopped_holds(pool, 4)
    table(two, 2.0, 2)
    (no,) = one.step(creates=[TableRequest((), 5, arrival=3.0)]).refusals
    assert (no.pinned_blocks, no.held_blocks) == (4, 4)
    assert starts(two, 1)


# -- a worker, over the same pool


def turn_for(rig: Rig, seconds: float) -> None:
    end = rig.now + seconds
    while rig.now < end:
        rig.now += CLAIM_EVERY_S / 2
        rig.turn()


def test_a_request_that_they_leave_no_room_for_waits_for_a_time_and_ends_by_name() -> None:
    rig = Rig(pool=make_pool(TOTAL))
    rig.settle()
    client = client_holds(rig.pool, 8)
    rig.submit(1, list(range(100, 150)), most=2)
    rig.submit(2, list(range(100, 160)), most=2)
    rig.submit(3, [7, 8, 9], most=4)
    turn_for(rig, HELD_PATIENCE_S - 1.0)
    assert not rig.generated(3), "the order is strict while it may still come right"
    turn_for(rig, 3.0)
    for request, num_blocks in ((1, 7), (2, 8)):
        end = rig.failed(request)
        assert (end.reason, end.retry_after_s) == (Reason.POOL_EXHAUSTED, 30.0)
        values = {"num_blocks": num_blocks, "held_blocks": 8, "pinned_blocks": 0, "total_blocks": TOTAL}
        assert end.metadata == {key: f"{value}" for key, value in values.items()}
        assert "8 of the pool's 12 are held by clients' leases or by lost workers" in end.message
    rig.settle()
    assert len(rig.generated(3)) == 4
    rig.pool.release_lease(client, 0.0)
    rig.submit(4, list(range(100, 150)), most=2)
    rig.settle()
    assert len(rig.generated(4)) == 2
    rig.check_nothing_held()


def test_one_that_gets_its_blocks_in_time_runs_and_the_next_has_all_the_time_again() -> None:
    rig = Rig(pool=make_pool(TOTAL))
    rig.settle()
    client = client_holds(rig.pool, 8)
    rig.submit(1, list(range(100, 150)), most=2)
    turn_for(rig, HELD_PATIENCE_S - 1.0)
    rig.pool.release_lease(client, 0.0)
    rig.settle()
    assert len(rig.generated(1)) == 2
    client = client_holds(rig.pool, 8)
    turn_for(rig, 5.0)
    rig.submit(2, list(range(200, 204)) * 14, most=2)
    turn_for(rig, HELD_PATIENCE_S - 1.0)
    rig.pool.release_lease(client, 0.0)
    rig.settle()
    assert len(rig.generated(2)) == 2
