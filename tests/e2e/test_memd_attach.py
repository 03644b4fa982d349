"""The Attach stream of a real memd: leases of workers that behave, stop, die, or break the protocol."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1 import pool_service_pb2, types_pb2
from pagepool.memd.v1 import worker_service_pb2 as wpb
from pagepool.status import from_rpc_error

WORKER = """
import fcntl, os, sys, threading, time
import grpc
from pagepool.memd.v1 import worker_service_pb2 as wpb, worker_service_pb2_grpc
directory, geometry = sys.argv[1], bytes.fromhex(sys.argv[2])
name = f"process-{os.getpid()}.lock"
lock = os.open(os.path.join(directory, "leases", name), os.O_CREAT | os.O_RDWR, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
hello = wpb.Hello(worker_name="process", lock_file=name)
hello.geometry.ParseFromString(geometry)
def requests():
    yield wpb.AttachRequest(hello=hello)
    create = wpb.TableRequest(ref=1, token_ids=range(40), num_blocks=3)
    yield wpb.AttachRequest(step=wpb.Step(step_id=1, creates=[create]))
    table_id = granted.result()
    commit = wpb.Commit(table_id=table_id, token_ids=range(40))
    yield wpb.AttachRequest(step=wpb.Step(step_id=2, commits=[commit]))
    for sequence in range(10**9):
        yield wpb.AttachRequest(heartbeat=wpb.Heartbeat(sequence=sequence))
        time.sleep(0.1)
from concurrent.futures import Future
granted = Future()
stub = worker_service_pb2_grpc.WorkerServiceStub(grpc.insecure_channel(f"unix:{directory}/memd.sock"))
try:
    for message in stub.Attach(requests()):
        if message.HasField("step_result"):
            if message.step_result.grants:
                granted.set_result(message.step_result.grants[0].table_id)
            else:
                print("working", flush=True)
except grpc.RpcError as error:
    print(error.details(), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def process(memd: Any, geometry: types_pb2.Geometry) -> Iterator[subprocess.Popen[str]]:
    """A worker in a process of its own, with a table of three blocks, two of them sealed."""
    command = [sys.executable, "-c", WORKER, str(memd.directory), geometry.SerializeToString().hex()]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    assert worker.stdout.readline() == "working\n"
    yield worker
    worker.kill()
    worker.wait()
    worker.stdout.close()


def expect_end(worker: Any, reason: Reason) -> PagepoolError:
    """What ended the stream, which must have this reason."""
    error = from_rpc_error(worker.ending())
    assert error.reason is reason, error
    return error


def test_a_worker_is_welcomed_to_a_slab_that_it_can_map(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    welcome = raw_worker().hello(geometry)
    pool = memd.pool().GetPool(pool_service_pb2.GetPoolRequest()).pool
    assert (welcome.epoch, welcome.block_size, welcome.unit_bytes) == (pool.epoch, 16, pool.unit_bytes)
    assert welcome.num_blocks == pool.usage.total_blocks > 0
    assert not welcome.reclaimed
    assert welcome.heartbeat_timeout.ToMilliseconds() == 1000
    assert welcome.heartbeat_interval.ToMilliseconds() == 200
    (slab,) = welcome.slabs
    assert Path(slab.shared_memory.path).stat().st_size == slab.size_bytes == pool.slab_bytes


def test_steps_and_heartbeats_are_answered_in_order(memd: Any, raw_worker: Any, geometry: types_pb2.Geometry) -> None:
    worker = raw_worker()
    worker.hello(geometry)
    for number in range(1, 51):
        worker.send(step=wpb.Step(step_id=number))
        worker.send(heartbeat=wpb.Heartbeat(sequence=number))
    answers = [worker.receive() for _ in range(100)]
    assert [answer.step_id for answer in answers[::2]] == list(range(1, 51))
    assert [answer.sequence for answer in answers[1::2]] == list(range(1, 51))
    counters = memd.pool().GetPool(pool_service_pb2.GetPoolRequest()).pool.counters
    assert counters.attach_steps == 50


def test_one_answer_may_stand_for_many_steps_but_never_for_a_grant(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    worker = raw_worker()
    worker.hello(geometry)
    table_id = worker.create([], 4).table_id
    first = 1  # the one that created the table
    for token in range(40):
        commit = wpb.Commit(table_id=table_id, token_ids=[token])
        worker.send(step=wpb.Step(step_id=first + 1 + token, commits=[commit]))
    create = wpb.TableRequest(ref=7, num_blocks=1)
    worker.send(step=wpb.Step(step_id=first + 41, creates=[create]))
    answers = [worker.receive("step_result")]
    while answers[-1].step_id < first + 41:
        answers.append(worker.receive("step_result"))
    assert [grant.ref for grant in answers[-1].grants] == [7]
    assert not any(answer.grants or answer.refusals for answer in answers[:-1])
    assert len(answers) < 41
    table = memd.pool().GetBlockTable(pool_service_pb2.GetBlockTableRequest(table_id=table_id)).block_table
    assert list(table.token_ids) == list(range(40))


def test_commits_seal_blocks_and_releases_leave_them_cached(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    worker = raw_worker()
    worker.hello(geometry)
    grant = worker.create(list(range(40)), 3)
    worker.commit(grant.table_id, list(range(40)))
    worker.step(release_table_ids=[grant.table_id])
    assert (memd.usage().held_blocks, memd.usage().cached_blocks) == (0, 2)
    again = worker.create(list(range(40)), 3)
    assert (again.cached_tokens, list(again.block_ids[:2])) == (32, list(grant.block_ids[:2]))


def test_detach_frees_everything_and_ends_the_stream_in_order(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    worker = raw_worker()
    worker.hello(geometry)
    worker.create([1, 2], 5)
    worker.send(detach=wpb.Detach())
    assert worker.receive("detach_ack") == wpb.DetachAck()
    with pytest.raises(StopIteration):
        worker.receive()
    assert memd.usage().free_blocks == memd.usage().total_blocks


def test_a_refused_worker_is_told_when_blocks_return(memd: Any, raw_worker: Any, geometry: types_pb2.Geometry) -> None:
    first, second = raw_worker("first"), raw_worker("second")
    total = first.hello(geometry).num_blocks
    second.hello(geometry)
    grant = first.create([], total - 1)
    (refusal,) = second.step(creates=[wpb.TableRequest(ref=7, num_blocks=5)]).refusals
    assert (refusal.ref, refusal.available_blocks, refusal.total_blocks) == (7, 1, total)
    assert refusal.reason == wpb.REFUSAL_REASON_POOL_EXHAUSTED
    (refusal,) = second.step(creates=[wpb.TableRequest(ref=8, num_blocks=total + 1)]).refusals
    assert refusal.reason == wpb.REFUSAL_REASON_REQUEST_TOO_LARGE
    first.step(release_table_ids=[grant.table_id])
    assert second.receive("capacity").available_blocks == total
    assert second.create([], 5).block_ids


def test_another_geometry_or_other_weights_of_the_same_name_are_refused(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    raw_worker().hello(geometry)
    other = types_pb2.Geometry()
    other.CopyFrom(geometry)
    other.model_digest = b"\2" * 32
    worker = raw_worker("other")
    worker.send(hello=wpb.Hello(lock_file=worker.lock_name, geometry=other))
    error = expect_end(worker, Reason.GEOMETRY_MISMATCH)
    watched = [Path(link).resolve().name for link in Path(f"/proc/{memd.process.pid}/fd").iterdir()]
    assert worker.lock_name not in watched, "a refused worker's file stays open"
    assert "02" * 32 in error.message
    assert "01" * 32 in error.message


IMPOSSIBLE = [
    ({"format": types_pb2.FORMAT_UNSPECIFIED}, "geometry.format"),
    ({"format": types_pb2.FORMAT_FP8_E4M3}, "geometry.format"),
    ({"layers": []}, "geometry.layers"),
    ({"model_digest": b""}, "geometry.model_digest"),
    ({"layout_version": 9}, "geometry.layout_version"),
    ({"layers": [types_pb2.LayerGeometry(num_kv_heads=1, head_dim_k=513, head_dim_v=1)]}, "geometry.layers"),
    ({"layers": [types_pb2.LayerGeometry(num_kv_heads=60000, head_dim_k=512, head_dim_v=512)]}, "--pool-bytes"),
]


def test_an_impossible_geometry_is_refused_and_the_next_worker_is_not(
    raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    fields = {"layers": geometry.layers, "format": geometry.format, "layout_version": 1, "model_digest": b"\1" * 32}
    for changes, field in IMPOSSIBLE:
        worker = raw_worker()
        worker.send(hello=wpb.Hello(lock_file=worker.lock_name, geometry=types_pb2.Geometry(**{**fields, **changes})))
        assert expect_end(worker, Reason.INVALID_FIELD).field == field
    assert raw_worker().hello(geometry).lease_id


def test_a_lock_file_must_be_locked_and_lie_in_memds_folder(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    unlocked = raw_worker(lock=False)
    unlocked.send(hello=wpb.Hello(lock_file=unlocked.lock_name, geometry=geometry))
    assert "flock(LOCK_EX)" in expect_end(unlocked, Reason.INVALID_FIELD).message
    for name in ("", "../memd.sock.lock", "none", "/etc/passwd"):
        worker = raw_worker()
        worker.send(hello=wpb.Hello(lock_file=name, geometry=geometry))
        assert expect_end(worker, Reason.INVALID_FIELD).field == "lock_file"
    assert memd.usage().total_blocks == 0, "a worker that was refused has cut the pool"


def test_the_first_message_must_be_hello_and_no_other_may(raw_worker: Any, geometry: types_pb2.Geometry) -> None:
    silent = raw_worker()
    silent.send(heartbeat=wpb.Heartbeat(sequence=1))
    expect_end(silent, Reason.PROTOCOL_VIOLATION)
    twice = raw_worker()
    twice.hello(geometry)
    twice.send(hello=wpb.Hello(lock_file=twice.lock_name, geometry=geometry))
    expect_end(twice, Reason.PROTOCOL_VIOLATION)


VIOLATIONS = {
    "unknown table": wpb.Step(step_id=2, commits=[wpb.Commit(table_id=10**6, token_ids=[1])]),
    "unknown release": wpb.Step(step_id=2, release_table_ids=[10**6]),
    "step again": wpb.Step(step_id=1),
    "step left out": wpb.Step(step_id=9),
    "long salt": wpb.Step(step_id=2, creates=[wpb.TableRequest(salt=b"x" * 65)]),
    "tokens twice": wpb.Step(step_id=2, creates=[wpb.TableRequest(token_ids=[1], packed_token_ids=bytes(4))]),
    "part of a token": wpb.Step(step_id=2, creates=[wpb.TableRequest(packed_token_ids=bytes(5))]),
}


def test_a_step_that_cannot_be_costs_the_lease_and_quarantines_its_blocks(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry, wait: Any
) -> None:
    workers = [raw_worker(name.replace(" ", "-")) for name in VIOLATIONS]
    for worker, step in zip(workers, VIOLATIONS.values(), strict=True):
        worker.hello(geometry)
        worker.create([1], 4)
        worker.send(step=step)
        expect_end(worker, Reason.PROTOCOL_VIOLATION)
    assert memd.usage().quarantined_blocks == 4 * len(workers)
    time.sleep(0.3)
    assert memd.usage().quarantined_blocks == 4 * len(workers), "given back while the process may still write"
    for worker in workers:
        worker.unlock()
    wait(lambda: memd.usage().free_blocks == memd.usage().total_blocks)


def test_a_broken_stream_can_be_taken_up_again_with_its_tables_and_steps(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    worker = raw_worker()
    first = worker.hello(geometry)
    grant = worker.create([1, 2], 2)
    worker.break_stream()
    worker.connect()
    again = worker.hello(geometry, reclaim_epoch=first.epoch, reclaim_lease_id=first.lease_id)
    assert (again.reclaimed, again.lease_id) == (True, first.lease_id)
    assert worker.commit(grant.table_id, [1, 2]).step_id == 2
    table = memd.pool().GetBlockTable(pool_service_pb2.GetBlockTableRequest(table_id=grant.table_id)).block_table
    assert list(table.token_ids) == [1, 2]


def test_a_second_stream_of_the_same_lease_ends_the_first(raw_worker: Any, geometry: types_pb2.Geometry) -> None:
    worker = raw_worker()
    welcome = worker.hello(geometry)
    former = worker._call
    worker.connect()
    assert worker.hello(geometry, reclaim_epoch=welcome.epoch, reclaim_lease_id=welcome.lease_id).reclaimed
    with pytest.raises(grpc.RpcError) as caught:
        next(former)
    assert from_rpc_error(caught.value).reason is Reason.LEASE_LOST
    assert worker.step().step_id == 1


def test_what_cannot_be_reclaimed_becomes_a_new_lease(raw_worker: Any, geometry: types_pb2.Geometry) -> None:
    welcome = raw_worker().hello(geometry, reclaim_epoch=7, reclaim_lease_id=7)
    assert not welcome.reclaimed
    assert welcome.lease_id


def test_a_killed_workers_blocks_return_and_its_sealed_ones_can_be_matched(
    memd: Any, process: subprocess.Popen[str], raw_worker: Any, geometry: types_pb2.Geometry, wait: Any
) -> None:
    assert memd.usage().held_blocks == 3
    process.kill()
    process.wait()
    wait(lambda: memd.usage().held_blocks + memd.usage().quarantined_blocks == 0)
    assert memd.usage().cached_blocks == 2
    worker = raw_worker()
    worker.hello(geometry)
    assert worker.create(list(range(40)), 3).cached_tokens == 32
    wait(lambda: [path.name for path in (memd.directory / "leases").iterdir()] == [worker.lock_name])


def test_a_stopped_workers_lease_is_lost_and_quarantined_until_it_is_gone(
    memd: Any, process: subprocess.Popen[str], wait: Any
) -> None:
    process.send_signal(signal.SIGSTOP)
    wait(lambda: memd.usage().quarantined_blocks == 1)
    assert memd.usage().held_blocks == 2, "sealed blocks stay held, and matchable, until the process is gone"
    assert memd.pool().GetPool(pool_service_pb2.GetPoolRequest()).pool.counters.lost_leases == 1
    process.send_signal(signal.SIGCONT)
    assert process.stdout
    assert "nothing was heard from its worker for 1 s" in process.stdout.readline()
    assert memd.usage().quarantined_blocks == 1
    process.kill()
    process.wait()
    wait(lambda: memd.usage().quarantined_blocks + memd.usage().held_blocks == 0)


def test_a_silent_worker_loses_its_lease_though_its_stream_stands(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    worker = raw_worker()
    worker.hello(geometry)
    started = time.monotonic()
    assert expect_end(worker, Reason.LEASE_LOST).metadata["why"] == "nothing was heard from its worker for 1 s"
    assert 0.7 < time.monotonic() - started < 5


def test_one_workers_end_does_not_touch_anothers_stream(
    memd: Any, process: subprocess.Popen[str], raw_worker: Any, geometry: types_pb2.Geometry, wait: Any
) -> None:
    worker = raw_worker()
    worker.hello(geometry)
    table_id = worker.create([], 40).table_id
    process.kill()
    process.wait()
    answers = [worker.commit(table_id, [token]).step_id for token in range(200)]
    assert answers == list(range(2, 202))
    wait(lambda: memd.usage().held_blocks == 40)


def test_a_worker_that_never_reads_does_not_fill_memds_memory(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    def resident() -> int:
        status = Path(f"/proc/{memd.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))

    deaf = raw_worker("deaf")
    deaf.hello(geometry)
    before = resident()
    for number in range(1, 20_001):
        deaf.send(heartbeat=wpb.Heartbeat(sequence=number))
    time.sleep(1)
    assert resident() - before < 30_000
    assert raw_worker("other").hello(geometry).lease_id
