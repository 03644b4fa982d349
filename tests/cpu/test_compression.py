"""Blocks that become FP8 blocks: their ids, places, holders and exactness, and what becomes free by it."""

from __future__ import annotations

import pytest

from memd.core.values import BlockState, Commit, PinRequest, TableRequest
from pagekernels.layout import Format, unpack_entry
from pagepool.errors import PagepoolError, Reason
from tests.cpu.compression_rig import BAD, GOOD, B, Worker, compress, make, tokens


def test_two_compressed_blocks_are_in_the_place_of_one_and_keep_their_ids() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(2 * B))
    worker.step(releases=[grant.table_id])
    first, second = grant.blocks.block_ids[:2]
    free = pool.usage().free
    done = compress(pool, lease, [first, second], [worker])
    assert [(one.block_id, one.format, one.errors[0]) for one in done] == [
        (block_id, Format.FP8_E4M3, pytest.approx(GOOD)) for block_id in (first, second)
    ]
    for block_id in (first, second):
        view = pool.block(block_id, 3.0)
        assert (view.format, view.exact, view.state, view.sealed) == (Format.FP8_E4M3, False, BlockState.CACHED, True)
    units = [unpack_entry(pool.block(block_id, 3.0).entry)[2] for block_id in (first, second)]
    assert units[0] // 2 == units[1] // 2
    assert pool.usage().free == free + 1
    again = worker.serve([*tokens(2 * B), 5])
    assert again.cached_tokens == 2 * B
    assert list(again.blocks.block_ids[:2]) == [first, second]
    assert [unpack_entry(entry)[0] for entry in again.blocks.entries[:2]] == [Format.FP8_E4M3] * 2


def test_a_compressed_block_is_left_alone() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(B))
    done = compress(pool, lease, grant.blocks.block_ids[:1], [worker])
    assert pool.compression.compress(lease, grant.blocks.block_ids[:1], 2.0) == (done, [])
    assert pool.counters.compressed_blocks == 1


def test_a_block_that_does_not_fit_stays_what_it_was() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(3 * B))
    before, usage = pool.table(grant.table_id, 2.0), pool.usage()
    compress(pool, lease, grant.blocks.block_ids[:3], [worker], errors=BAD)
    assert pool.table(grant.table_id, 2.0).blocks == before.blocks
    assert pool.usage() == usage
    assert not pool.remaps.leases_with_news()


def test_a_worker_hears_where_its_block_is_and_the_old_place_is_free_when_it_has_said_so() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(2 * B))
    ids, usage = grant.blocks.block_ids, pool.usage()
    compress(pool, lease, ids[:2], [worker])
    assert (pool.usage().quarantined, pool.usage().held) == (2, usage.held - 1)
    first, second = pool.remaps.take_news(worker.lease)
    assert [(one.index, one.old_block_id, one.block_id) for one in (first, second)] == [
        (0, ids[0], ids[0]),
        (1, ids[1], ids[1]),
    ]
    assert [one.entry for one in (first, second)] == list(pool.table(grant.table_id, 3.0).blocks.entries[:2])
    worker.step(acknowledged=first.sequence)
    assert pool.usage().quarantined == 1
    worker.step(acknowledged=second.sequence)
    assert pool.usage().quarantined == 0
    assert pool.usage().free == usage.free + 1
    worker.step(releases=[grant.table_id])
    assert pool.usage().held == 0


def test_what_comes_after_a_compressed_block_is_not_exact() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(2 * B))
    compress(pool, lease, grant.blocks.block_ids[:1], [worker])
    worker.step(commits=[Commit(grant.table_id, tokens(B, 3))])
    views = [pool.block(block_id, 3.0) for block_id in pool.table(grant.table_id, 3.0).blocks.block_ids]
    assert [view.exact for view in views] == [False, True, False]
    assert [view.format for view in views] == [Format.FP8_E4M3, Format.BF16, Format.BF16]


def test_of_two_equal_blocks_the_exact_one_stays() -> None:
    pool, lease = make(24)
    one, two = Worker(pool, "one"), Worker(pool, "two")
    prompt = tokens(2 * B)
    (slow,) = two.step(creates=[TableRequest(prompt, 3)]).grants
    grant = one.serve(prompt)
    compress(pool, lease, grant.blocks.block_ids[:2], [one, two])
    one.acknowledge()
    two.step(commits=[Commit(slow.table_id, prompt)])
    views = [pool.block(block_id, 3.0) for block_id in pool.table(grant.table_id, 3.0).blocks.block_ids[:2]]
    assert [view.exact for view in views] == [True, True]
    assert list(pool.table(grant.table_id, 3.0).blocks.block_ids[:2]) == list(slow.blocks.block_ids[:2])


def test_a_decompressed_block_has_a_frame_again_and_is_not_exact() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(2 * B))
    first, second = grant.blocks.block_ids[:2]
    compress(pool, lease, [first, second], [worker])
    worker.acknowledge()
    _, (recode,) = pool.compression.decompress(lease, [first], 3.0)
    assert worker.answer(3.0) is recode
    assert [(one.block_id, one.format) for one in recode.outcomes] == [(first, Format.BF16)]
    assert (pool.block(first, 4.0).format, pool.block(first, 4.0).exact) == (Format.BF16, False)
    (there,), recodes = pool.compression.decompress(lease, [first], 3.0)
    assert (there.block_id, there.format, recodes) == (first, Format.BF16, [])
    assert pool.usage().quarantined == 0, "a split frame with a block that is held is held"
    worker.acknowledge()
    worker.step(releases=[grant.table_id])
    assert (pool.usage().held, pool.usage().cached) == (0, 2)


def test_who_wants_exact_blocks_finds_no_others_and_keeps_what_it_has() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    prompt = tokens(3 * B)
    grant = worker.serve(prompt)
    worker.step(releases=[grant.table_id])
    compress(pool, lease, grant.blocks.block_ids[1:2], [worker])
    (exact,) = worker.step(creates=[TableRequest([*prompt, 1], 4, exact=True)]).grants
    assert exact.cached_tokens == B
    (lossy,) = worker.step(creates=[TableRequest([*prompt, 1], 4)]).grants
    assert lossy.cached_tokens == 3 * B
    with pytest.raises(PagepoolError, match="wants exact KV") as caught:
        pool.compression.compress(lease, grant.blocks.block_ids[:1], 3.0)
    assert caught.value.reason is Reason.BLOCK_WANTED_EXACT
    pool.check()


def test_split_frames_are_emptied_when_blocks_are_wanted() -> None:
    pool, lease = make(6)
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(4 * B))
    worker.step(releases=[grant.table_id])
    compress(pool, lease, grant.blocks.block_ids[:4], [worker])
    assert (pool.usage().free, pool.usage().cached) == (4, 2)
    (other,) = worker.step(creates=[TableRequest(tokens(B, 7), 6)]).grants
    assert len(other.blocks.block_ids) == 6
    assert (pool.usage().free, pool.usage().cached, pool.usage().held) == (0, 0, 6)


def test_a_frame_is_not_emptied_while_anybody_has_a_block_in_it() -> None:
    pool, lease = make(6)
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(4 * B))
    worker.step(releases=[grant.table_id])
    compress(pool, lease, grant.blocks.block_ids[:4], [worker])
    pool.share_blocks(lease, [grant.blocks.block_ids[1]], 3.0)
    pool.check()
    assert pool.usage().available == 5
    refused = worker.step(creates=[TableRequest(tokens(B, 7), 6)]).refusals
    assert [one.available_blocks for one in refused] == [5]
    assert worker.step(creates=[TableRequest(tokens(B, 7), 5)]).grants
    assert pool.block(grant.blocks.block_ids[1], 4.0).format is Format.FP8_E4M3


def test_direct_references_and_pins_go_with_the_block() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    prompt = tokens(2 * B)
    grant = worker.serve(prompt)
    worker.step(releases=[grant.table_id])
    first, second = grant.blocks.block_ids[:2]
    pool.prefixes.pin(PinRequest(prompt, 100.0, pinned=True), 1.0)
    pool.share_blocks(lease, [first, first], 1.0)
    compress(pool, lease, [first, second], [worker])
    assert pool.block(first, 3.0).ref_count == 2
    assert pool.block(second, 3.0).pinned
    assert pool.usage().available == 11
    pool.free_blocks(lease, [first, first], 3.0)
    pool.check()
    assert (pool.usage().pinned, pool.usage().available) == (1, 11)
    assert pool.usage().free == 11


def test_a_full_pool_evicts_what_nobody_has_to_compress_and_says_if_it_cannot() -> None:
    pool, lease = make(4)
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(3 * B))
    with pytest.raises(PagepoolError, match="1 blocks were asked for, but only 0") as caught:
        pool.compression.compress(lease, grant.blocks.block_ids[:1], 2.0)
    assert caught.value.reason is Reason.POOL_EXHAUSTED
    pool.check()


def test_what_cannot_be_compressed_is_refused_and_nothing_is_changed() -> None:
    pool, lease = make()
    Worker(pool, "other")
    deaf = Worker(pool, "deaf", listens=False)
    grant = deaf.serve(tokens(B + 3))
    usage = pool.usage()
    for block_ids, reason in (
        (grant.blocks.block_ids[:1], Reason.BLOCK_FIXED),
        (grant.blocks.block_ids[1:2], Reason.BLOCK_NOT_SEALED),
        ([99], Reason.BLOCK_NOT_FOUND),
        ([], Reason.INVALID_FIELD),
    ):
        with pytest.raises(PagepoolError) as caught:
            pool.compression.compress(lease, block_ids, 2.0)
        assert caught.value.reason is reason
        pool.check()
    assert pool.usage() == usage


def test_compressing_1000_scattered_blocks_makes_490_new_ones_allocatable() -> None:
    pool, lease = make(2200)
    worker = Worker(pool, "one")
    grants = [worker.serve(tokens(20 * B, seed)) for seed in range(100)]
    worker.step(releases=[grant.table_id for grant in grants])
    scattered = sorted(block_id for grant in grants for block_id in grant.blocks.block_ids[:20])[::2]
    before = pool.usage().free
    for at in range(0, 1000, 50):  # 32 MiB a call are some 35 blocks of a 7B model
        done = compress(pool, lease, scattered[at : at + 50], [worker])
        assert {one.format for one in done} == {Format.FP8_E4M3}
    worker.acknowledge()
    assert pool.usage().free - before == 500
    (grant,) = worker.step(creates=[TableRequest(tokens(B, 999), before + 490)]).grants
    assert len(grant.blocks.block_ids) == before + 490
    assert pool.counters.evicted_blocks == 0
