"""Blocks that are compressed without being named: which, when, and how many at a time."""

from __future__ import annotations

import pytest

from memd.core.fp8 import Fp8, Policy
from memd.core.pool import Pool
from memd.core.values import BlockState, TableRequest
from pagekernels.layout import Format
from tests.cpu.compression_rig import BAD, B, Worker, compress, make, tokens


def rig(num_blocks: int = 24, **settings: object) -> tuple[Pool, int, Worker]:
    """A pool and its one worker; nothing is kept back, and nothing is too recent, if it is not said."""
    given = {"kept_share": 0.0, "keep_recent": 0, **settings}
    pool, lease = make(num_blocks, Fp8(**given))  # type: ignore[arg-type]
    pool.tick(0.0)
    return pool, lease, Worker(pool, "one")


def work_off(pool: Pool, worker: Worker, now: float, error: float = 0.02) -> list[int]:
    """Everything that the policy asks for now is done; how many blocks each Recode had."""
    sizes = []
    pool.tick(now)
    pool.check()
    while worker.hear():
        sizes.append(len(worker.told[0].sources))
        worker.answer(now, errors=error)
        worker.acknowledge(now)
    return sizes


def formats(pool: Pool, block_ids: list[int]) -> str:
    """8 for each FP8 block, 6 for each other."""
    return "".join("8" if pool.block(one, 9.0).format is Format.FP8_E4M3 else "6" for one in block_ids)


def test_always_compresses_what_is_sealed_but_for_the_first_block() -> None:
    pool, _, worker = rig(policy=Policy.ALWAYS)
    grant = worker.serve(tokens(5 * B + 3))
    assert work_off(pool, worker, 2.0) == [4]
    assert formats(pool, list(grant.blocks.block_ids)) == "688886"
    assert work_off(pool, worker, 3.0) == []
    worker.step(4.0, commits=[])
    assert pool.counters.compressed_blocks == 4


def test_the_newest_blocks_of_any_table_are_left_until_they_are_not_the_newest() -> None:
    pool, _, worker = rig(policy=Policy.ALWAYS, keep_recent=2)
    prompt = tokens(6 * B)
    grant = worker.serve(prompt)
    ids = list(grant.blocks.block_ids)
    (short,) = worker.step(creates=[TableRequest([*prompt[: 4 * B], 7], 5)]).grants
    assert short.cached_tokens == 4 * B
    work_off(pool, worker, 2.0)
    assert formats(pool, ids) == "6866666", "blocks 2 and 3 are the newest of the shorter table, 4 and 5 of the longer"
    worker.step(releases=[short.table_id])
    work_off(pool, worker, 3.0)
    assert formats(pool, ids) == "6888666"
    worker.step(releases=[grant.table_id])
    work_off(pool, worker, 4.0)
    assert formats(pool, ids[:6]) == "688888"


def test_cold_compresses_what_nobody_uses_and_what_is_idle() -> None:
    pool, lease, worker = rig(policy=Policy.COLD, idle_s=10.0)
    idle, busy = worker.serve(tokens(3 * B, 1), now=1.0), worker.serve(tokens(3 * B, 2), now=8.0)
    gone, held = worker.serve(tokens(3 * B, 3), now=8.0), worker.serve(tokens(3 * B, 4), now=8.0)
    pool.share_blocks(lease, [held.blocks.block_ids[2]], 8.0)
    worker.step(8.0, releases=[gone.table_id, held.table_id])
    work_off(pool, worker, 9.0)
    first = [formats(pool, list(one.blocks.block_ids[:3])) for one in (idle, busy, gone, held)]
    assert first == ["666", "666", "688", "686"], "a client holds the last one"
    work_off(pool, worker, 12.0)
    assert formats(pool, list(idle.blocks.block_ids[:3])) == "688"
    assert formats(pool, list(busy.blocks.block_ids[:3])) == "666"


def test_pressure_waits_for_the_watermark_and_takes_running_tables_last() -> None:
    pool, _, worker = rig(20, policy=Policy.PRESSURE, watermark=0.5)
    gone = worker.serve(tokens(4 * B, 1))
    worker.step(releases=[gone.table_id])
    assert work_off(pool, worker, 2.0) == [], "15 of 20 are free"
    running = worker.serve(tokens(7 * B - 1, 2))
    assert pool.usage().free == 9
    work_off(pool, worker, 3.0)
    assert formats(pool, list(gone.blocks.block_ids[:4])) == "6886", "until 10 are free"
    assert formats(pool, list(running.blocks.block_ids)) == "6666666", "13 blocks are free or could be evicted"
    more = worker.serve(tokens(8 * B - 1, 3))
    work_off(pool, worker, 4.0)
    ids = list(running.blocks.block_ids)
    assert formats(pool, ids) == "6888886", "the oldest first, until there is enough; the last is not full"
    assert pool.usage().available >= 10
    assert formats(pool, list(more.blocks.block_ids))[0] == "6"


def test_a_worker_has_one_recode_at_a_time_of_so_many_bytes() -> None:
    pool, _, worker = rig(policy=Policy.ALWAYS, step_bytes=3 * rig()[0].block_bytes)
    worker.serve(tokens(9 * B))
    pool.tick(2.0)
    pool.tick(2.1)
    assert [len(one.sources) for one in worker.hear()] == [3]
    assert work_off(pool, worker, 3.0) == [3, 3, 2]


def test_blocks_go_to_the_worker_that_uses_them_even_if_it_has_to_finish_something_first() -> None:
    pool, lease, one = rig(policy=Policy.ALWAYS, keep_recent=1)
    two = Worker(pool, "two")
    grants = [worker.serve(tokens(4 * B, seed)) for seed, worker in enumerate((one, two))]
    pool.compression.compress(lease, grants[0].blocks.block_ids[:1], 1.5)
    pool.tick(2.0)
    assert [len(news.sources) for news in one.hear()] == [1]
    assert [len(news.sources) for news in two.hear()] == [2]
    one.answer(2.5)
    assert [len(news.sources) for news in one.hear()] == [2]


def test_what_would_lose_too_much_is_tried_once() -> None:
    pool, _, worker = rig(policy=Policy.ALWAYS)
    grant = worker.serve(tokens(3 * B))
    assert work_off(pool, worker, 2.0, BAD) == [2]
    assert work_off(pool, worker, 3.0) == []
    assert formats(pool, list(grant.blocks.block_ids[:3])) == "666"


def test_exact_tables_are_left_alone_until_they_end() -> None:
    pool, _, worker = rig(policy=Policy.ALWAYS)
    prompt = tokens(3 * B)
    first = worker.serve(prompt)
    (exact,) = worker.step(creates=[TableRequest([*prompt, 1], 4, exact=True)]).grants
    assert work_off(pool, worker, 2.0) == []
    worker.step(releases=[exact.table_id])
    assert work_off(pool, worker, 3.0) == [2]
    assert formats(pool, list(first.blocks.block_ids[:3])) == "688"


@pytest.mark.parametrize("policy", [Policy.MANUAL, Policy.COLD])
def test_nothing_is_done_without_reason(policy: Policy) -> None:
    pool, _, worker = rig(policy=policy)
    worker.serve(tokens(3 * B))
    assert work_off(pool, worker, 2.0) == []


def test_a_full_pool_can_still_compress_into_what_is_kept_back() -> None:
    pool, lease = make(12, Fp8(kept_share=0.1))
    pool.tick(0.0)
    worker = Worker(pool, "one")
    assert (pool.num_blocks, pool.usage().total, pool.usage().kept) == (11, 12, 1)
    grant = worker.serve(tokens(11 * B - 1))
    assert (pool.usage().free, pool.usage().held) == (0, 11)
    compress(pool, lease, grant.blocks.block_ids[1:3], [worker])
    usage = pool.usage()
    assert (usage.kept, usage.quarantined, usage.free) == (0, 2, 0)
    worker.acknowledge()
    assert (pool.usage().kept, pool.usage().free) == (1, 1), "what becomes free is kept back first"
    (more,) = worker.step(creates=[TableRequest(tokens(3, 5), 1)]).grants
    assert len(more.blocks.block_ids) == 1
    worker.step(releases=[grant.table_id, more.table_id])
    assert {pool.block(one, 9.0).state for one in grant.blocks.block_ids[1:3]} == {BlockState.CACHED}
    assert pool.usage().available == 11


def test_under_pressure_a_full_pool_makes_room_for_what_waits() -> None:
    pool, _, worker = rig(16, policy=Policy.PRESSURE, kept_share=0.1, keep_recent=1)
    worker.serve(tokens(15 * B - 1))
    assert pool.usage().free == 0
    assert worker.step(creates=[TableRequest(tokens(4 * B, 7), 5)]).refusals
    sizes = work_off(pool, worker, 2.0)
    assert 8 <= sum(sizes) <= 14, sizes
    assert sizes[0] == 2, "what was kept back has two"
    assert worker.step(creates=[TableRequest(tokens(4 * B, 7), 5)]).grants
