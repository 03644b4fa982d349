"""A pool whose blocks go down to host memory and come up again, with real daemons and a real model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.memd.v1 import types_pb2
from pagepool_client import PoolClient
from tests.e2e.conftest import Memd
from tests.e2e.workers import Worker, greedy, household, within

B, BLOCKS = 16, 24

House = tuple[Memd, Worker, PoolClient]


def is_exact(memd: Memd) -> bool:
    return "off" in memd.process.args


def prompt(seed: int) -> list[int]:
    return [(300 + 11 * at + 97 * seed) % 900 + 3 for at in range(10 * B + 5)]


def ask(seed: int, tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    return greedy(prompt(seed), tokens, ignore_eos=True, **fields)


@pytest.fixture(params=["off", "always"])
def house(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--no-warmup")
    pool = ("--pool-bytes", "32MiB", "--block-size", str(B), "--max-num-blocks", str(BLOCKS), "--host-tier", "32MiB")
    with household(*pool, "--fp8", request.param, "--heartbeat-timeout", "2s") as (memd, launch):
        worker = launch("one", *flags).ready()
        with PoolClient(memd.target) as client:
            yield memd, worker, client


def test_what_no_longer_fits_goes_down_and_is_found_there(house: House) -> None:
    memd, worker, client = house
    first = [worker.generate(ask(seed)) for seed in range(8)]
    exact = is_exact(memd)
    within(20, lambda: client.pool().counters.demoted_blocks > 40 or not exact)
    pool = client.pool()
    assert pool.usage.total_blocks == BLOCKS
    assert pool.usage.host_blocks > 100
    assert pool.counters.evicted_blocks == 0
    below = [block for block in client.blocks() if block.tier == types_pb2.TIER_HOST]
    assert below
    assert pool.usage.host_blocks - pool.usage.host_free_blocks == pool.usage.host_cached_blocks > 0
    again = [worker.generate(ask(seed)) for seed in range(8)]
    assert all(one.finished.usage.cached_tokens >= 10 * B for one in again), "nothing is computed again"
    assert client.pool().counters.host_hit_tokens > 20 * B
    if exact:
        assert [one.token_ids for one in again] == [one.token_ids for one in first]
        assert {one.finished.usage.lossy_tokens for one in again} == {0}
    else:
        assert any(block.format == types_pb2.FORMAT_FP8_E4M3 for block in client.blocks())


def test_a_running_request_reads_what_is_below_until_it_is_up(house: House) -> None:
    memd, worker, client = house
    alone = worker.generate(ask(1, 60))
    for seed in range(2, 9):
        worker.generate(ask(seed))
    before = client.pool().counters
    again = worker.generate(ask(1, 60))
    after = client.pool().counters
    assert again.finished.usage.cached_tokens >= 10 * B
    assert after.host_hit_tokens > before.host_hit_tokens
    within(10, lambda: client.pool().counters.promoted_blocks > before.promoted_blocks)
    if is_exact(memd):
        assert again.token_ids == alone.token_ids


def test_a_killed_worker_and_a_stopped_one_cost_nothing(house: House, tiny_model: Path) -> None:
    _, worker, client = house
    for seed in range(6):
        worker.generate(ask(seed))
    call = worker.stub().Generate(ask(0, 200), timeout=60)
    assert next(call).HasField("started")
    os.kill(worker.engine_pid(), signal.SIGSTOP)
    worker.kill()
    within(20, lambda: not client.pool().num_block_tables)
    within(20, lambda: not client.pool().usage.quarantined_blocks)
    within(20, lambda: not client.pool().usage.held_blocks)  # by Recodes too, of a worker that is stopped
    usage = client.pool().usage
    assert usage.free_blocks + usage.cached_blocks + usage.kept_blocks == usage.total_blocks
    assert usage.host_free_blocks + usage.host_cached_blocks == usage.host_blocks
