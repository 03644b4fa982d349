"""A worker that is stopped while its blocks move: ended by name, its old blocks given away, silent when it wakes up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.errors import Reason
from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from pagepool.status import from_rpc_error
from tests.e2e.conftest import Memd
from tests.e2e.workers import Worker, greedy, household, within

PAIRS = 8
LONG = 3000


class Reader:
    """A stream that is read as it comes."""

    def __init__(self, call: Any) -> None:
        self.tokens: list[int] = []
        self.error: grpc.RpcError | None = None
        self._call = call
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for event in self._call:
                self.tokens += event.tokens.token_ids
        except grpc.RpcError as error:
            self.error = error


@pytest.fixture(scope="module")
def house(tiny_model: Path) -> Iterator[tuple[Memd, Worker]]:
    memd_flags = ("--pool-bytes", "64MiB", "--block-size", "8", "--heartbeat-timeout", "60s", "--ack-timeout", "1s")
    with household(*memd_flags) as (memd, start):
        yield memd, start("one", "--model", str(tiny_model), "--dtype", "float32", "--threads", "1").ready()


def counters(memd: Memd) -> Any:
    return memd.pool().GetPool(memd_pb.GetPoolRequest()).pool.counters


def stop_while_blocks_move(memd: Memd, engine: int) -> None:
    """Whenever it is stopped in a step, one of the pairs has just sealed a block: they are a token apart."""
    for _ in range(100):
        os.kill(engine, signal.SIGSTOP)
        time.sleep(0.1)
        if memd.usage().quarantined_blocks:
            return
        os.kill(engine, signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError("no block was quarantined at any of 100 moments")


def test_two_equal_prompts_sent_together_end_up_in_the_same_blocks(house: tuple[Memd, Worker]) -> None:
    memd, worker = house
    stub, prompt = worker.stub(), [9] * 50
    readers = [Reader(stub.Generate(greedy(prompt, LONG, ignore_eos=True), timeout=120)) for _ in range(2)]
    within(30, lambda: all(len(reader.tokens) > 60 for reader in readers))

    def tables_agree() -> bool:
        tables = memd.pool().ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables
        sealed = min(table.num_tokens for table in tables) // 8
        first, second = ([*table.block_ids][: sealed - 1] for table in tables)
        return sealed >= 12 and first == second

    within(10, tables_agree)
    for reader in readers:
        reader._call.cancel()
        reader.thread.join(30)
    shortest = min(len(reader.tokens) for reader in readers)
    assert readers[0].tokens[:shortest] == readers[1].tokens[:shortest]
    within(5, lambda: memd.usage().held_blocks + memd.usage().quarantined_blocks == 0)


def test_a_worker_that_was_stopped_too_long_emits_nothing_of_its_old_step_and_serves_again(
    house: tuple[Memd, Worker],
) -> None:
    memd, worker = house
    prompts = [[7 + number] * (40 + number) for number in range(PAIRS)]
    stub = worker.stub()
    readers = [Reader(stub.Generate(greedy(one, LONG, ignore_eos=True), timeout=120)) for one in prompts * 2]
    within(30, lambda: all(len(reader.tokens) > 20 for reader in readers))
    assert counters(memd).merged_blocks > 0
    engine = worker.engine_pid()
    stop_while_blocks_move(memd, engine)
    free = memd.usage().free_blocks
    within(5, lambda: counters(memd).lost_leases == 1)  # long before the heartbeat is missed
    within(5, lambda: memd.usage().free_blocks > free)  # fenced: what it only read is given away
    assert "--ack-timeout" in memd.log
    assert memd.usage().quarantined_blocks > 0, "what it can write is not"
    seen = [[*reader.tokens] for reader in readers]
    os.kill(engine, signal.SIGCONT)
    for reader in readers:
        reader.thread.join(30)
        assert reader.error is not None
        assert from_rpc_error(reader.error).reason is Reason.POOL_LOST
    assert [reader.tokens for reader in readers] == seen
    assert worker.engine_pid() == engine
    again = within(30, lambda: serves(worker, prompts[0]))
    assert again == readers[0].tokens[: len(again)]
    within(5, lambda: memd.usage().quarantined_blocks == 0)


def serves(worker: Worker, prompt: list[int]) -> list[int]:
    """The tokens of a short continuation, none while the worker is not attached."""
    try:
        return worker.generate(greedy(prompt, 16, ignore_eos=True)).token_ids
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return []
