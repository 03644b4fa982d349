"""Blocks between tiers and formats where several things happen to them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, cast

import pytest

from memd.core.extent import HostMemory, Tiers
from memd.core.fp8 import Fp8, Policy
from memd.core.pool import Pool
from memd.core.values import BlockCopy, Commit, PinRequest, TableRequest
from memd.moving import Mover
from memd.service import MemdLife, PoolService
from memd.sessions import Locks, Sessions
from pagekernels.layout import unpack_entry
from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1 import pool_service_pb2 as pb
from tests.cpu.compression_rig import GEOMETRY, B, Worker, compress, make, move_all, tokens

MANUAL = Fp8(Policy.MANUAL, kept_share=0)


def on_host(pool: Pool, block_id: int) -> bool:
    return pool.block(block_id, 9.0).host


class Service:
    """A PoolService over a pool, and every copy that it made, in order."""

    def __init__(self, pool: Pool) -> None:
        def fail(error: Exception) -> None:
            raise error

        self.copied: list[BlockCopy] = []
        self.pool = pool
        sessions = Sessions(pool, cast("Locks", None), lambda: 5.0, fail)
        self.life = MemdLife(pool, lambda: 5.0, 0.0, sessions, self._copy)
        sessions.on_news = Mover(pool, self._copy, lambda: 5.0, sessions.publish).begin
        self.calls = PoolService(self.life, read_only=False)

    def _copy(self, copies: Sequence[BlockCopy], _: int) -> None:
        self.copied += copies

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The answer to a call."""
        return asyncio.run(call)


@pytest.mark.parametrize("how", ["copy", "truncate"])
def test_what_is_evicted_for_a_clients_copy_is_copied_down_before_its_place_is_overwritten(how: str) -> None:
    pool, lease = make(4, None, 4)
    worker = Worker(pool, "one")
    shared, old = tokens(B, 1), tokens(2 * B - 1, 2)
    first = worker.serve(shared)
    worker.step(releases=[first.table_id])
    held = pool.create_table(lease, TableRequest([*shared, 1], 2), 2.0)
    grant = worker.serve(old)
    worker.step(releases=[grant.table_id])
    pool.allocate_blocks(lease, 1, 2.0)
    move_all(pool, 2.0, failed=True)
    assert pool.usage().free == 0
    service = Service(pool)
    if how == "copy":
        ids = [held.blocks.block_ids[0]]
        service.run(service.calls.copy_blocks(pb.CopyBlocksRequest(epoch=7, lease_id=lease, block_ids=ids), None))
    else:
        request = pb.TruncateBlockTableRequest(epoch=7, lease_id=lease, table_id=held.table_id, num_tokens=3)
        service.run(service.calls.truncate_block_table(request, None))
    down, copied = service.copied[:2]
    assert down.source == copied.target, "where the evicted block was"
    pool.check()


@pytest.mark.parametrize("down", [False, True])
def test_a_block_on_its_way_between_the_tiers_is_not_compressed_and_nobody_waits_for_it(down: bool) -> None:
    pool, lease = make(6, MANUAL, 6)
    worker = Worker(pool, "one")
    prompt = tokens(4 * B)
    grant = worker.serve(prompt)
    worker.step(1.0, releases=[grant.table_id])
    (other,) = worker.step(1.5, creates=[TableRequest(tokens(2 * B, 3), 2)]).grants
    if not down:
        move_all(pool, 2.0)
        worker.step(2.0, releases=[other.table_id])
        worker.step(2.0, creates=[TableRequest([*prompt, 1], 5)])
    ((move, _),) = pool.tiering.take_copies()
    moving = [pool._state.store.blocks.ids[place] for place in move.sources]  # type: ignore[union-attr]
    with pytest.raises(PagepoolError) as caught:
        pool.compression.compress(lease, moving, 2.5)
    assert caught.value.reason is Reason.BLOCK_MOVING
    pool.check()


def test_a_split_frame_that_goes_down_needs_more_than_one_of_the_host() -> None:
    pool, lease = make(12, MANUAL, 2)
    worker = Worker(pool, "one")

    def cached(seed: int, *, fp8: bool, blocks: int = 1) -> None:
        grant = worker.serve(tokens(blocks * B, seed))
        worker.step(releases=[grant.table_id])
        if fp8:
            compress(pool, lease, grant.blocks.block_ids[:blocks], [worker])
            pool.compression.take_finished()

    cached(1, fp8=True)
    filler = pool.allocate_blocks(lease, 11, 2.0)
    pool.tick(3.0)
    move_all(pool, 3.0)
    pool.free_blocks(lease, filler.block_ids, 3.0)
    cached(2, fp8=False)
    filler = pool.allocate_blocks(lease, 11, 4.0)
    pool.tick(4.0)
    move_all(pool, 4.0)
    assert pool.usage().host_free == 0
    pool.free_blocks(lease, filler.block_ids, 4.0)
    cached(3, fp8=True, blocks=2)
    cached(4, fp8=False)
    pool.allocate_blocks(lease, 10, 5.0)
    pool.tick(6.0)
    move_all(pool, 6.0)
    pool.check()


def test_tokens_after_a_lossy_block_are_lossy_when_an_exact_one_has_replaced_it() -> None:
    pool, lease = make(24)
    one, two = Worker(pool, "one"), Worker(pool, "two")
    prompt = tokens(3 * B)
    first = one.serve(prompt[: B + 3])
    compress(pool, lease, first.blocks.block_ids[:1], [one])
    one.acknowledge()
    one.step(commits=[Commit(first.table_id, prompt[B + 3 : B + 5])])  # these read the FP8 block
    (exact,) = two.step(creates=[TableRequest(prompt[: B + 1], 2, exact=True)]).grants
    assert exact.cached_tokens == 0
    two.step(commits=[Commit(exact.table_id, prompt[: B + 1])])
    moved = pool.table(first.table_id, 3.0).blocks.block_ids[0]
    assert pool.block(moved, 3.0).exact, "the exact one of two equal blocks stays"
    one.step(commits=[Commit(first.table_id, prompt[B + 5 : 2 * B])])
    (third,) = two.step(creates=[TableRequest(prompt, 3, exact=True)]).grants
    assert third.cached_tokens == B


def test_a_worker_that_took_no_recodes_for_a_stream_is_told_none_that_are_over() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    ids = worker.serve(tokens(B)).blocks.block_ids[:1]
    pool.compression.compress(lease, ids, 2.0)
    for listens in (False, True):
        worker.listens = listens
        worker.reclaim(2.0)
    assert worker.hear() == []
    with pytest.raises(PagepoolError) as caught:
        pool.compression.compress(lease, ids, 3.0)
    assert caught.value.reason is Reason.NO_WORKER
    pool.detach(worker.lease, 3.0)
    pool.check()


def fill(pool: Pool, lease: int) -> None:
    """Make blocks go down for a client's, which go again."""
    filling = list[int]()
    for now in (2.0, 3.0):
        filling += pool.allocate_blocks(lease, pool.usage().free, now).block_ids
        pool.tick(now)
        move_all(pool, now)
    pool.free_blocks(lease, filling, 3.0)


def below(prompt: list[int]) -> tuple[Pool, Worker, list[int]]:
    """A pool with room on its device, whose host tier has the blocks of a prompt."""
    pool, lease = make(8, None, 8)
    worker = Worker(pool, "one")
    grant = worker.serve(prompt)
    worker.step(1.0, releases=[grant.table_id])
    fill(pool, lease)
    return pool, worker, list(grant.blocks.block_ids[: len(prompt) // B])


def test_a_block_that_was_computed_again_stays_on_the_device_and_its_twin_of_the_host_goes() -> None:
    prompt = tokens(2 * B)
    pool, worker, ids = below(prompt)
    assert [on_host(pool, one) for one in ids] == [True, True]
    again = worker.serve(prompt, now=4.0)
    assert again.cached_tokens == B, "the last token is never found, so its block is computed"
    blocks = pool.table(again.table_id, 4.0).blocks.block_ids
    assert blocks[0] == ids[0]
    assert not on_host(pool, blocks[1])
    assert pool.usage().host_cached == 0


def test_a_block_that_was_matched_on_its_way_down_comes_up_again() -> None:
    pool, _ = make(6, None, 6)
    worker = Worker(pool, "one")
    prompt = tokens(4 * B)
    grant = worker.serve(prompt)
    worker.step(1.0, releases=[grant.table_id])
    (other,) = worker.step(1.5, creates=[TableRequest(tokens(2 * B, 3), 2)]).grants
    ((move, _),) = pool.tiering.take_copies()
    worker.step(2.0, creates=[TableRequest([*prompt, 1], 4)])
    pool.tiering.done(move, 2.5)
    ids = grant.blocks.block_ids[:4]
    assert any(on_host(pool, one) for one in ids)
    worker.step(3.0, releases=[other.table_id])
    for now in (4.0, 5.0):
        worker.acknowledge(now)
        pool.tick(now)
        move_all(pool, now)
    assert not any(on_host(pool, one) for one in ids)


def test_blocks_that_are_gone_do_not_pile_up_while_nothing_is_to_be_done() -> None:
    pool, _ = make(64, Fp8(Policy.PRESSURE), 8)
    worker = Worker(pool, "one")
    pool.tick(0.5)
    store, queues = pool._state.store, (pool.compressor._waiting, pool._state.host_matches)
    assert store is not None
    for queue in queues:
        queue.extend(range(10**6, 10**6 + 1000))
    worker.serve(tokens(B))
    queues[1].extend([store.blocks.ids[0]] * 500)
    pool.tick(1.0)
    assert max(map(len, queues)) <= 1


@pytest.mark.parametrize("policy", [Policy.PRESSURE, Policy.ALWAYS, Policy.COLD])
def test_no_policy_brings_blocks_of_the_host_up_to_compress_them(policy: Policy) -> None:
    pool, lease = make(8, Fp8(policy, idle_s=0.0, keep_recent=0, watermark=0.01, kept_share=0), 8)
    pool.tick(0.5)
    worker = Worker(pool, "one", listens=False)
    grant = worker.serve(tokens(4 * B))
    worker.step(1.0, releases=[grant.table_id])
    fill(pool, lease)
    assert pool.usage().host_cached > 1
    worker.listens = True
    worker.reclaim(3.0)
    for now in (4.0, 4.1):
        pool.tick(now)
    sources = [entry for news in worker.hear() for entry in news.sources]
    assert not any(unpack_entry(entry)[1] for entry in sources)


def test_a_host_tier_without_room_for_a_block_is_refused_by_name() -> None:
    pool = Pool(7, B, 1 << 20, tiers=Tiers(host=HostMemory(GEOMETRY.layout(B).block_bytes - 1)))
    with pytest.raises(PagepoolError, match="--host-tier is 511, but must be at least 512") as caught:
        pool.declare(GEOMETRY)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert pool.geometry is None


def test_a_copy_that_failed_is_not_tried_again_at_once() -> None:
    pool, lease = make(6, None, 6)
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(4 * B))
    worker.step(1.0, releases=[grant.table_id])
    pool.allocate_blocks(lease, pool.usage().free, 1.0)
    pool.tick(2.0)
    assert move_all(pool, 2.0, failed=True) == 1
    pool.tick(2.9)
    assert move_all(pool, 2.9) == 0
    pool.tick(3.0)
    assert move_all(pool, 3.0) > 0


def test_a_prefix_that_is_pinned_while_it_goes_down_stays_up() -> None:
    pool, lease = make(6, None, 6)
    worker = Worker(pool, "one")
    prompt = tokens(3 * B)
    grant = worker.serve(prompt)
    worker.step(1.0, releases=[grant.table_id])
    pool.allocate_blocks(lease, pool.usage().free, 1.0)
    pool.tick(2.0)
    pool.prefixes.pin(PinRequest(prompt, 100.0, pinned=True), 2.0)
    move_all(pool, 2.0)
    assert not any(on_host(pool, one) for one in grant.blocks.block_ids[:3])
