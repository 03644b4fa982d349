"""A pool whose blocks go down to host memory and come up again, with real daemons and a real model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.errors import Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.memd.v1 import types_pb2
from pagepool.status import from_rpc_error
from pagepool_client import PoolClient
from tests.e2e.conftest import Memd
from tests.e2e.workers import Worker, greedy, household, read, within

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

    def at_rest() -> bool:
        """Nothing is on its way any more."""
        now = client.pool().usage
        return now.host_blocks - now.host_free_blocks == now.host_cached_blocks > 0

    within(10, at_rest)
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


LONG = [3 + (7919 * (at + 1) ** 2) % 900 for at in range(150 * B)]


@pytest.mark.parametrize("fp8", ["off", "pressure"])
def test_a_context_larger_than_the_device_says_the_same(tiny_model: Path, fp8: str) -> None:
    """A prompt of 150 blocks on a device of 48, beside short ones, and continued by 100 tokens."""
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--no-warmup")
    asked = greedy(LONG, 100, ignore_eos=True, kv_precision=pb.KV_PRECISION_EXACT)
    said = []
    for blocks in ("400", "48"):
        pool = ("--pool-bytes", "64MiB", "--block-size", str(B), "--max-num-blocks", blocks, "--host-tier", "64MiB")
        with household(*pool, "--fp8", fp8) as (memd, launch):
            worker = launch("one", *flags).ready()
            with PoolClient(memd.target) as client, ThreadPoolExecutor(3) as clients:
                short = [clients.submit(worker.generate, ask(seed, 30)) for seed in range(2)]
                said.append(worker.generate(asked).token_ids)
                assert all(len(one.result().token_ids) == 30 for one in short)
                again = worker.generate(asked)
                assert again.token_ids == said[0]
                assert again.finished.usage.cached_tokens >= 149 * B
                within(20, lambda: not client.pool().usage.quarantined_blocks)
    assert said[0] == said[1]


def test_what_both_tiers_cannot_hold_is_refused_at_once(tiny_model: Path) -> None:
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--no-warmup")
    pool = ("--pool-bytes", "64MiB", "--block-size", str(B), "--max-num-blocks", "48", "--host-tier", "512KiB")
    with household(*pool) as (memd, launch), PoolClient(memd.target) as client:
        worker = launch("one", *flags).ready()
        below = client.pool().usage.host_blocks
        assert 0 < below < 100
        with pytest.raises(grpc.RpcError) as caught:
            worker.generate(greedy(LONG, 8))
        error = from_rpc_error(caught.value)
        assert error.reason is Reason.REQUEST_TOO_LARGE
        assert error.metadata["total_blocks"] == str(48 + below)


@pytest.mark.full
def test_a_6k_prompt_on_a_2k_pool_says_the_same_as_on_a_large_one() -> None:
    """The real model in float32; the text is that of the accuracy benchmark."""
    text = (Path(__file__).parents[2] / "clients" / "bench" / "data" / "constitution.txt").read_text()
    said = []
    for blocks in ("512", "128"):
        pool = ("--pool-bytes", "2GiB", "--block-size", str(B), "--max-num-blocks", blocks, "--host-tier", "2GiB")
        with household(*pool) as (_, launch):
            worker = launch("one", "--model", "smollm2", "--dtype", "float32").ready()
            ids = list(worker.stub().Tokenize(pb.TokenizeRequest(text=text)).token_ids)[:6144]
            answer = read(worker.stub().Generate(greedy(ids, 32, ignore_eos=True), timeout=900))
            assert answer.finished.usage.prompt_tokens == 6144
            said.append(answer.token_ids)
    assert said[0] == said[1]
