"""What `pagepool doctor` advises where prefixes are not found in real pools, and that it helps."""

from __future__ import annotations

from collections.abc import Sequence

from memd import messages
from memd.core.pool import Pool
from pagepool_client.diagnosis.observation import Observation
from tests.cpu.core_worker import Worker
from tests.cpu.seen_pools import START_S, TOTAL, advice, codes, pool_of, seen, tokens


def prompts_served(pool: Pool, prompts: Sequence[Sequence[int]]) -> None:
    worker = Worker(pool)
    for prompt in prompts:
        worker.step(releases=[worker.table(prompt, -(-len(prompt) // pool.block_size))])


def serve(
    prompts: Sequence[Sequence[int]], total: int = TOTAL, block_size: int = 8, uptime_s: float = 7200.0
) -> Observation:
    pool = pool_of(total, block_size)
    prompts_served(pool, prompts)
    return seen(pool, uptime_s=uptime_s)


def test_more_blocks_keep_prefixes_that_were_evicted_before_they_were_asked_for_again() -> None:
    twice = [tokens(1000 * index, 41) for index in range(30)] * 2  # 150 full blocks, and as many tails
    of = serve(twice)
    assert codes(of) == ["prefixes_evicted"]
    assert codes(serve(twice, total=int(advice(of, "prefixes_evicted", "--max-num-blocks")))) == []


def test_smaller_blocks_let_short_prompts_be_found() -> None:
    short = [tokens(0, 12)] * 100
    of = serve(short, block_size=16)
    assert codes(of) == ["prompts_too_short"]
    assert codes(serve(short, block_size=int(advice(of, "prompts_too_short", "--block-size")))) == []


def test_a_pool_that_has_been_warmed_up_is_not_cold() -> None:
    shared = [tokens(1000 * index, 64) for index in range(10)]
    of = serve([*shared, *shared[:2], tokens(20_000, 400)], total=400, uptime_s=60.0)
    assert (codes(of), advice(of, "pool_is_cold", "max_tokens")) == (["pool_is_cold"], "1")
    pool = pool_of()
    prompts_served(pool, shared)  # the requests of one token
    before = messages.pool_message(pool, None, START_S)
    prompts_served(pool, shared * 2)
    warm = seen(pool, uptime_s=60.0)
    later = Observation(warm.pool, warm.blocks, warm.tables, at_s=warm.at_s, earlier=[before], watched_s=30.0)
    assert codes(later) == []


def test_prompts_that_begin_with_what_they_share_are_found() -> None:
    system = tokens(0, 64)
    of = serve([[900 + index, *system] for index in range(20)], total=400)
    assert codes(of) == ["prompts_differ"]
    assert advice(of, "prompts_differ", "text") == "what all share first"
    assert codes(serve([[*system, 900 + index] for index in range(20)], total=400)) == []
