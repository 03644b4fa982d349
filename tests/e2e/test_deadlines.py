"""Deadlines of gRPC calls, in the queue, in prefill and in decode, and a queue that is full: one worker that runs one
request at a time, a token a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagepool.errors import Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from pagepool.status import from_rpc_error
from tests.e2e.conftest import Memd
from tests.e2e.workers import Worker, greedy, household, within

RETURN_S = 1.0
"""How long blocks may take to come back: a step of this model takes milliseconds, with a second for a busy machine."""

Scene = tuple[Memd, Worker]


@pytest.fixture(scope="module")
def scene(tiny_model: Path) -> Iterator[Scene]:
    """Steps of one token: a prompt of 4,000 tokens is some seconds of prefill."""
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--threads", "1")
    narrow = ("--max-num-seqs", "1", "--max-batch-tokens", "1", "--max-queue", "1")
    with household("--pool-bytes", "32MiB") as (memd, start):
        yield memd, start("narrow", *flags, *narrow).ready()


def long_run(worker: Worker, **how: Any) -> Any:
    """A request that decodes for longer than any test takes."""
    return worker.stub().Generate(greedy([5, 6, 7], 4000, ignore_eos=True), **how)


def until_late(call: Any) -> list[pb.GenerateResponse]:
    """What a call brings until its end, which is its deadline."""
    events: list[pb.GenerateResponse] = []
    with pytest.raises(grpc.RpcError) as caught:
        events.extend(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return events


def tables(memd: Memd) -> int:
    return len(memd.pool().ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables)


def load(worker: Worker) -> tuple[int, int]:
    """Requests that wait and that run, as the worker tells once a second."""
    model = worker.stub().GetModel(pb.GetModelRequest())
    return model.waiting_requests, model.running_requests


def expect_nothing_held(memd: Memd) -> None:
    assert memd.usage().held_blocks == 0
    assert tables(memd) == 0


def in_decode(worker: Worker) -> pb.GenerateRequest:
    return greedy([5, 6, 7], 4000, ignore_eos=True)


def in_prefill(worker: Worker) -> pb.GenerateRequest:
    started = time.monotonic_ns()  # another prompt each time, so that nothing of it is cached
    return greedy([(started >> at % 48) % 40_000 for at in range(4000)], 9)


@pytest.mark.parametrize("phase", [in_decode, in_prefill])
def test_a_deadline_ends_what_runs_and_gives_its_blocks_back(
    scene: Scene, phase: Callable[[Worker], pb.GenerateRequest]
) -> None:
    memd, worker = scene
    call = worker.stub().Generate(phase(worker), timeout=1.5)
    assert next(call).HasField("started")
    if phase is in_decode:
        assert next(call).HasField("tokens")
    within(1, lambda: memd.usage().held_blocks > 0)
    assert bool(until_late(call)) == (phase is in_decode), "tokens come in decode only"
    within(RETURN_S, lambda: memd.usage().held_blocks == 0)
    expect_nothing_held(memd)


def test_a_deadline_ends_what_waits_and_the_next_in_the_queue_takes_its_place(scene: Scene) -> None:
    memd, worker = scene
    runs = long_run(worker, timeout=60)
    assert [next(runs).WhichOneof("event") for _ in range(2)] == ["started", "tokens"]
    held = tables(memd)
    began = time.monotonic()
    (started,) = until_late(worker.stub().Generate(greedy([8, 9], 4), timeout=0.5))
    assert started.HasField("started")
    assert 0.4 < time.monotonic() - began < 5
    assert tables(memd) == held, "the one that runs is left alone"
    # There is room for one in the queue, and the one that ended has left it.
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(worker.generate, greedy([8, 9], 4, ignore_eos=True))
        within(5, lambda: load(worker) == (1, 1))
        runs.cancel()
        assert len(waits.result(30).token_ids) == 4
    within(RETURN_S, lambda: memd.usage().held_blocks == 0)
    expect_nothing_held(memd)


def test_a_full_queue_refuses_with_the_time_to_come_back(scene: Scene) -> None:
    memd, worker = scene
    runs, waits = long_run(worker, timeout=60), long_run(worker, timeout=60)
    assert next(runs).HasField("started")
    assert next(waits).HasField("started")
    within(5, lambda: sum(load(worker)) == 2)
    with pytest.raises(grpc.RpcError) as caught:
        worker.generate(greedy([8, 9], 4))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(caught.value)
    assert error.reason is Reason.QUEUE_FULL
    assert "--max-queue is 1" in error.message
    status = rpc_status.from_call(caught.value)
    kinds = {detail.TypeName() for detail in status.details}
    assert {"google.rpc.ErrorInfo", "google.rpc.RetryInfo"} <= kinds
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToNanoseconds() > 0
    runs.cancel()
    waits.cancel()
    within(RETURN_S, lambda: memd.usage().held_blocks == 0)
    assert len(worker.generate(greedy([8, 9], 4, ignore_eos=True)).token_ids) == 4
