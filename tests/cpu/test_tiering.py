"""Blocks that move between the device and the host tier: which, when, and what becomes of who has them."""

from __future__ import annotations

from math import ceil

import pytest

from memd.core import tiering
from memd.core.errors import InvariantError
from memd.core.extent import HostMemory, PoolMemory, Tiers
from memd.core.fp8 import Fp8, Policy
from memd.core.pool import Pool
from memd.core.values import BlockState, PinRequest, TableRequest
from pagekernels.layout import Format, unpack_entry
from pagepool.errors import PagepoolError, Reason
from tests.cpu.compression_rig import GEOMETRY, B, Worker, compress, make, move_all, tokens


def rig(num_blocks: int = 10, num_host: int = 20, fp8: Fp8 | None = None) -> tuple[Pool, int, Worker]:
    pool, lease = make(num_blocks, fp8, num_host)
    return pool, lease, Worker(pool, "one")


def tiers(pool: Pool, block_ids: list[int]) -> str:
    return "".join("h" if pool.block(one, 9.0).host else "d" for one in block_ids)


def test_while_little_is_free_cached_blocks_go_down_oldest_first_and_nothing_is_evicted() -> None:
    pool, _, worker = rig()
    old, new = worker.serve(tokens(4 * B - 1, 1)), worker.serve(tokens(5 * B - 1, 2))
    worker.step(1.0, releases=[old.table_id])
    worker.step(1.1, releases=[new.table_id])
    pool.tick(2.0)
    assert pool.usage().free == 3, "7 full blocks are cached; 1 of 10 free is enough"
    assert move_all(pool, 2.0) == 0
    (more,) = worker.step(2.5, creates=[TableRequest(tokens(3 * B - 1, 3), 3)]).grants
    assert move_all(pool, 2.5) == 2
    ids = [*old.blocks.block_ids[:3], *new.blocks.block_ids[:4]]
    assert tiers(pool, ids) == "dhhdddd", "the end of the prefix first"
    assert (pool.usage().free, pool.usage().host_cached, pool.counters.demoted_blocks) == (2, 2, 2)
    assert pool.counters.evicted_blocks == 0
    entries = [unpack_entry(pool.block(one, 3.0).entry) for one in ids[1:3]]
    assert sorted(entries) == [(Format.BF16, 1, 0), (Format.BF16, 1, 2)]
    assert {pool.block(one, 3.0).state for one in ids} == {BlockState.CACHED}
    worker.step(releases=[more.table_id])


def test_what_is_matched_below_is_read_there_and_comes_up_when_there_is_room() -> None:
    pool, _, worker = rig()
    prompt = tokens(4 * B)
    first = worker.serve(prompt)
    worker.step(1.0, releases=[first.table_id])
    ids, filling = list(first.blocks.block_ids[:4]), []
    for seed in range(5):  # the copies keep up
        (one,) = worker.step(1.5, creates=[TableRequest(tokens(2 * B - 1, 10 + seed), 2 - seed // 4)]).grants
        filling.append(one.table_id)
        move_all(pool, 2.0)
    assert tiers(pool, ids) == "hhhh"
    worker.step(2.5, releases=filling)
    (again,) = worker.step(3.0, creates=[TableRequest([*prompt, 1], 5)]).grants
    assert again.cached_tokens == 4 * B
    assert list(again.blocks.block_ids[:4]) == ids
    assert {unpack_entry(entry)[1] for entry in again.blocks.entries[:4]} == {1}
    assert pool.counters.host_hit_tokens == 4 * B
    pool.tick(3.5)
    move_all(pool, 3.5)
    assert tiers(pool, ids) == "dddd"
    told = [one.entry for one in pool.remaps.take_news(worker.lease)]
    assert {unpack_entry(entry)[1] for entry in told} == {0}
    assert pool.usage().host_free < 20, "they are read for a step more"
    worker.step(4.0, acknowledged=len(told))
    assert list(pool.table(again.table_id, 4.0).blocks.block_ids[:4]) == ids


def test_what_goes_on_meanwhile_decides() -> None:
    pool, _, worker = rig(num_blocks=6)
    prompt = tokens(4 * B)
    grant = worker.serve(prompt)
    worker.step(1.0, releases=[grant.table_id])
    (other,) = worker.step(1.5, creates=[TableRequest(tokens(2 * B, 3), 2)]).grants
    taken = pool.tiering.take_copies()
    assert [len(copies) for _, copies in taken] == [1]
    (again,) = worker.step(2.0, creates=[TableRequest([*prompt, 1], 4)]).grants
    assert again.cached_tokens == 4 * B, "a block on its way is matched where it is"
    pool.tiering.done(taken[0][0], 2.5)
    pool.check()
    assert "h" in tiers(pool, list(grant.blocks.block_ids[:4])), "who has it now is told"
    assert pool.remaps.take_news(worker.lease)
    worker.step(3.0, releases=[other.table_id])


def test_a_failed_copy_changes_nothing() -> None:
    pool, _, worker = rig(num_blocks=6)
    grant = worker.serve(tokens(4 * B))
    worker.step(1.0, releases=[grant.table_id])
    worker.step(1.5, creates=[TableRequest(tokens(2 * B, 3), 2)])
    before = [pool.block(one, 2.0).entry for one in grant.blocks.block_ids[:4]]
    ((move, _),) = pool.tiering.take_copies()
    pool.tiering.done(move, 2.0, failed=True)
    pool.check()
    assert [pool.block(one, 2.0).entry for one in grant.blocks.block_ids[:4]] == before
    assert pool.counters.demoted_blocks == 0


def test_a_full_host_drops_what_went_there_first() -> None:
    pool, _, worker = rig(num_blocks=6, num_host=2)
    for seed in range(4):
        grant = worker.serve(tokens(4 * B, seed), now=1.0 + seed)
        worker.step(1.5 + seed, releases=[grant.table_id])
        pool.tick(1.6 + seed)
        move_all(pool, 1.7 + seed)
    usage = pool.usage()
    assert (usage.host_total, usage.host_free, usage.host_cached) == (2, 0, 2)
    assert pool.counters.evicted_blocks > 0
    assert pool.counters.demoted_blocks > 2


def test_fp8_blocks_travel_as_such_and_compressing_comes_before() -> None:
    pool, lease, worker = rig(6, 4, Fp8(Policy.MANUAL, kept_share=0))
    grant = worker.serve(tokens(4 * B))
    worker.step(1.0, releases=[grant.table_id])
    ids = list(grant.blocks.block_ids[:4])
    compress(pool, lease, ids, [worker])
    filler = worker.serve(tokens(4 * B - 1, 3), now=2.0)
    move_all(pool, 2.5)
    assert "h" in tiers(pool, ids)
    assert {pool.block(one, 3.0).format for one in ids} == {Format.FP8_E4M3}
    below = [pool.block(one, 3.0) for one in ids if pool.block(one, 3.0).host]
    assert {unpack_entry(one.entry)[:2] for one in below} == {(Format.FP8_E4M3, 1)}
    assert pool.usage().host_cached == 1, "two in the place of one"
    worker.step(3.0, releases=[filler.table_id])


def test_pinned_blocks_stay_up_and_exactness_is_kept_on_the_way() -> None:
    pool, _, worker = rig(num_blocks=6)
    prompt = tokens(4 * B)
    grant = worker.serve(prompt)
    pool.prefixes.pin(PinRequest(prompt[: 2 * B], 100.0, pinned=True), 1.0)
    worker.step(1.0, releases=[grant.table_id])
    (other,) = worker.step(1.5, creates=[TableRequest(tokens(2 * B, 3), 2)]).grants
    pool.tick(2.0)
    move_all(pool, 2.0)
    ids = list(grant.blocks.block_ids[:4])
    assert tiers(pool, ids) in {"dddh", "ddhh"}
    assert all(pool.block(one, 3.0).exact for one in ids)
    worker.step(3.0, releases=[other.table_id])


def test_memds_own_lease_is_nobodys() -> None:
    pool, lease, worker = rig()
    pool.tick(1.0)
    mover = pool._state.mover
    assert mover is not None
    assert pool.num_leases == 2, "the client's and the worker's"
    assert pool.waiting_for_process() == []
    for end in (pool.release_lease, pool.renew_lease):
        with pytest.raises(PagepoolError) as caught:
            end(mover.lease_id, 2.0)
        assert caught.value.reason is Reason.LEASE_IS_WORKERS
    pool.detach(worker.lease, 2.0)
    pool.release_lease(lease, 2.0)
    assert pool.num_leases == 0


@pytest.mark.parametrize(("units", "blocks"), [(0.0, 5), (0.5, 4), (3.0, 5), (3.01, 4)])
def test_the_host_tier_begins_at_a_whole_unit(units: float, blocks: int) -> None:
    layout = GEOMETRY.layout(B)
    host = HostMemory(5 * layout.block_bytes, 0, int(units * layout.unit_bytes))
    extent = PoolMemory(1 << 20, 4, Tiers(host=host)).extent(layout)
    assert (extent.num_blocks, extent.num_host, extent.host_unit) == (4, blocks, ceil(units))


def test_two_moves_are_on_their_way_at_a_time_and_end_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering, "MAX_MOVED_BYTES", 2 * GEOMETRY.layout(B).block_bytes)
    pool, _, worker = rig(num_blocks=60, num_host=60)
    grants = [worker.serve(tokens(9 * B - 1, seed)) for seed in range(6)]
    worker.step(1.0, releases=[grant.table_id for grant in grants])
    worker.step(1.1, creates=[TableRequest(tokens(9 * B, 99), 10)])
    first, second = pool.tiering.take_copies()
    assert [len(copies) for _, copies in (first, second)] == [2, 2]
    assert pool.tiering.take_copies() == []
    with pytest.raises(InvariantError, match="not the oldest"):
        pool.tiering.done(second[0], 1.2)


def test_as_much_goes_down_as_is_wanted_however_many_moves_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering, "MAX_MOVED_BYTES", GEOMETRY.layout(B).block_bytes)
    pool, _, worker = rig(num_blocks=40, num_host=40)
    grants = [worker.serve(tokens(9 * B - 1, seed)) for seed in range(4)]
    worker.step(1.0, releases=[grant.table_id for grant in grants])
    worker.step(1.1, creates=[TableRequest(tokens(7 * B, 99), 8)])
    assert pool.usage().free == 0
    assert move_all(pool, 1.2) == 5
    assert pool.usage().free == 5
