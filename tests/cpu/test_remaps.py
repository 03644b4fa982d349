"""Merged and moved blocks by example: who is told, who is waited for, and when the memory is given away."""

from __future__ import annotations

import pytest

from memd.core.geometry import Geometry
from memd.core.lease import Remap
from memd.core.operations import Fork, ReserveRequest
from memd.core.pool import Pool
from memd.core.values import BlockState, Commit, Grant, LeaseState, Step, TableRequest
from pagekernels.layout import Format, LayerShape
from pagepool.errors import PagepoolError, Reason

B = 8
GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.BF16, False, 1, b"w" * 32, "model")
PROMPT = [1] * 2 * B
ACK_TIMEOUT = 4.0


@pytest.fixture
def pool() -> Pool:
    made = Pool(7, B, 1 << 30, 12)
    made.declare(GEOMETRY)
    made.remaps.ack_timeout_s = ACK_TIMEOUT
    return made


class Worker:
    def __init__(self, pool: Pool, name: str, *, listens: bool = True) -> None:
        self.pool, self.lock, self.steps = pool, name, 0
        self.lease = pool.attach(name, name, 10.0, 0.0).lease.lease_id
        if listens:
            pool.remaps.listen(self.lease, 0.0)

    def step(self, *arguments: object, now: float = 0.0, **words: object) -> list[Grant]:
        self.steps += 1
        grants = self.pool.step(self.lease, Step(self.steps, *arguments, **words), now).grants  # type: ignore[arg-type]
        self.pool.check()
        return list(grants)

    def create(self, num_blocks: int = 3, *, no_match: bool = True) -> Grant:
        (grant,) = self.step(creates=[TableRequest([*PROMPT, 0], num_blocks, no_match=no_match)])
        return grant

    def commit(self, grant: Grant, tokens: list[int] = PROMPT, now: float = 0.0, **words: object) -> None:
        self.step([Commit(grant.table_id, tokens)], now=now, **words)

    def reclaim(self, now: float) -> None:
        assert self.pool.attach(self.lock, self.lock, 10.0, now, (7, self.lease)).reclaimed
        self.pool.remaps.listen(self.lease, now)

    @property
    def news(self) -> list[Remap]:
        return self.pool.remaps.take_news(self.lease)


@pytest.fixture
def worker(pool: Pool) -> Worker:
    return Worker(pool, "worker")


@pytest.fixture
def twins(pool: Pool, worker: Worker) -> tuple[Grant, Grant]:
    """Two tables with the same two sealed blocks, granted apart."""
    first, second = worker.create(), worker.create()
    worker.commit(first)
    worker.commit(second, now=1.0)
    return first, second


def frames(pool: Pool, grant: Grant) -> list[int]:
    return list(pool.table(grant.table_id, 0.0).blocks.block_ids)


def test_the_newcomer_is_given_up_for_the_block_in_the_index(
    pool: Pool, worker: Worker, twins: tuple[Grant, Grant]
) -> None:
    first, second = twins
    ids, entries = first.blocks.block_ids, first.blocks.entries
    assert frames(pool, second) == [*ids[:2], second.blocks.block_ids[2]]
    assert pool.remaps.leases_with_news() == [worker.lease]
    assert worker.news == [
        Remap(at + 1, second.table_id, at, second.blocks.block_ids[at], ids[at], entries[at]) for at in range(2)
    ]
    assert pool.remaps.leases_with_news() == worker.news == []
    assert (pool.counters.merged_blocks, pool.counters.remaps) == (2, 2)
    assert (pool.usage().held, pool.usage().quarantined) == (4, 2)
    old = pool.block(second.blocks.block_ids[0], 0.0)
    assert (old.state, old.sealed, [(one.lease_id, one.table_id) for one in old.holders]) == (
        BlockState.QUARANTINED,
        True,
        [(worker.lease, 0)],
    )
    assert [one.block_id for one in pool.blocks_between(0, 1 << 20, BlockState.QUARANTINED, 0.0)] == [
        *second.blocks.block_ids[:2]
    ]


def test_acknowledged_blocks_come_free_and_who_waits_hears_of_it(
    pool: Pool, worker: Worker, twins: tuple[Grant, Grant]
) -> None:
    assert pool.step(worker.lease, Step(worker.steps + 1, creates=[TableRequest([9], 7)]), 1.0).refusals
    worker.steps += 1
    worker.step(acknowledged=1, now=2.0)
    assert (pool.usage().quarantined, pool.usage().free) == (1, 7)
    assert pool.waiting.take_news() == [(worker.lease, 7)]
    worker.step(now=2.0)
    assert pool.usage().quarantined == 1
    worker.step(acknowledged=2, now=2.0)
    worker.step(acknowledged=2, now=2.0)
    assert (pool.usage().quarantined, pool.usage().free) == (0, 8)


def test_the_step_that_acknowledges_may_be_granted_the_blocks(worker: Worker, twins: tuple[Grant, Grant]) -> None:
    (grant,) = worker.step(creates=[TableRequest([9], 8)], acknowledged=2)
    assert len(grant.blocks.block_ids) == 8


def test_what_never_was_told_cannot_be_acknowledged(worker: Worker, twins: tuple[Grant, Grant]) -> None:
    with pytest.raises(PagepoolError, match="acknowledged is 3, but the last Remap is 2") as caught:
        worker.step(acknowledged=3)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION


def test_only_those_whose_tables_had_the_block_are_waited_for(pool: Pool, worker: Worker) -> None:
    other = Worker(pool, "other")
    worker.commit(worker.create())
    second = other.create()
    other.commit(second)
    assert worker.news == []
    assert [remap.sequence for remap in other.news] == [1, 2]
    other.step(acknowledged=2)
    assert pool.usage().quarantined == 0
    assert pool.block(frames(pool, second)[0], 0.0).ref_count == 2


def test_blocks_of_a_worker_that_takes_no_remaps_stay(pool: Pool, worker: Worker) -> None:
    deaf = Worker(pool, "deaf", listens=False)
    worker.commit(worker.create())
    second = deaf.create()
    deaf.commit(second)
    assert frames(pool, second) == list(second.blocks.block_ids)
    assert (pool.counters.merged_blocks, deaf.news) == (0, [])


def test_the_next_block_follows_the_one_that_stayed(pool: Pool, worker: Worker, twins: tuple[Grant, Grant]) -> None:
    first, second = twins
    worker.commit(first, [2] * B)
    worker.commit(second, [2] * B)
    assert frames(pool, first) == frames(pool, second)
    assert pool.counters.merged_blocks == 3
    worker.step(releases=[first.table_id, second.table_id], acknowledged=3)
    found = worker.create(4, no_match=False)
    assert found.cached_tokens == 2 * B
    assert (pool.usage().cached, pool.usage().held, pool.usage().quarantined) == (1, 4, 0)


def test_operations_of_the_step_that_seals_come_first(pool: Pool, worker: Worker) -> None:
    first, second = worker.create(), worker.create()
    worker.commit(first)
    (reserve,) = worker.step(reserves=[ReserveRequest(0, 1)])
    worker.commit(second, operations=[Fork(second.table_id, reserve.table_id)])
    assert frames(pool, first)[:2] == frames(pool, second)[:2]
    assert list(pool.table(reserve.table_id, 0.0).blocks.block_ids) == frames(pool, second)
    assert [(one.table_id, one.index) for one in worker.news] == [
        (table_id, at) for at in range(2) for table_id in (second.table_id, reserve.table_id)
    ]
    worker.step(acknowledged=4)
    assert pool.usage().quarantined == 0


def test_what_is_sealed_and_released_in_one_step_is_not_merged(pool: Pool, worker: Worker) -> None:
    first, second = worker.create(), worker.create()
    worker.commit(first)
    worker.commit(second, releases=[second.table_id])
    assert (pool.counters.merged_blocks, pool.usage().quarantined, pool.usage().free) == (0, 0, 9)


def test_when_the_block_that_stayed_is_gone_the_old_one_takes_its_place(
    pool: Pool, worker: Worker, twins: tuple[Grant, Grant]
) -> None:
    worker.step(releases=[grant.table_id for grant in twins])
    worker.step(creates=[TableRequest([9], 10)])
    assert (pool.usage().cached, pool.usage().quarantined) == (0, 2)
    worker.step(acknowledged=2)
    assert (pool.usage().cached, pool.usage().quarantined) == (2, 0)
    assert worker.create(2, no_match=False).cached_tokens == 2 * B


def test_a_worker_that_does_not_acknowledge_is_lost_by_name(
    pool: Pool, worker: Worker, twins: tuple[Grant, Grant]
) -> None:
    assert pool.deadlines.next() == 1.0 + ACK_TIMEOUT
    pool.heartbeat(worker.lease, 4.9)
    assert pool.tick(4.9) == []
    (lost,) = pool.tick(5.0)
    assert (lost.lease_id, lost.state) == (worker.lease, LeaseState.LOST)
    assert lost.lost_because.startswith("Remap 1 was not acknowledged within --ack-timeout")
    with pytest.raises(PagepoolError, match="--ack-timeout") as caught:
        worker.step(acknowledged=2, now=5.0)
    assert caught.value.reason is Reason.LEASE_LOST


def test_each_acknowledgement_starts_the_time_anew(pool: Pool, worker: Worker, twins: tuple[Grant, Grant]) -> None:
    worker.step(acknowledged=1, now=4.0)
    assert pool.tick(7.9) == []
    assert [lost.lease_id for lost in pool.tick(8.0)] == [worker.lease]


def test_a_lost_workers_old_blocks_wait_for_the_fence_or_the_end_of_its_process(
    pool: Pool, worker: Worker, twins: tuple[Grant, Grant]
) -> None:
    pool.remaps.fenced(worker.lease, 2.0)
    assert pool.usage().quarantined == 2, "a living worker needs no fence"
    pool.fail_lease(worker.lease, 1.0)
    assert pool.usage().quarantined == 2 + 2
    assert pool.remaps.unfenced() == [(worker.lease, "worker")]
    pool.remaps.fenced(worker.lease, 2.0)
    assert pool.usage().quarantined == 2, "what it could write stays"
    assert pool.remaps.unfenced() == []
    pool.check()
    pool.process_gone(worker.lease, 3.0)
    pool.remaps.fenced(worker.lease, 3.0)
    assert (pool.usage().quarantined, pool.usage().cached, pool.usage().free) == (0, 2, 10)
    pool.check()


def test_without_a_fence_the_process_must_end(pool: Pool, worker: Worker, twins: tuple[Grant, Grant]) -> None:
    pool.fail_lease(worker.lease, 1.0)
    pool.process_gone(worker.lease, 3.0)
    assert (pool.usage().quarantined, pool.usage().cached, pool.usage().free) == (0, 2, 10)
    pool.check()


def test_a_worker_that_detaches_reads_nothing_any_more(pool: Pool, worker: Worker, twins: tuple[Grant, Grant]) -> None:
    pool.detach(worker.lease, 2.0)
    assert (pool.usage().quarantined, pool.usage().cached, pool.usage().free) == (0, 2, 10)
    assert worker.news == []
    pool.check()


def test_a_reclaimed_lease_is_told_again_and_has_the_full_time(
    pool: Pool, worker: Worker, twins: tuple[Grant, Grant]
) -> None:
    worker.step(acknowledged=1, now=1.0)
    assert [one.sequence for one in worker.news] == [2]
    pool.stream_broken(worker.lease)
    assert pool.tick(9.0) == [], "without a stream there is nothing to acknowledge with"
    worker.reclaim(9.0)
    assert pool.remaps.leases_with_news() == [worker.lease]
    assert [one.sequence for one in worker.news] == [2]
    assert pool.deadlines.next() == 9.0 + ACK_TIMEOUT
    worker.step(acknowledged=2, now=10.0)
    assert pool.usage().quarantined == 0


def test_a_grant_that_is_repeated_names_the_blocks_of_now(pool: Pool, worker: Worker) -> None:
    """A matched block is moved while its grant is on a stream that breaks."""
    worker.commit(worker.create(2), releases=[])
    client = pool.create_lease("client", 100.0, 0.0).lease_id
    grant = worker.create(3, no_match=False)
    (copied,) = pool.sharing.copy_blocks(client, grant.blocks.block_ids[:1], 0.0)[0].block_ids
    store = pool._state.cut_store()
    source, target = (store.blocks.frame_of[one] for one in (grant.blocks.block_ids[0], copied))
    assert pool.remaps.move(source, target, 0, 0.0)
    pool.check()
    pool.stream_broken(worker.lease)
    worker.reclaim(1.0)
    (again,) = pool.step(worker.lease, Step(worker.steps), 1.0).grants
    assert again.blocks.block_ids == [copied, *grant.blocks.block_ids[1:]]
    assert again.blocks.entries == [pool.block(copied, 0.0).entry, *grant.blocks.entries[1:]]
    assert len(worker.news) == 2, "both tables had it"
    worker.steps += 1
    assert pool.step(worker.lease, Step(worker.steps, acknowledged=2), 1.0).step_id == worker.steps
    assert pool.create_table(client, TableRequest([*PROMPT, 0], 2), 1.0).blocks.block_ids[0] == copied
    pool.check()
