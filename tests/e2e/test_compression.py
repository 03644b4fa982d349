"""Blocks of a real model that become FP8 blocks by command: what is read from them, and who may not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagepool.errors import PagepoolError, Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.memd.v1 import pool_service_pb2, types_pb2
from pagepool_client import PoolClient, PoolLease
from tests.e2e.conftest import Memd
from tests.e2e.test_memd_tools import tool
from tests.e2e.workers import Worker, greedy, household, within

B = 16
FP8, F32 = types_pb2.FORMAT_FP8_E4M3, types_pb2.FORMAT_F32
PROMPT = [300 + 11 * at % 700 for at in range(10 * B + 5)]

House = tuple[Memd, Worker, PoolClient, PoolLease]


@pytest.fixture
def house(tiny_model: Path) -> Iterator[House]:
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--no-warmup")
    pool = ("--pool-bytes", "32MiB", "--block-size", str(B), "--fp8", "manual", "--heartbeat-timeout", "2s")
    with household(*pool) as (memd, launch):
        worker = launch("one", *flags).ready()
        with PoolClient(memd.target) as client, client.lease(holder="test") as lease:
            yield memd, worker, client, lease


def ask(salt: str = "", precision: pb.KvPrecision = pb.KV_PRECISION_UNSPECIFIED, **fields: Any) -> pb.GenerateRequest:
    return greedy(PROMPT, 20, ignore_eos=True, cache_salt=salt.encode(), kv_precision=precision, **fields)


def cached(client: PoolClient) -> list[types_pb2.Block]:
    return [block for block in client.blocks() if block.sealed]


def test_a_compressed_prefix_is_read_by_who_takes_any_and_not_by_who_wants_exact(house: House) -> None:
    _, worker, client, lease = house
    alone = worker.generate(ask())
    before = cached(client)
    assert {(block.format, block.exact) for block in before} == {(F32, True)}
    done = lease.compress([block.block_id for block in before])
    assert [one.block_id for one in done] == [block.block_id for block in before]
    assert {one.format for one in done} == {FP8}
    assert all(0 < one.k_error < 0.05 and 0 < one.v_error < 0.05 for one in done)
    after = cached(client)
    assert [block.block_id for block in after] == [block.block_id for block in before]
    assert {(block.format, block.exact) for block in after} == {(FP8, False)}
    assert [block.digest for block in after] == [block.digest for block in before]
    assert [(block.entry, pytest.approx(block.k_error)) for block in after] == [
        (one.entry, one.k_error) for one in done
    ]
    usage = client.pool().usage
    assert (usage.fp8_blocks, usage.split_blocks) == (len(after), -(-len(after) // 4)), (
        "four in the place of one of f32"
    )
    assert (usage.cached_blocks, usage.held_blocks) == (usage.split_blocks, 0)

    lossy = worker.generate(ask())
    used = lossy.finished.usage
    assert used.cached_tokens == len(PROMPT) - 1, "of the last block a part, decompressed"
    assert used.lossy_tokens == len(after) * B, "what it computed anew was equal to what was there"
    exact = worker.generate(ask(precision=pb.KV_PRECISION_EXACT))
    assert (exact.finished.usage.cached_tokens, exact.finished.usage.lossy_tokens) == (0, 0)
    assert exact.token_ids == alone.token_ids
    again = worker.generate(ask())
    assert again.token_ids == alone.token_ids, "the exact ones took the places of the others in the index"
    assert again.finished.usage.lossy_tokens == 0


def test_blocks_of_a_running_table_move_under_its_worker(house: House) -> None:
    _, worker, client, lease = house
    call = worker.stub().Generate(greedy(PROMPT, 400, ignore_eos=True), timeout=120)
    assert next(call).HasField("started")
    within(30, lambda: len(cached(client)) >= 10)
    held = cached(client)[:8]
    done = lease.compress([block.block_id for block in held])
    assert {one.format for one in done} == {FP8}
    within(10, lambda: not client.pool().usage.quarantined_blocks)
    finished = [event.finished for event in call if event.HasField("finished")]
    assert (finished[0].usage.generated_tokens, finished[0].usage.lossy_tokens) == (400, 8 * B)


def test_who_wants_exact_blocks_keeps_them_while_it_runs(house: House) -> None:
    _, worker, client, lease = house
    call = worker.stub().Generate(greedy(PROMPT, 400, ignore_eos=True, kv_precision=pb.KV_PRECISION_EXACT), timeout=120)
    assert next(call).HasField("started")
    within(30, lambda: len(cached(client)) >= 4)
    block_ids = [block.block_id for block in cached(client)]
    with pytest.raises(PagepoolError, match="wants exact KV") as caught:
        lease.compress(block_ids)
    assert caught.value.reason is Reason.BLOCK_WANTED_EXACT
    call.cancel()
    within(10, lambda: not client.pool().num_block_tables)
    assert {one.format for one in lease.compress(block_ids)} == {FP8}


def test_decompressed_blocks_stay_inexact(house: House) -> None:
    _, worker, client, lease = house
    worker.generate(ask())
    block_ids = [block.block_id for block in cached(client)]
    lease.compress(block_ids)
    done = lease.decompress(block_ids)
    assert {one.format for one in done} == {F32}
    assert {(block.format, block.exact) for block in cached(client)} == {(F32, False)}
    assert client.pool().counters.decompressed_blocks == len(block_ids)
    assert worker.generate(ask(precision=pb.KV_PRECISION_EXACT)).finished.usage.cached_tokens == 0


def test_a_worker_that_dies_in_the_middle_leaves_everything_as_it_was(house: House) -> None:
    _, worker, client, lease = house
    worker.generate(ask())
    before = cached(client)
    os.kill(worker.engine_pid(), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lease.compress, [block.block_id for block in before])
        within(10, lambda: client.pool().usage.fp8_blocks)
        worker.kill()
        with pytest.raises(PagepoolError) as caught:
            asked.result(30)
    assert caught.value.reason is Reason.NO_WORKER
    within(10, lambda: not client.pool().usage.quarantined_blocks)
    after = cached(client)
    assert [(block.entry, block.format, block.exact) for block in after] == [
        (block.entry, block.format, block.exact) for block in before
    ]
    assert client.pool().usage.fp8_blocks == 0
    with pytest.raises(PagepoolError) as caught:
        lease.compress([after[0].block_id])
    assert caught.value.reason is Reason.NO_WORKER


def test_a_call_is_answered_the_same_when_it_is_repeated_and_names_what_is_wrong(house: House) -> None:
    _, worker, client, lease = house
    worker.generate(ask())
    block_ids = [block.block_id for block in cached(client)]
    request = pool_service_pb2.CompressBlocksRequest(
        request_id="once", epoch=lease.epoch, lease_id=lease.lease_id, block_ids=[block_ids[0], block_ids[0]]
    )
    first = client.call("CompressBlocks", request)
    assert client.call("CompressBlocks", request) == first
    assert len(first.compressions) == 1
    unsealed = lease.allocate(1).block_ids
    for wrong, reason in (
        ([], Reason.INVALID_FIELD),
        ([10**9], Reason.BLOCK_NOT_FOUND),
        (unsealed, Reason.BLOCK_NOT_SEALED),
        ([block_ids[1]] * 70_000, Reason.INVALID_FIELD),
    ):
        with pytest.raises(PagepoolError) as caught:
            lease.compress(wrong)
        assert caught.value.reason is reason
    assert [block.format for block in cached(client)][1] == F32


def test_grpcurl_compresses_a_block_and_sees_it_change(house: House, tmp_path: Path) -> None:
    memd, worker, client, lease = house
    worker.generate(ask())
    block_id = cached(client)[1].block_id

    def call(method: str, **fields: Any) -> Any:
        where = ["-unix", "-authority", "localhost", "-d", json.dumps(fields), str(memd.socket)]
        line = [tool("grpcurl"), "-plaintext", *where, f"pagepool.memd.v1.PoolService/{method}"]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    before = call("GetBlock", block_id=block_id)["block"]
    assert (before["format"], before["exact"]) == ("FORMAT_F32", True)
    named = {"epoch": str(lease.epoch), "lease_id": lease.lease_id, "block_ids": [block_id]}
    (done,) = call("CompressBlocks", **named)["compressions"]
    after = call("GetBlock", block_id=block_id)["block"]
    assert (after["format"], "exact" in after) == ("FORMAT_FP8_E4M3", False)
    assert (after["entry"], after["k_error"]) == (done["entry"], done["k_error"])
    assert after["entry"] != before["entry"]
    assert after["digest"] == before["digest"]
