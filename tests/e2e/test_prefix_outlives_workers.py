"""Prefixes outlive the worker that computed them: its successor finds them, however it ended."""

from __future__ import annotations

from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from tests.e2e.workers import Continuation, TinyHouse, Worker, greedy, within

PROMPT, OTHER = list(range(1000, 1400)), list(range(3000, 3300))


def ask(worker: Worker, prompt: list[int]) -> Continuation:
    return worker.generate(greedy(prompt, 40, ignore_eos=True, cache_salt=b"outlives"))


def cached(run: Continuation) -> int:
    return run.finished.usage.cached_tokens


def test_a_successor_finds_what_a_killed_and_a_stopped_worker_had_computed(tiny_house: TinyHouse) -> None:
    memd, start = tiny_house.memd, tiny_house.start
    killed = start("killed").ready()
    first = ask(killed, PROMPT)
    assert cached(first) == 0
    history = [*PROMPT, *first.token_ids, 77, 78, 79]
    flying = killed.stub().Generate(greedy(OTHER, 3000, ignore_eos=True, cache_salt=b"outlives"), timeout=60)
    assert next(flying).HasField("started")
    tables = memd_pb.ListBlockTablesRequest()
    within(10, lambda: any(one.num_tokens > len(OTHER) for one in memd.pool().ListBlockTables(tables).block_tables))
    killed.kill()
    stopped = start("stopped").ready()
    again = ask(stopped, PROMPT)
    assert cached(again) >= 384, "all but the block with the last token, which may be reused in part"
    assert again.token_ids == first.token_ids
    assert cached(ask(stopped, history)) >= (len(PROMPT) + 39) // 16 * 16, "what was answered is found too"
    assert cached(ask(stopped, OTHER)) >= 288, "of a request that its worker's end cut off"
    answer = ask(stopped, [*OTHER, 5])
    assert stopped.stop() == 0
    third = ask(tiny_house.one, [*OTHER, 5])
    assert cached(third) >= 288
    assert third.token_ids == answer.token_ids
    within(10, lambda: memd.usage().held_blocks + memd.usage().quarantined_blocks == 0)
