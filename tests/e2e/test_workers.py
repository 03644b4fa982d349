"""Several workers on one memd: what they share, and what the death of one is to the others."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pagepool.errors import Code, Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from pagepool.memd.v1 import types_pb2
from pagepool.status import from_rpc_error
from tests.e2e.conftest import Memd
from tests.e2e.workers import READY_S, Worker, greedy, household, launch_memd, make_tiny_model, read, within

House = tuple[Memd, Callable[..., Worker]]


@pytest.fixture(scope="module")
def second(default_house: House, worker: Worker) -> Worker:
    """A second worker of the default model, beside `worker`."""
    return default_house[1]("b", "--dtype", "float32", "--no-warmup").ready()


@pytest.fixture
def tiny_pair(tiny_model: Path) -> Iterator[tuple[Memd, Worker, Worker]]:
    """A memd of its own with two workers of a tiny model."""
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--threads", "1")
    with household("--pool-bytes", "16MiB", "--heartbeat-timeout", "2s") as (memd, start):
        first, second = start("one", *flags), start("two", *flags)
        yield memd, first.ready(), second.ready()


def the_table(memd: Memd) -> types_pb2.BlockTable:
    """The only block table there is."""
    pool = memd.pool()
    (table,) = within(10, lambda: pool.ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables)
    return pool.GetBlockTable(memd_pb.GetBlockTableRequest(table_id=table.table_id)).block_table


def watched(memd: Memd, worker: Worker, request: pb.GenerateRequest) -> tuple[list[int], types_pb2.BlockTable, int]:
    """Runs a request; its tokens, its block table while it ran, and how many of its tokens were cached."""
    within(10, lambda: not memd.pool().ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables)
    call = worker.stub().Generate(request, timeout=120)
    events = [next(call), next(call)]
    table = the_table(memd)
    events += call
    tokens = [token for event in events[1:-1] for token in event.tokens.token_ids]
    return tokens, table, events[-1].finished.usage.cached_tokens


def test_a_second_worker_attends_to_the_first_ones_blocks(default_memd: Memd, worker: Worker, second: Worker) -> None:
    story = "The old lighthouse keeper wrote every evening what the sea had brought. " * 80
    prompt = list(worker.stub().Tokenize(pb.TokenizeRequest(text=story)).token_ids)[:1000]
    assert len(prompt) == 1000
    request = greedy(prompt, 24, ignore_eos=True, cache_salt=b"shared")
    tokens, table, cached = watched(default_memd, worker, request)
    again, second_table, second_cached = watched(default_memd, second, request)
    assert cached == 0
    assert second_cached == 999, "62 blocks, and all of the next one but the last token, whose logits are wanted"
    assert again == tokens
    assert list(second_table.block_ids[:62]) == list(table.block_ids[:62])
    assert list(second_table.entries[:62]) == list(table.entries[:62])
    assert second_table.lease_id != table.lease_id
    block = default_memd.pool().GetBlock(memd_pb.GetBlockRequest(block_id=table.block_ids[0])).block
    assert (block.sealed, block.exact) == (True, True)


def test_another_salt_shares_nothing(default_memd: Memd, worker: Worker) -> None:
    prompt = list(range(100, 164))
    first = worker.generate(greedy(prompt, 2, ignore_eos=True, cache_salt=b"one"))
    other = worker.generate(greedy(prompt, 2, ignore_eos=True, cache_salt=b"two"))
    same = worker.generate(greedy(prompt, 2, ignore_eos=True, cache_salt=b"one"))
    assert [run.finished.usage.cached_tokens for run in (first, other, same)] == [0, 0, 63]


def test_a_worker_killed_under_load_costs_the_others_nothing(tiny_pair: tuple[Memd, Worker, Worker]) -> None:
    memd, dying, living = tiny_pair
    prompt, other = list(range(200, 300)), list(range(500, 600))
    expected = living.generate(greedy(other, 300, ignore_eos=True)).token_ids
    warm = dying.generate(greedy(prompt, 4, ignore_eos=True))
    assert warm.finished.usage.cached_tokens == 0
    lost = [dying.stub().Generate(greedy(prompt, 3000, ignore_eos=True), timeout=60) for _ in range(3)]
    for call in lost:
        assert next(call).HasField("started")
        assert next(call).HasField("tokens")
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(living.generate, greedy(other, 300, ignore_eos=True)) for _ in range(3)]
        dying.kill()
        assert all(run.result().token_ids == expected for run in runs)
    for call in lost:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    within(6, lambda: memd.usage().held_blocks == 0 and memd.usage().quarantined_blocks == 0)
    usage = memd.usage()
    assert usage.free_blocks + usage.cached_blocks == usage.total_blocks
    after = living.generate(greedy(prompt, 4, ignore_eos=True))
    assert after.finished.usage.cached_tokens == 96, "the dead worker's sealed blocks are still matched"
    assert after.token_ids == warm.token_ids


def test_requests_end_within_two_seconds_of_memds_death_and_its_successor_is_found(
    tiny_pair: tuple[Memd, Worker, Worker],
) -> None:
    memd, worker, _ = tiny_pair
    prompt = list(range(200, 300))
    expected = worker.generate(greedy(prompt, 8, ignore_eos=True)).token_ids
    old = worker.stub().GetModel(pb.GetModelRequest()).pool_epoch
    calls = [worker.stub().Generate(greedy(prompt, 3000, ignore_eos=True), timeout=60) for _ in range(2)]
    for call in calls:
        assert next(call).HasField("started")
        assert next(call).HasField("tokens")
    memd.process.send_signal(signal.SIGKILL)
    died = time.monotonic()
    memd.wait()
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        error = from_rpc_error(caught.value)
        assert (error.reason, error.code) == (Reason.POOL_LOST, Code.UNAVAILABLE)
        assert error.retry_after_s
    assert time.monotonic() - died < 2
    with pytest.raises(grpc.RpcError) as caught:
        read(worker.stub().Generate(greedy(prompt, 8), timeout=10))
    assert from_rpc_error(caught.value).code is Code.UNAVAILABLE
    successor = launch_memd(memd.directory, memd.slab_dir, "--pool-bytes", "16MiB")
    try:
        within(10, lambda: serves(worker))
        again = worker.generate(greedy(prompt, 8, ignore_eos=True))
        assert again.token_ids == expected
        epoch = worker.stub().GetModel(pb.GetModelRequest()).pool_epoch
        assert epoch not in {0, old}
        assert epoch == successor.pool().GetPool(memd_pb.GetPoolRequest()).pool.epoch
    finally:
        for channel in successor.channels:
            channel.close()
        successor.stop()


def serves(worker: Worker) -> bool:
    try:
        worker.generate(greedy([7, 8, 9], 1))
    except grpc.RpcError as error:
        if from_rpc_error(error).code is Code.UNAVAILABLE:
            return False
        raise
    return True


def test_other_weights_under_the_same_name_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    impostor = make_tiny_model(tmp_path / "tiny", seed=1)
    assert impostor.name == tiny_model.name
    flags = ("--dtype", "float32", "--threads", "1", "--no-warmup")
    with household("--pool-bytes", "16MiB") as (memd, start):
        honest = start("honest", "--model", str(tiny_model), *flags).ready()
        other = start("other", "--model", str(impostor), *flags)
        assert other.wait(READY_S) == 2
        last = other.log.strip().splitlines()[-1]
        digest = memd.pool().GetPool(memd_pb.GetPoolRequest()).pool.geometry.model_digest
        assert last.startswith("inferd:")
        assert digest.hex()[:8] in last
        assert len(honest.generate(greedy([7, 8, 9], 4, ignore_eos=True)).token_ids) == 4
