"""Fork, copy-on-write, truncation and copies against a real memd: unary for clients, on the stream for workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import Format, LayerShape, PagedLayout, unpack_entry
from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1 import worker_service_pb2 as wpb
from pagepool.memd.v1.types_pb2 import Geometry
from pagepool.pool_values import Commit, CopyOnWrite, Fork, Grant, Release, ReserveRequest, Step, TableRequest, Truncate
from pagepool.status import from_rpc_error
from pagepool_client import AsyncPoolClient, Attachment, PoolClient, PoolSession
from pagepool_client.wire import geometry_message, step_message
from tests.cpu.sharing_rig import Kv, Player
from tests.e2e.conftest import refusal

LAYOUT = PagedLayout(16, (LayerShape(1, 8, 8), LayerShape(2, 4, 8)), Format.F32)
GEOMETRY = geometry_message(LAYOUT, b"\1" * 32, "tiny")
NUM_BLOCKS = 60
PROMPT = list(range(100, 140))


@pytest.fixture
def geometry() -> Geometry:
    return GEOMETRY


@pytest.fixture(scope="module")
def memd(start_shared_memd: Callable[..., Any]) -> Any:
    return start_shared_memd("--max-num-blocks", str(NUM_BLOCKS), "--heartbeat-timeout", "60s")


def ask(session: PoolSession, step: Step) -> Grant:
    session.submit(step)
    assert session.wait(5)
    (event,) = session.poll()
    assert isinstance(event, Grant)
    return event


def settle(session: PoolSession, wait: Callable[..., Any]) -> None:
    wait(lambda: session.steps_answered == session.steps_sent)


def bytes_of(session: PoolSession, entry: int) -> memoryview:
    memory, (_, _, unit) = session.memory, unpack_entry(entry)
    assert isinstance(memory, memoryview)
    return memory[unit * LAYOUT.unit_bytes :][: LAYOUT.block_bytes]


def commit_prompt(session: PoolSession, wait: Callable[..., Any]) -> Grant:
    """A table with PROMPT and recognisable bytes in its blocks."""
    grant = ask(session, Step(creates=[TableRequest(1, PROMPT, 3, no_match=True)]))
    for number, entry in enumerate(grant.entries, 1):
        bytes_of(session, entry)[:] = bytes([number]) * LAYOUT.block_bytes
    session.submit(Step(commits=[Commit(grant.table_id, PROMPT)]))
    settle(session, wait)
    return grant


def expect_refusal(reason: Reason, call: Callable[..., Any], *arguments: Any) -> PagepoolError:
    error = refusal(call, *arguments)
    assert error.reason is reason, error
    return error


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_after_random_interleavings_every_table_has_its_own_kv_and_no_reference_is_left(
    memd: Any, session: PoolSession, wait: Any, count: int
) -> None:
    """Two workers, forks and copies in each, prefixes of one another's, and blocks always short."""
    other = PoolSession(Attachment(memd.target, "other", GEOMETRY))
    with other, PoolClient(memd.target) as client:
        players = [
            Player(each, Kv(CpuOps(each.memory, LAYOUT), LAYOUT), seed) for seed, each in enumerate([session, other])
        ]
        players[1].known = players[0].known
        for number in range(count):
            players[number % 2].play(10 + number % 11)
            if number % 50 == 0:
                settle(session, wait)
                settle(other, wait)
                counts = [block.ref_count for block in client.blocks() if block.sealed]
                assert counts == [0] * len(counts)
        for player in players:
            player.finish()
        settle(session, wait)
        settle(other, wait)
        pool = client.pool()
        assert [block.ref_count for block in client.blocks() if block.ref_count] == []
        assert (pool.usage.held_blocks, pool.num_block_tables) == (0, 0)
        assert pool.counters.evicted_blocks > count
    for player in players:
        assert min(player.forked, player.copied, player.cut_by_copy, player.matched) > 0.3 * count


def test_memd_and_the_worker_agree_on_the_tables(client: PoolClient, session: PoolSession, wait: Any) -> None:
    player = Player(session, Kv(CpuOps(session.memory, LAYOUT), LAYOUT), 7)
    for _ in range(200):
        player._move()
        player.send()
    settle(session, wait)
    tables = {table.table_id: client.table(table.table_id) for table in client.tables()}
    assert set(tables) == set(player.histories)
    for table_id, history in player.histories.items():
        seen, mine = tables[table_id], player.tables[table_id]
        assert (list(seen.block_ids), list(seen.entries)) == (mine.block_ids, list(mine.entries))
        assert list(seen.token_ids) == history.tokens
        assert seen.cached_tokens == mine.cached_tokens


def test_a_reserve_is_held_and_ends_with_its_lease(
    memd: Any, client: PoolClient, session: PoolSession, wait: Any
) -> None:
    grant = ask(session, Step(reserves=[ReserveRequest(4, 3, 2)]))
    assert (grant.ref, len(grant.block_ids), len(grant.entries), grant.num_tables) == (4, 3, 3, 2)
    block = client.block(grant.block_ids[0])
    assert [(one.lease_id, one.table_id, one.ref_count) for one in block.holders] == [(session.info.lease_id, 0, 1)]
    session.submit(Step(frees=grant.block_ids[:1]))
    settle(session, wait)
    assert memd.usage().held_blocks == 2
    session.close()
    assert memd.usage().held_blocks == 0


def test_a_client_forks_truncates_and_copies_what_a_worker_wrote(
    client: PoolClient, session: PoolSession, wait: Any
) -> None:
    grant = commit_prompt(session, wait)
    with client.lease() as lease:
        table = lease.create_table([*PROMPT, 1], 4)
        fork = lease.fork_table(table.table_id)
        assert list(fork.block_ids) == list(table.block_ids)
        assert (fork.num_tokens, fork.cached_tokens) == (32, 32)
        assert client.block(table.block_ids[0]).ref_count == 3
        cut = lease.truncate_table(fork.table_id, 20)
        assert (cut.num_tokens, cut.cached_tokens, len(cut.block_ids)) == (20, 16, 4)
        assert list(client.table(fork.table_id).token_ids) == PROMPT[:20]
        assert cut.block_ids[0] == table.block_ids[0]
        assert cut.block_ids[1] not in table.block_ids
        assert bytes_of(session, cut.entries[1]) == bytes([2]) * LAYOUT.block_bytes
        assert list(cut.block_ids[2:]) == list(table.block_ids[2:])
        assert list(client.table(table.table_id).block_ids) == list(table.block_ids)
        copies = lease.copy([grant.block_ids[1], grant.block_ids[0]])
        assert [bytes_of(session, entry)[0] for entry in copies.entries] == [2, 1]
        sealed = client.block(copies.block_ids[1])
        assert (sealed.digest, sealed.num_tokens) == (client.block(grant.block_ids[0]).digest, 16)
        lease.free(copies.block_ids)
        lease.release_table(fork.table_id)
        assert client.block(table.block_ids[0]).ref_count == 2


def test_each_call_is_refused_as_its_comment_says(client: PoolClient, session: PoolSession, wait: Any) -> None:
    grant = commit_prompt(session, wait)
    with client.lease() as lease, client.lease() as other:
        table = lease.create_table(PROMPT, 3).table_id
        for fork in (lease.fork_table, lambda one: lease.truncate_table(one, 0)):
            expect_refusal(Reason.TABLE_NOT_FOUND, fork, 10**9)
            expect_refusal(Reason.TABLE_NOT_HELD, fork, grant.table_id)
        expect_refusal(Reason.TABLE_NOT_HELD, other.fork_table, table)
        error = expect_refusal(Reason.INVALID_FIELD, lease.truncate_table, table, 33)
        assert (error.field, error.metadata["value"]) == ("num_tokens", "33")
        assert "from 0 to the table's 32" in error.message
        expect_refusal(Reason.BLOCK_NOT_FOUND, lease.copy, [10**9])
        expect_refusal(Reason.BLOCK_NOT_SEALED, lease.copy, [grant.block_ids[2]])
        assert expect_refusal(Reason.INVALID_FIELD, lease.copy, []).field == "block_ids"
        most = (32 << 20) // LAYOUT.block_bytes
        error = expect_refusal(Reason.INVALID_FIELD, lease.copy, [grant.block_ids[0]] * (most + 1))
        assert f"at most {most}" in error.message
        lease.allocate(client.pool().usage.free_blocks + client.pool().usage.cached_blocks)
        expect_refusal(Reason.POOL_EXHAUSTED, lease.truncate_table, table, 5)
        expect_refusal(Reason.POOL_EXHAUSTED, lease.copy, [grant.block_ids[0]])
        assert lease.truncate_table(table, 16).num_tokens == 16
        other.release()
        for call in (lambda: other.fork_table(table), lambda: other.truncate_table(table, 0), lambda: other.copy([1])):
            expect_refusal(Reason.LEASE_NOT_FOUND, call)
    words = lease._words
    words.lease_id = session.info.lease_id
    for name, request in [
        ("ForkBlockTable", words.fork_table(grant.table_id)),
        ("TruncateBlockTable", words.truncate_table(grant.table_id, 0)),
        ("CopyBlocks", words.copy([grant.block_ids[0]])),
    ]:
        expect_refusal(Reason.LEASE_IS_WORKERS, client.call, name, request)
        request.epoch ^= 1
        expect_refusal(Reason.EPOCH_MISMATCH, client.call, name, request)


def test_repeated_calls_and_tcp(memd: Any, client: PoolClient, session: PoolSession, wait: Any) -> None:
    commit_prompt(session, wait)
    with client.lease() as lease:
        table = lease.create_table(PROMPT, 3)
        for name, request in [
            ("ForkBlockTable", lease._words.fork_table(table.table_id)),
            ("TruncateBlockTable", lease._words.truncate_table(table.table_id, 20)),
            ("CopyBlocks", lease._words.copy([table.block_ids[0]])),
        ]:
            first = client.call(name, request)
            held = memd.usage().held_blocks
            assert client.call(name, request) == first
            assert memd.usage().held_blocks == held
            with PoolClient(memd.tcp) as reader:
                expect_refusal(Reason.READ_ONLY_LISTENER, reader.call, name, request)


async def test_the_async_client_shares_too(memd: Any, session: PoolSession, wait: Any) -> None:
    grant = commit_prompt(session, wait)
    async with AsyncPoolClient(memd.target) as client, await client.lease() as lease:
        table = await lease.create_table(PROMPT, 3)
        fork = await lease.fork_table(table.table_id)
        assert list(fork.block_ids) == list(table.block_ids)
        assert (await lease.truncate_table(fork.table_id, 3)).num_tokens == 3
        copies = await lease.copy(grant.block_ids[:1])
        assert bytes_of(session, copies.entries[0])[0] == 1


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (lambda table, block: Fork(table, 10**9), "not in the lease's reserve"),
        (lambda table, block: Fork(10**9, 1), "not held by this lease"),
        (lambda table, block: CopyOnWrite(table, 0, (10**9,)), "block 1000000000 is not in the lease's reserve"),
        (lambda table, block: CopyOnWrite(table, 3, (block,)), "1 blocks of table .* from index 3 on, of 3"),
        (lambda table, block: CopyOnWrite(table, 0, ()), "0 blocks of table"),
        (lambda table, block: Truncate(table, 41), "truncated to 41 tokens, but has 40"),
        (lambda table, block: Truncate(table, 5), "needs a block of the reserve for a copy"),
        (lambda table, block: Truncate(table, 32, block), "needs no block for a copy"),
        (lambda table, block: Release(10**9), "not held by this lease"),
    ],
)
def test_an_impossible_operation_costs_the_lease_by_name(
    memd: Any, wait: Any, raw_worker: Any, operation: Callable[[int, int], Any], text: str
) -> None:
    worker = raw_worker()
    worker.hello(GEOMETRY)
    table = worker.create(PROMPT, 3, no_match=True).table_id
    worker.commit(table, PROMPT)
    (grant,) = worker.step(reserves=[wpb.ReserveRequest(num_blocks=1)]).grants
    bad = step_message(4, Step(operations=[operation(table, grant.block_ids[0])])).step
    worker.send(step=bad)
    error = from_rpc_error(worker.ending())
    assert error.reason is Reason.PROTOCOL_VIOLATION
    assert re.search(text, error.message), error.message


def test_a_commit_into_a_shared_block_costs_the_lease(raw_worker: Any) -> None:
    worker = raw_worker()
    worker.hello(GEOMETRY)
    table = worker.create(PROMPT, 3, no_match=True).table_id
    worker.commit(table, PROMPT)
    (grant,) = worker.step(reserves=[wpb.ReserveRequest(num_tables=1)]).grants
    fork = wpb.TableOperation(fork=wpb.Fork(table_id=table, new_table_id=grant.table_id))
    worker.step(operations=[fork])
    worker.send(step=wpb.Step(step_id=5, commits=[wpb.Commit(table_id=table, token_ids=[1])]))
    error = from_rpc_error(worker.ending())
    assert error.reason is Reason.PROTOCOL_VIOLATION
    assert f"block 2 of table {table}, which another table has too" in error.message


def test_an_empty_or_boundless_reserve_is_a_violation(raw_worker: Any) -> None:
    for request, text in [
        (wpb.ReserveRequest(), "must be at least 1"),
        (wpb.ReserveRequest(num_tables=65_537), "a lease has at most 65536"),
    ]:
        worker = raw_worker()
        worker.hello(GEOMETRY)
        worker.send(step=wpb.Step(step_id=1, reserves=[request]))
        assert text in from_rpc_error(worker.ending()).message


def test_an_operation_of_a_newer_worker_is_named(raw_worker: Any) -> None:
    worker = raw_worker()
    worker.hello(GEOMETRY)
    worker.send(step=wpb.Step(step_id=1, operations=[wpb.TableOperation()]))
    error = from_rpc_error(worker.ending())
    assert error.reason is Reason.PROTOCOL_VIOLATION
    assert "none that this memd knows" in error.message
