"""The life of leases, by a scripted clock."""

from __future__ import annotations

import pytest

from memd.core import clients
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from memd.core.values import BlockState, Commit, LeaseState, Step, StepOutcome, TableRequest
from pagekernels.layout import Format, LayerShape
from pagepool.errors import Code, PagepoolError, Reason

GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.F32, False, 1, b"w" * 32, "model")
B = 8


@pytest.fixture
def pool() -> Pool:
    made = Pool(7, B, 1 << 30, 8)
    made.declare(GEOMETRY)
    return made


def refused(error: pytest.ExceptionInfo[PagepoolError]) -> Reason:
    return error.value.reason


def working(pool: Pool, now: float = 0.0) -> int:
    """A worker with a table of three blocks, the first of them sealed and the second begun."""
    lease = pool.attach("worker", "lock", 10.0, now).lease.lease_id
    granted = pool.step(lease, Step(1, creates=[TableRequest([1], 3)]), now)
    pool.step(lease, Step(2, commits=[Commit(granted.grants[0].table_id, [1] * (B + 2))]), now)
    return lease


def states(pool: Pool) -> list[BlockState]:
    return [block.state for block in pool.blocks_between(0, 1 << 20, None, 0.0)]


@pytest.mark.parametrize(("asked", "granted"), [(0.001, 1.0), (60.0, 60.0), (1e9, 3600.0), (float("inf"), 3600.0)])
def test_between_a_second_and_an_hour_of_the_time_asked_for_are_granted(
    pool: Pool, asked: float, granted: float
) -> None:
    lease = pool.create_lease("client", asked, 5.0)
    assert (lease.ttl_s, lease.deadline) == (granted, 5.0 + granted)


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
def test_a_time_to_live_that_is_not_positive_is_refused(pool: Pool, ttl: float) -> None:
    with pytest.raises(PagepoolError, match="ttl") as error:
        pool.create_lease("client", ttl, 0.0)
    assert (refused(error), error.value.field, pool.num_leases) == (Reason.INVALID_FIELD, "ttl", 0)


def test_a_holders_name_is_measured_in_bytes(pool: Pool) -> None:
    pool.create_lease("é" * 64, 1.0, 0.0)
    with pytest.raises(PagepoolError, match="130 bytes"):
        pool.create_lease("é" * 65, 1.0, 0.0)


def test_clients_have_so_many_leases_and_no_more(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_CLIENT_LEASES", 3)
    workers = [pool.attach("worker", f"lock-{number}", 10.0, 0.0).lease.lease_id for number in range(3)]
    leases = [pool.create_lease("client", 5.0, 0.0).lease_id for _ in range(3)]
    with pytest.raises(PagepoolError) as error:
        pool.create_lease("client", 5.0, 0.0)
    assert (refused(error), error.value.code) == (Reason.LEASE_LIMIT, Code.RESOURCE_EXHAUSTED)
    assert error.value.metadata == {"limit": "3"}
    assert (pool.num_leases, "release some" in error.value.message) == (6, True)
    pool.release_lease(leases[0], 0.0)
    pool.create_lease("client", 60.0, 0.0)
    assert len(pool.tick(5.0)) == 2, "those that end make room too"
    pool.create_lease("client", 5.0, 5.0)
    assert pool.attach("worker", "lock", 10.0, 5.0).lease.lease_id > max(workers), "no client keeps a worker away"


def test_an_expired_client_lease_frees_at_the_tick_and_not_before(pool: Pool) -> None:
    lease = pool.create_lease("client", 5.0, 0.0).lease_id
    pool.allocate_blocks(lease, 3, 0.0)
    assert pool.deadlines.next() == 5.0
    assert pool.tick(4.99) == []
    assert pool.usage().held == 3
    assert [ended.lease_id for ended in pool.tick(5.0)] == [lease]
    assert (pool.usage().free, pool.counters.lost_leases, pool.deadlines.next()) == (8, 1, None)


def test_a_late_command_meets_an_ended_lease_even_without_a_tick(pool: Pool) -> None:
    lease = pool.create_lease("client", 5.0, 0.0).lease_id
    pool.allocate_blocks(lease, 3, 0.0)
    with pytest.raises(PagepoolError) as error:
        pool.renew_lease(lease, 5.0)
    assert (refused(error), pool.usage().held) == (Reason.LEASE_NOT_FOUND, 0)


def test_renewing_moves_the_deadline(pool: Pool) -> None:
    lease = pool.create_lease("client", 5.0, 0.0).lease_id
    assert pool.renew_lease(lease, 4.0).deadline == 9.0
    assert pool.tick(8.0) == []


def test_releasing_a_lease_twice_is_no_error(pool: Pool) -> None:
    lease = pool.create_lease("client", 5.0, 0.0).lease_id
    pool.allocate_blocks(lease, 1, 0.0)
    pool.release_lease(lease, 1.0)
    pool.release_lease(lease, 1.0)
    assert (pool.usage().free, pool.counters.lost_leases) == (8, 0)


def test_a_workers_lease_is_its_streams_alone(pool: Pool) -> None:
    lease = working(pool)
    for command in (
        lambda: pool.renew_lease(lease, 0.0),
        lambda: pool.release_lease(lease, 0.0),
        lambda: pool.allocate_blocks(lease, 1, 0.0),
        lambda: pool.create_table(lease, TableRequest([1], 1), 0.0),
    ):
        with pytest.raises(PagepoolError) as error:
            command()
        assert refused(error) == Reason.LEASE_IS_WORKERS


def test_a_clients_lease_takes_no_steps(pool: Pool) -> None:
    lease = pool.create_lease("client", 5.0, 0.0).lease_id
    with pytest.raises(PagepoolError) as error:
        pool.step(lease, Step(1), 0.0)
    assert refused(error) == Reason.LEASE_LOST


def test_a_silent_worker_is_lost_and_only_what_it_could_write_is_quarantined(pool: Pool) -> None:
    lease = working(pool)
    pool.heartbeat(lease, 5.0)
    assert pool.tick(14.9) == []
    assert [(lost.lease_id, lost.state) for lost in pool.tick(15.0)] == [(lease, LeaseState.LOST)]
    assert states(pool) == [BlockState.HELD, BlockState.QUARANTINED, BlockState.QUARANTINED]
    assert (pool.usage().quarantined, pool.num_leases, pool.num_tables) == (2, 0, 1)
    with pytest.raises(PagepoolError, match="nothing was heard") as error:
        pool.heartbeat(lease, 15.0)
    assert refused(error) == Reason.LEASE_LOST
    pool.check()


def test_what_a_lost_worker_sealed_is_matched_but_not_evicted(pool: Pool) -> None:
    working(pool)
    pool.tick(10.0)
    client = pool.create_lease("client", 100.0, 10.0).lease_id
    assert pool.usage().available == 5
    with pytest.raises(PagepoolError) as error:
        pool.allocate_blocks(client, 6, 10.0)
    assert refused(error) == Reason.POOL_EXHAUSTED
    assert pool.create_table(client, TableRequest([1] * (B + 1), 2), 10.0).cached_tokens == B


def test_when_the_process_is_gone_sealed_blocks_are_cached_and_the_rest_is_free(pool: Pool) -> None:
    lease = working(pool)
    pool.tick(10.0)
    assert pool.waiting_for_process() == [(lease, "lock")]
    pool.process_gone(lease, 20.0)
    assert states(pool) == [BlockState.CACHED]
    assert (pool.usage().free, pool.waiting_for_process()) == (7, [])
    pool.process_gone(lease, 20.0)
    pool.check()


def test_a_broken_stream_waits_for_the_lock_or_the_deadline(pool: Pool) -> None:
    lease = working(pool)
    pool.stream_broken(lease)
    assert pool.lease(lease).state is LeaseState.DETACHED
    assert (states(pool)[1], pool.waiting_for_process()) == (BlockState.HELD, [(lease, "lock")])
    pool.process_gone(lease, 1.0)
    assert (pool.usage().cached, pool.usage().free, pool.counters.lost_leases) == (1, 7, 1)


def test_a_lock_found_free_after_the_worker_came_back_is_ignored(pool: Pool) -> None:
    lease = working(pool)
    pool.stream_broken(lease)
    assert pool.attach("worker", "lock", 10.0, 1.0, (7, lease)).reclaimed
    pool.process_gone(lease, 1.0)
    assert pool.usage().held == 3


def test_a_reclaimed_lease_keeps_its_tables_and_its_step_ids(pool: Pool) -> None:
    lease = working(pool)
    pool.stream_broken(lease)
    attached = pool.attach("worker", "lock", 10.0, 9.0, (7, lease))
    assert (attached.reclaimed, attached.lease.lease_id, attached.lease.deadline) == (True, lease, 19.0)
    assert pool.num_tables == 1
    assert pool.step(lease, Step(3), 9.0) == StepOutcome(3, [], [])


@pytest.mark.parametrize(("lock", "epoch"), [("other", 7), ("lock", 8)], ids=["lock", "epoch"])
def test_what_cannot_be_reclaimed_gives_a_new_lease(pool: Pool, lock: str, epoch: int) -> None:
    lease = working(pool)
    pool.stream_broken(lease)
    attached = pool.attach("worker", lock, 10.0, 1.0, (epoch, lease))
    assert (attached.reclaimed, attached.lease.lease_id > lease) == (False, True)
    assert pool.lease(lease).state is LeaseState.DETACHED


@pytest.mark.parametrize("reclaims", [False, True])
@pytest.mark.parametrize("ticked", [False, True])
def test_the_lock_file_of_a_lost_lease_is_good_for_no_other(pool: Pool, *, reclaims: bool, ticked: bool) -> None:
    """Else its blocks would be out of use for as long as the worker lives, which need not be told of it otherwise."""
    lease = working(pool)
    pool.stream_broken(lease)
    if ticked:
        pool.tick(10.0)
    with pytest.raises(PagepoolError) as error:
        pool.attach("worker", "lock", 10.0, 10.0, (7, lease) if reclaims else None)
    assert (refused(error), error.value.field) == (Reason.LEASE_LOST, "hello.lock_file")
    assert error.value.metadata == {
        "lock_file": "lock",
        "lease_id": str(lease),
        "why": "nothing was heard from its worker for 10 s",
    }
    for word in ("'lock'", f"lease {lease}", "nothing was heard", "drop the lock", "another name"):
        assert word in error.value.message
    pool.tick(10.0)
    assert pool.usage().quarantined == 2
    other = pool.attach("worker", "other", 10.0, 10.0).lease.lease_id
    pool.process_gone(lease, 11.0)  # the lock was dropped, as the error says
    assert (pool.usage().quarantined, pool.usage().free) == (0, 7)
    again = pool.attach("worker", "lock", 10.0, 11.0).lease.lease_id
    assert (pool.lease(other).state, pool.lease(again).state) == (LeaseState.LIVE, LeaseState.LIVE)
    pool.check()


def test_steps_whose_answers_were_lost_are_answered_again_and_applied_once(pool: Pool) -> None:
    lease = pool.attach("worker", "lock", 10.0, 0.0).lease.lease_id
    step = Step(1, creates=[TableRequest([1], 3, ref=5)])
    answer = pool.step(lease, step, 0.0)
    pool.stream_broken(lease)
    pool.attach("worker", "lock", 10.0, 1.0, (7, lease))
    assert pool.step(lease, step, 1.0) == answer
    assert (pool.num_tables, pool.usage().held) == (1, 3)
    pool.step(lease, Step(2), 1.0)
    with pytest.raises(PagepoolError, match="step_id is 1, but must be 3"):
        pool.step(lease, step, 1.0)


def test_a_worker_that_broke_the_protocol_is_lost_at_once(pool: Pool) -> None:
    lease = working(pool)
    pool.fail_lease(lease, 1.0)
    assert (pool.lease(lease).state, pool.usage().quarantined) == (LeaseState.LOST, 2)
    with pytest.raises(PagepoolError, match="broke the protocol"):
        pool.step(lease, Step(3), 0.0)


def test_detaching_releases_everything_at_once(pool: Pool) -> None:
    pool.detach(working(pool), 1.0)
    assert (pool.usage().cached, pool.usage().free, pool.counters.lost_leases) == (1, 7, 0)
    pool.check()


def test_a_worker_needs_a_pool_and_a_lock_file(pool: Pool) -> None:
    with pytest.raises(PagepoolError) as error:
        Pool(7, B, 1 << 30).attach("worker", "lock", 10.0, 0.0)
    assert refused(error) == Reason.POOL_WITHOUT_GEOMETRY
    with pytest.raises(PagepoolError, match="lock_file"):
        pool.attach("worker", "", 10.0, 0.0)


def test_a_refused_worker_is_told_once_when_blocks_have_returned(pool: Pool) -> None:
    client = pool.create_lease("client", 100.0, 0.0).lease_id
    ids = pool.allocate_blocks(client, 6, 0.0).block_ids
    lease = pool.attach("worker", "lock", 10.0, 0.0).lease.lease_id
    refusal = pool.step(lease, Step(1, creates=[TableRequest([1], 5, ref=9)]), 0.0).refusals[0]
    assert (refusal.ref, refusal.available_blocks, refusal.total_blocks) == (9, 2, 8)
    assert pool.waiting.take_news() == []
    pool.free_blocks(client, ids[:3], 1.0)
    assert pool.waiting.take_news() == [(lease, 5)]
    assert pool.waiting.take_news() == []


def test_no_news_for_blocks_that_came_and_went(pool: Pool) -> None:
    client = pool.create_lease("client", 100.0, 0.0).lease_id
    ids = pool.allocate_blocks(client, 6, 0.0).block_ids
    lease = pool.attach("worker", "lock", 10.0, 0.0).lease.lease_id
    pool.step(lease, Step(1, creates=[TableRequest([1], 5)]), 0.0)
    pool.tick(5.0)  # the worker does not claim them any more
    pool.free_blocks(client, ids[:2], 6.0)
    pool.allocate_blocks(client, 2, 6.0)
    assert pool.waiting.take_news() == []
