"""PoolSession and the pool clients against a real memd."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1.types_pb2 import BLOCK_STATE_CACHED, BLOCK_STATE_HELD, Geometry
from pagepool.pool_values import Commit, Draining, Grant, Lost, Refusal, Step, TableRequest
from pagepool_client import AsyncPoolClient, Attachment, PoolClient, PoolSession

PROMPT = list(range(100, 140))


@pytest.fixture
def attach(memd: Any, geometry: Geometry) -> Iterator[Callable[..., PoolSession]]:
    """Attaches a worker to memd."""
    sessions = []

    def make(name: str = "worker", **options: Any) -> PoolSession:
        sessions.append(PoolSession(Attachment(memd.target, name, geometry, **options)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def ask(session: PoolSession, step: Step, count: int = 1) -> list[Any]:
    session.submit(step)
    return take(session, count)


def take(session: PoolSession, count: int = 1, within_s: float = 5.0) -> list[Any]:
    events: list[Any] = []
    deadline = time.monotonic() + within_s
    while len(events) < count:
        assert time.monotonic() < deadline, events
        session.wait(0.1)
        events += session.poll()
    return events


def settle(session: PoolSession, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while session.steps_answered < session.steps_sent:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_workers_share_the_blocks_and_the_bytes_of_a_prefix(attach: Callable[..., PoolSession]) -> None:
    first, second = attach("first"), attach("second")
    (grant,) = ask(first, Step(creates=[TableRequest(1, PROMPT, 4)]))
    assert isinstance(grant, Grant)
    assert grant.cached_tokens == 0
    first.memory[0:4] = b"\1\2\3\4"
    first.submit(Step(commits=[Commit(grant.table_id, PROMPT)]))
    settle(first)
    (other,) = ask(second, Step(creates=[TableRequest(7, PROMPT, 4)]))
    assert isinstance(other, Grant)
    assert (other.ref, other.cached_tokens) == (7, 32)
    assert list(other.block_ids)[:2] == list(grant.block_ids)[:2]
    assert list(other.entries)[:2] == list(grant.entries)[:2]
    assert bytes(second.memory[0:4]) == b"\1\2\3\4"


def test_a_request_larger_than_the_pool_is_refused_for_ever(attach: Callable[..., PoolSession]) -> None:
    session = attach()
    (refusal,) = ask(session, Step(creates=[TableRequest(1, PROMPT, session.info.num_blocks + 1)]))
    assert isinstance(refusal, Refusal)
    assert refusal.never


def test_a_broken_stream_costs_neither_lease_nor_answers(memd: Any, attach: Callable[..., PoolSession]) -> None:
    session = attach()
    (grant,) = ask(session, Step(creates=[TableRequest(1, PROMPT, 4)]))
    for number in range(3):
        session.submit(Step(creates=[TableRequest(10 + number, [number], 1)]))
        session._line._stream._call.cancel()
        session.submit(Step(commits=[Commit(grant.table_id, [number])]))
        (other,) = take(session)
        assert (type(other), other.ref) == (Grant, 10 + number)
        settle(session)
    with PoolClient(memd.target) as client:
        table = client.table(grant.table_id)
        assert list(table.token_ids) == [0, 1, 2]
        assert table.lease_id == session.info.lease_id
        assert len(list(client.tables())) == 4
    assert session.poll() == []


def test_the_death_of_memd_is_known_within_two_seconds_and_the_next_one_is_joined(
    memd: Any, start_memd: Callable[..., Any], attach: Callable[..., PoolSession]
) -> None:
    session = attach()
    memd.kill()
    died = time.monotonic()
    (lost,) = take(session)
    assert isinstance(lost, Lost)
    assert time.monotonic() - died < 2.0
    session.close()
    start_memd("--heartbeat-timeout", "1s")
    assert attach().info.epoch != session.info.epoch


def test_a_stopping_memd_is_left_in_order(memd: Any, attach: Callable[..., PoolSession]) -> None:
    session = attach()
    memd.process.send_signal(signal.SIGTERM)
    (draining,) = take(session)
    assert isinstance(draining, Draining)
    begun = time.monotonic()
    session.close()
    assert memd.wait() == 0
    assert time.monotonic() - begun < draining.grace_s + 2
    assert session.poll() == []


def test_a_worker_stopped_past_its_lease_learns_it_when_it_wakes(memd: Any) -> None:
    script = """
        import sys
        from pagepool.memd.v1.types_pb2 import Geometry, LayerGeometry
        from pagepool_client import Attachment, PoolSession
        layers = [LayerGeometry(num_kv_heads=1, head_dim_k=8, head_dim_v=8)]
        geometry = Geometry(layers=layers, format=1, layout_version=1, model_digest=b"d" * 32)
        session = PoolSession(Attachment(sys.argv[1], "sleeper", geometry))
        print("attached", flush=True)
        session.wait(30)
        print(*session.poll(), flush=True)
        session.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), memd.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker, PoolClient(memd.target) as client:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "attached\n"
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert client.pool().counters.lost_leases == 1
        worker.send_signal(signal.SIGCONT)
        assert worker.stdout.readline().startswith("Lost(message=")
        assert worker.wait(10) == 0


def test_a_second_worker_of_other_weights_is_refused(
    memd: Any, geometry: Geometry, attach: Callable[..., PoolSession]
) -> None:
    attach()
    geometry.model_digest = b"\2" * 32
    with pytest.raises(PagepoolError) as caught:
        attach("stranger")
    assert caught.value.reason is Reason.GEOMETRY_MISMATCH


def test_a_client_holds_blocks_and_tables_under_its_lease(memd: Any, attach: Callable[..., PoolSession]) -> None:
    attach()
    with PoolClient(memd.target) as client, client.lease(ttl_s=5, holder="me") as lease:
        blocks = list(lease.allocate(3).block_ids)
        lease.share(blocks[:1])
        assert client.block(blocks[0]).ref_count == 2
        lease.free([blocks[0], *blocks])
        table = lease.create_table(PROMPT, 3, priority=2)
        assert len(lease.extend_table(table.table_id, 2).block_ids) == 2
        assert [each.table_id for each in client.tables()] == [table.table_id]
        assert len(list(client.blocks(BLOCK_STATE_HELD, page_size=2))) == 5
        lease.release_table(table.table_id)
        with pytest.raises(PagepoolError) as caught:
            client.table(table.table_id)
        assert caught.value.reason is Reason.TABLE_NOT_FOUND
        lease.allocate(2)
    with PoolClient(memd.target) as client:
        assert client.pool().usage.held_blocks == 0
        assert list(client.blocks(BLOCK_STATE_CACHED)) == []


async def test_the_async_client_does_the_same(memd: Any, attach: Callable[..., PoolSession]) -> None:
    attach()
    async with AsyncPoolClient(memd.target) as client:
        async with await client.lease(ttl_s=5, holder="me") as lease, client.watch(0.01) as pools:
            assert (await anext(pools)).usage.held_blocks == 0
            blocks = list((await lease.allocate(3)).block_ids)
            assert (await anext(pools)).usage.held_blocks == 3
            await lease.share(blocks[:1])
            await lease.free([blocks[0], *blocks])
            table = await lease.create_table(PROMPT, 3)
            await lease.extend_table(table.table_id, 1)
            assert (await client.table(table.table_id)).lease_id == lease.lease_id
            await lease.release_table(table.table_id)
            await lease.allocate(1)
        assert (await client.pool()).usage.held_blocks == 0
        assert [table async for table in client.tables()] == []


def test_the_blocks_command_draws_the_pool_and_prints_it_as_json(memd: Any, attach: Callable[..., PoolSession]) -> None:
    session = attach("inferd-1")
    (grant,) = ask(session, Step(creates=[TableRequest(1, PROMPT, 4)]))
    session.submit(Step(commits=[Commit(grant.table_id, PROMPT)]))
    settle(session)
    command = [sys.executable, "-m", "pagepool_client.cli.main", "blocks", "--memd", memd.target]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert "██▒▫·" in drawn
    assert f"table {grant.table_id} of inferd-1: 40 tokens, 4 blocks at 0-3" in drawn
    printed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=30).stdout
    values = json.loads(printed)
    assert values["pool"]["usage"]["held_blocks"] == "4"
    assert [block.get("num_tokens", 0) for block in values["blocks"]] == [16, 16, 8, 0]
    assert values["block_tables"][0]["holder"] == "inferd-1"
