"""Salts and priorities outside their limits, wherever they can be given: nothing is done, and the error says all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memd.core.pool import Pool
from memd.core.values import PinRequest, Step, TableRequest
from pagepool.errors import Code, PagepoolError, Reason
from tests.cpu.memory_pool import make_pool

LONG = b"x" * 65
WRONG = {
    "priority above": ("priority", 101, "priority is 101, but must be from -100 to 100; 0 is everybody's"),
    "priority below": ("priority", -(2**31), "priority is -2147483648, but must be from -100 to 100"),
    "salt": ("salt", LONG, "salt is 65 bytes long, but must be at most 64 bytes; use a digest of it"),
}
RIGHT = [{"priority": 100}, {"priority": -100}, {"salt": LONG[:64]}, {"salt": b""}]


@pytest.fixture
def pool() -> Pool:
    return make_pool(8)


def create(pool: Pool, **fields: Any) -> object:
    lease = pool.create_lease("client", 100.0, 0.0).lease_id
    return pool.create_table(lease, TableRequest([1, 2, 3], 1, **fields), 0.0)


def pin(pool: Pool, **fields: Any) -> object:
    return pool.prefixes.pin(PinRequest([1] * 8, 60.0, **fields), 0.0)


def unpin(pool: Pool, salt: bytes) -> object:
    return pool.prefixes.unpin([1] * 8, salt, 0.0)


CALLS = [(call, wrong) for call in (create, pin) for wrong in WRONG] + [(unpin, "salt")]


@pytest.mark.parametrize(("call", "wrong"), CALLS)
def test_a_client_is_told_field_value_limit_and_way_out(pool: Pool, call: Callable[..., object], wrong: str) -> None:
    field, value, message = WRONG[wrong]
    with pytest.raises(PagepoolError) as caught:
        call(pool, **{field: value})
    error = caught.value
    assert (error.reason, error.code, error.field) == (Reason.INVALID_FIELD, Code.INVALID_ARGUMENT, field)
    assert error.message.startswith(message)
    assert set(error.metadata) == {"value", "limit"}
    assert (pool.num_tables, pool.usage().held) == (0, 0)


@pytest.mark.parametrize("fields", RIGHT)
def test_the_limits_themselves_are_allowed(pool: Pool, fields: dict[str, Any]) -> None:
    create(pool, **fields)
    worker = pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id
    assert pool.step(worker, Step(1, creates=[TableRequest([1], 1, **fields)]), 0.0).grants


@pytest.mark.parametrize("wrong", WRONG)
def test_a_worker_that_passes_them_on_breaks_the_protocol(pool: Pool, wrong: str) -> None:
    field, value, message = WRONG[wrong]
    worker = pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id
    with pytest.raises(PagepoolError) as caught:
        pool.step(worker, Step(1, creates=[TableRequest([1], 1, **{field: value})]), 0.0)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert message.partition(",")[0] in caught.value.message
    assert pool.num_tables == 0
