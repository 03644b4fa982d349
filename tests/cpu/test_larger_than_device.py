"""Tables that the device alone cannot hold: granted in both tiers, written and read there."""

from __future__ import annotations

from memd.core.extent import HostMemory, Tiers
from memd.core.pool import Pool
from memd.core.values import Commit, RefusalReason, TableRequest
from tests.cpu.compression_rig import GEOMETRY, B, Worker, make, move_all, tokens


def rig(num_blocks: int = 10, num_host: int = 30) -> tuple[Pool, Worker]:
    pool, _ = make(num_blocks, None, num_host, slab=0)
    return pool, Worker(pool, "one")


def test_a_table_larger_than_the_device_lies_in_both_tiers_and_is_found_again() -> None:
    pool, worker = rig()
    assert (pool.num_blocks, pool.tiering.most_blocks) == (10, 40)
    prompt = tokens(30 * B - 1)
    grant = worker.serve(prompt)
    below = [pool.block(one, 1.0).host for one in grant.blocks.block_ids]
    assert (len(below), sum(below)) == (30, 25)
    assert below == sorted(below, reverse=True), "what is written last lies on the device"
    assert (pool.usage().free, pool.usage().host_free) == (5, 5)
    worker.step(releases=[grant.table_id])
    (again,) = worker.step(creates=[TableRequest([*prompt, 1, 2], 30)]).grants
    assert again.cached_tokens == 29 * B
    assert list(again.blocks.block_ids[:29]) == list(grant.blocks.block_ids[:29])
    pool.tick(2.0)
    move_all(pool, 2.0)
    worker.acknowledge(3.0)
    worker.step(releases=[again.table_id])
    move_all(pool, 4.0)
    assert (pool.usage().held, pool.usage().quarantined) == (0, 0)


def test_only_what_is_larger_than_the_device_lies_below_others_wait() -> None:
    pool, worker = rig()
    (first,) = worker.step(creates=[TableRequest((), 9, no_match=True)]).grants
    refused = worker.step(creates=[TableRequest((), 4, no_match=True, ref=5)]).refusals
    assert [(one.reason, one.available_blocks) for one in refused] == [(RefusalReason.POOL_EXHAUSTED, 1)]
    (large,) = worker.step(creates=[TableRequest((), 12, no_match=True)]).grants
    assert sum(pool.block(one, 1.0).host for one in large.blocks.block_ids) == 11
    refused = worker.step(creates=[TableRequest((), 41, no_match=True, ref=5)]).refusals
    assert [(one.reason, one.total_blocks) for one in refused] == [(RefusalReason.REQUEST_TOO_LARGE, 40)]
    worker.step(releases=[first.table_id, large.table_id])


def test_a_second_large_one_waits_for_the_host() -> None:
    _, worker = rig()
    (first,) = worker.step(creates=[TableRequest((), 30, no_match=True)]).grants
    refused = worker.step(creates=[TableRequest((), 20, no_match=True, ref=5)]).refusals
    assert [one.reason for one in refused] == [RefusalReason.POOL_EXHAUSTED]
    worker.step(releases=[first.table_id])
    (second,) = worker.step(creates=[TableRequest((), 20, no_match=True)]).grants
    assert len(second.blocks.block_ids) == 20


def test_a_lost_workers_blocks_below_wait_for_its_process() -> None:
    pool, worker = rig()
    grant = worker.serve(tokens(20 * B + 3))
    pool.fail_lease(worker.lease, 2.0)
    pool.check()
    pool.process_gone(worker.lease, 3.0)
    pool.check()
    assert pool.usage().host_free + pool.usage().host_cached == 30
    assert grant.cached_tokens == 0


def test_where_workers_cannot_write_below_nothing_is_granted_there() -> None:
    pool = Pool(7, B, 1 << 30, 10, tiers=Tiers(host=HostMemory(1 << 20)))
    pool.declare(GEOMETRY)
    worker = Worker(pool, "one")
    refused = worker.step(creates=[TableRequest((), 11, no_match=True)]).refusals
    assert [(one.reason, one.total_blocks) for one in refused] == [(RefusalReason.REQUEST_TOO_LARGE, 10)]
    (grant,) = worker.step(creates=[TableRequest((), 10, no_match=True)]).grants
    worker.step(commits=[Commit(grant.table_id, tokens(B))], releases=[grant.table_id])
