"""A GPU pool with a host tier: blocks go down by copy engines, are read in place, and come up again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.memd.v1 import types_pb2
from pagepool_client import PoolClient
from tests.e2e.workers import Worker, greedy, household, within

pytest.importorskip("pycuda.driver", exc_type=ImportError)

from tests.gpu.test_engine_cuda import FLAGS, make_model

B, BLOCKS, PROMPTS = 16, 64, 8
LENGTH = 20 * B + 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["off", "always"])
def house(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Worker, PoolClient]]:
    pool = ("--device", "cuda", "--pool-bytes", "64MiB", "--max-num-blocks", str(BLOCKS), "--host-tier", "256MiB")
    with household(*pool, "--block-size", str(B), "--fp8", request.param) as (memd, launch):
        worker = launch("one", "--model", str(model), *FLAGS).ready()
        with PoolClient(memd.target) as client:
            yield request.param, worker, client


def ask(seed: int, tokens: int = 24) -> pb.GenerateRequest:
    prompt = [2 + (seed * 131 + 7919 * (i + 1) ** 2) % 256 for i in range(LENGTH)]
    return greedy(prompt, tokens, ignore_eos=True)


def test_what_went_down_is_read_there_and_says_the_same(house: tuple[str, Worker, PoolClient]) -> None:
    policy, worker, client = house
    first = [worker.generate(ask(seed)) for seed in range(PROMPTS)]
    pool = client.pool()
    assert pool.usage.total_blocks == BLOCKS
    assert pool.usage.host_blocks > 4 * BLOCKS
    assert pool.counters.evicted_blocks == 0
    again = [worker.generate(ask(seed)) for seed in range(PROMPTS)]
    assert all(one.finished.usage.cached_tokens >= 20 * B for one in again)
    if policy == "off":
        assert pool.counters.demoted_blocks > BLOCKS
        assert client.pool().counters.host_hit_tokens > 40 * B
        assert [one.token_ids for one in again] == [one.token_ids for one in first]
    else:
        formats = {block.format for block in client.blocks()}
        assert types_pb2.FORMAT_FP8_E4M3 in formats


def test_a_running_request_hears_that_its_blocks_are_up_again(house: tuple[str, Worker, PoolClient]) -> None:
    policy, worker, client = house
    alone = worker.generate(ask(0, 200))
    for seed in range(1, PROMPTS):
        worker.generate(ask(seed))
    before = client.pool().counters.promoted_blocks
    again = worker.generate(ask(0, 200))
    if policy == "off":
        assert again.token_ids == alone.token_ids
        within(10, lambda: client.pool().counters.promoted_blocks > before)
