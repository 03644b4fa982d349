"""What a worker says in a step is what memd's core hears, whichever fields it sets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memd import messages
from memd.core import operations, values
from pagepool import pool_values as said
from pagepool.memd.v1.worker_service_pb2 import AttachRequest
from pagepool_client.wire import step_message


def heard(step: said.Step) -> values.Step:
    """After a way over the wire."""
    return messages.step_from(AttachRequest.FromString(step_message(7, step).SerializeToString()).step)


OPERATIONS: list[tuple[said.TableOperation, operations.TableOperation]] = [
    (said.Fork(3, 4), operations.Fork(3, 4)),
    (said.CopyOnWrite(3, 1, [8, 9]), operations.CopyOnWrite(3, 1, [8, 9])),
    (said.Take(3, [8]), operations.Take(3, [8])),
    (said.Truncate(3, 17, 8), operations.Truncate(3, 17, 8)),
    (said.Release(3), operations.Release(3)),
    (said.Suspend(3, [5, 1 << 31]), operations.Suspend(3, [5, 1 << 31])),
    (said.Suspend(3, ()), operations.Suspend(3, [])),
]


def plain(operation: Any) -> tuple[Any, ...]:
    values = (getattr(operation, each.name) for each in dataclasses.fields(operation))
    return type(operation), *(value if isinstance(value, int) else list(value) for value in values)


@pytest.mark.parametrize(("worker", "core"), OPERATIONS, ids=lambda one: type(one).__name__)
def test_every_operation_arrives_as_it_was_meant(worker: said.TableOperation, core: operations.TableOperation) -> None:
    (operation,) = heard(said.Step(operations=[worker])).operations
    assert plain(operation) == plain(core)


def test_a_table_request_arrives_with_all_its_fields() -> None:
    request = said.TableRequest(1, (), 5, b"salt", -3, no_match=True, arrival=12.25, headroom=6, resume_table_id=9)
    (create,) = heard(said.Step(creates=[request])).creates
    assert create == values.TableRequest(
        [], 5, b"salt", -3, no_match=True, ref=1, arrival=12.25, headroom=6, resume_table_id=9
    )
    (create,) = heard(said.Step(creates=[said.TableRequest(1, [2, 3], 5)])).creates
    assert create == values.TableRequest([], 5, ref=1, packed=bytes([2, 0, 0, 0, 3, 0, 0, 0]))


def test_a_reserve_arrives_with_the_table_that_waits_for_it() -> None:
    reserves = heard(
        said.Step(reserves=[said.ReserveRequest(1, 5, 2, for_table_id=9), said.ReserveRequest(2, 6)])
    ).reserves
    assert list(reserves) == [operations.ReserveRequest(5, 2, 1, 9), operations.ReserveRequest(6, 0, 2)]


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_a_token_id_that_is_none_does_not_leave_the_worker(token_id: int) -> None:
    with pytest.raises(ValueError, match=r"(?i)range|negative"):
        step_message(1, said.Step(operations=[said.Suspend(3, [token_id])]))
