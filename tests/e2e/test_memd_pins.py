"""Prefixes kept by priority, pin and time-to-live in a real memd, and every error that the calls' comments list."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1.types_pb2 import Block
from pagepool.pool_values import Commit, Grant, Step, TableRequest
from pagepool_client import AsyncPoolClient, PoolClient, PoolSession, Retention
from tests.e2e.conftest import refusal

NUM_BLOCKS = 12
SYSTEM, OTHER = list(range(100, 140)), list(range(200, 240))


@pytest.fixture
def memd(start_memd: Callable[..., Any]) -> Any:
    return start_memd("--max-num-blocks", str(NUM_BLOCKS), "--heartbeat-timeout", "60s")


def compute(session: PoolSession, tokens: list[int], salt: bytes = b"") -> None:
    """As a worker does it: from request to release."""
    session.submit(Step(creates=[TableRequest(1, tokens, -(-len(tokens) // 16), salt)]))
    grants: list[Any] = []
    while not grants:
        assert session.wait(5)
        grants += [event for event in session.poll() if isinstance(event, Grant)]
    (grant,) = grants
    session.submit(Step([Commit(grant.table_id, tokens[grant.cached_tokens :])], [grant.table_id]))
    while session.steps_answered < session.steps_sent:
        time.sleep(0.002)


def fill(client: PoolClient) -> int:
    """Takes all blocks that can be had, and gives them back; how many there were."""
    usage = client.pool().usage
    count = int(usage.free_blocks + usage.cached_blocks - usage.pinned_blocks)
    with client.lease() as lease:
        lease.allocate(count)
        with pytest.raises(PagepoolError) as caught:
            lease.allocate(1)
        assert caught.value.reason is Reason.POOL_EXHAUSTED
    return count


def found(client: PoolClient, tokens: list[int]) -> int:
    with client.lease() as lease:
        return int(lease.create_table([*tokens, 0], 0).cached_tokens)


def test_a_pinned_prefix_survives_a_full_pool_until_its_time_ends(
    client: PoolClient, session: PoolSession, wait: Callable[..., Any]
) -> None:
    compute(session, SYSTEM)
    compute(session, OTHER)
    kept = client.pin_prefix(SYSTEM, Retention(3.0))
    assert (kept.num_tokens, kept.num_blocks) == (32, 2)
    assert 0 < kept.expire_time.ToNanoseconds() / 1e9 - time.time() < 3.5
    assert client.pool().usage.pinned_blocks == 2
    assert fill(client) == NUM_BLOCKS - 2
    assert (found(client, SYSTEM), found(client, OTHER)) == (32, 0)
    wait(lambda: client.pool().usage.pinned_blocks == 0)
    assert fill(client) == NUM_BLOCKS
    assert found(client, SYSTEM) == 0


def test_priorities_are_evicted_from_the_lowest(client: PoolClient, session: PoolSession) -> None:
    third = list(range(300, 340))
    for tokens in (SYSTEM, OTHER, third):
        compute(session, tokens)
    client.pin_prefix(third, Retention(60, pinned=False, priority=-1))
    client.pin_prefix(SYSTEM, Retention(60, pinned=False, priority=5))
    left = {6: [-1, -1, 0, 0, 5, 5], 8: [0, 0, 5, 5], 10: [5, 5], 11: [5]}
    for count, priorities in left.items():
        with client.lease() as lease:
            lease.allocate(count)
        assert sorted(block.priority for block in client.blocks() if block.sealed) == priorities
    assert found(client, SYSTEM) == 16, "the head stays longest"


def test_a_kept_block_says_so_and_unpin_ends_it(client: PoolClient, session: PoolSession) -> None:
    compute(session, SYSTEM)

    def one() -> Block:
        return next(block for block in client.blocks() if block.sealed)

    client.pin_prefix(SYSTEM, Retention(60, priority=7))
    assert (one().pinned, one().priority) == (True, 7)
    assert 50 < one().kept_for.ToNanoseconds() / 1e9 <= 60
    client.pin_prefix(SYSTEM, Retention(30, pinned=False, priority=3))
    assert (one().pinned, one().priority) == (False, 3)
    ended, again = client.unpin_prefix(SYSTEM), client.unpin_prefix(SYSTEM)
    assert [(one.num_tokens, one.num_blocks, one.was_kept) for one in (ended, again)] == [(32, 2, True), (32, 2, False)]
    assert (one().pinned, one().priority, one().HasField("kept_for")) == (False, 0, False)


def test_a_salt_has_prefixes_of_its_own(client: PoolClient, session: PoolSession) -> None:
    compute(session, SYSTEM, b"tenant")
    assert refusal(client.pin_prefix, SYSTEM, Retention(60)).reason is Reason.PREFIX_NOT_FOUND
    assert client.pin_prefix(SYSTEM, Retention(60), salt=b"tenant").num_blocks == 2


def test_each_call_is_refused_as_its_comment_says(memd: Any, client: PoolClient, session: PoolSession) -> None:
    compute(session, SYSTEM)
    for tokens in ([], SYSTEM[:15], OTHER):
        for call in (client.unpin_prefix, lambda one: client.pin_prefix(one, Retention(60))):
            assert refusal(call, tokens).reason is Reason.PREFIX_NOT_FOUND
    for retention, field in (
        (Retention(60, priority=101), "priority"),
        (Retention(60, priority=-101), "priority"),
        (Retention(0.5), "ttl"),
        (Retention(86_401), "ttl"),
    ):
        error = refusal(client.pin_prefix, SYSTEM, retention)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
    error = refusal(client.call, "PinPrefix", pb.PinPrefixRequest(token_ids=SYSTEM))
    assert (error.field, error.metadata["value"]) == ("ttl", "not set")
    assert refusal(client.pin_prefix, SYSTEM, Retention(60), salt=b"x" * 65).field == "salt"
    assert refusal(client.unpin_prefix, SYSTEM, salt=b"x" * 65).field == "salt"
    with PoolClient(memd.tcp) as reader:
        assert refusal(reader.pin_prefix, SYSTEM, Retention(60)).reason is Reason.READ_ONLY_LISTENER


def test_half_of_the_pool_stays_for_those_who_compute(client: PoolClient, session: PoolSession) -> None:
    compute(session, list(range(112)))
    error = refusal(client.pin_prefix, list(range(112)), Retention(60))
    assert error.reason is Reason.PIN_LIMIT
    assert error.metadata == {"pinned": "7", "limit": "6", "total": "12"}
    assert client.pool().usage.pinned_blocks == 0
    assert client.pin_prefix(list(range(100)), Retention(60)).num_blocks == 6
    assert client.pin_prefix(list(range(100)), Retention(60)).num_blocks == 6, "again is no more"
    assert client.pin_prefix(list(range(112)), Retention(60, pinned=False, priority=1)).num_blocks == 7


def test_a_pool_without_geometry_has_no_prefix(memd: Any) -> None:
    with PoolClient(memd.target) as client:
        for call in (client.unpin_prefix, lambda tokens: client.pin_prefix(tokens, Retention(60))):
            assert refusal(call, SYSTEM).reason is Reason.POOL_WITHOUT_GEOMETRY


async def test_the_async_client_pins_too(memd: Any, session: PoolSession) -> None:
    compute(session, SYSTEM)
    async with AsyncPoolClient(memd.target) as client:
        assert (await client.pin_prefix(SYSTEM, Retention(60))).num_blocks == 2
        assert (await client.unpin_prefix(SYSTEM)).num_blocks == 2


def pin(memd: Any, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagepool_client.cli.main", "pin", "--memd", memd.target, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_the_command_pins_what_a_table_holds(memd: Any, client: PoolClient, session: PoolSession) -> None:
    compute(session, SYSTEM)
    with client.lease() as lease:
        table = lease.create_table([*SYSTEM, 0], 3)
        done = pin(memd, "--table", str(table.table_id))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("32 of 32 tokens, in 2 blocks, pinned until ")
    assert client.pool().usage.pinned_blocks == 2
    with client.lease() as lease:
        table = lease.create_table([*SYSTEM, 0], 3)
        for words in ("may be evicted like all others", "were not kept by just these tokens"):
            assert words in pin(memd, "--table", str(table.table_id), "--off").stdout
    assert client.pool().usage.pinned_blocks == 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((), 2, "the prefix is given with no TEXT and no --table, but must be given by exactly one"),
        (("text", "--table", "1"), 2, "given with a TEXT and with --table"),
        (("--table", "77"), 1, "block table 77 does not exist"),
        (("--table", "1", "--off", "--priority", "1"), 2, "not allowed with argument"),
    ],
)
def test_the_command_says_what_is_wrong(memd: Any, words: tuple[str, ...], code: int, text: str) -> None:
    done = pin(memd, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
