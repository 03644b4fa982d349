"""Tables that yield, over the Attach streams of a real memd."""

from __future__ import annotations

from typing import Any

import pytest

from pagepool.errors import Reason
from pagepool.memd.v1 import pool_service_pb2, types_pb2
from pagepool.memd.v1 import worker_service_pb2 as wpb
from pagepool.status import from_rpc_error


def suspend(table_id: int, *token_ids: int) -> wpb.TableOperation:
    return wpb.TableOperation(suspend=wpb.Suspend(table_id=table_id, token_ids=token_ids))


def test_the_least_urgent_table_of_another_worker_yields_and_goes_on_later(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry
) -> None:
    old, young = raw_worker("old"), raw_worker("young")
    total = old.hello(geometry).num_blocks
    young.hello(geometry)
    (first,) = old.step(creates=[wpb.TableRequest(ref=1, num_blocks=total - 3, arrival=1.0)]).grants
    (second,) = young.step(creates=[wpb.TableRequest(ref=1, token_ids=range(40), num_blocks=3, arrival=2.0)]).grants
    (refusal,) = old.step(reserves=[wpb.ReserveRequest(ref=2, num_blocks=1, for_table_id=first.table_id)]).refusals
    assert (refusal.ref, refusal.reason) == (2, wpb.REFUSAL_REASON_POOL_EXHAUSTED)
    assert young.receive("victim").table_id == second.table_id

    commit = wpb.Commit(table_id=second.table_id, token_ids=range(40))
    resume = wpb.TableRequest(ref=3, num_blocks=3, resume_table_id=second.table_id)
    (refusal,) = young.step(commits=[commit], operations=[suspend(second.table_id, 7)], creates=[resume]).refusals
    assert refusal.available_blocks == 2, "what it finds; the third is claimed"
    assert old.receive("capacity").available_blocks == 3
    request = pool_service_pb2.GetBlockTableRequest(table_id=second.table_id)
    table = memd.pool().GetBlockTable(request).block_table
    assert (table.suspended, table.num_tokens, list(table.block_ids)) == (True, 41, [])
    assert list(table.token_ids) == [*range(40), 7]

    assert old.step(reserves=[wpb.ReserveRequest(ref=2, num_blocks=1, for_table_id=first.table_id)]).grants
    old.step(release_table_ids=[first.table_id])
    young.receive("capacity")
    (grant,) = young.step(creates=[resume]).grants
    assert (grant.table_id, grant.cached_tokens, len(grant.block_ids)) == (second.table_id, 32, 3)
    assert not memd.pool().GetBlockTable(request).block_table.suspended


@pytest.mark.parametrize("twice", [True, False], ids=["suspended twice", "unknown"])
def test_a_table_that_cannot_be_suspended_ends_the_lease(
    memd: Any, raw_worker: Any, geometry: types_pb2.Geometry, twice: bool
) -> None:
    worker = raw_worker()
    worker.hello(geometry)
    table_id = worker.create([], 3).table_id
    worker.send(step=wpb.Step(step_id=2, operations=[suspend(table_id)] * 2 if twice else [suspend(table_id + 1)]))
    error = from_rpc_error(worker.ending())
    assert error.reason is Reason.PROTOCOL_VIOLATION
    assert ("is suspended" if twice else "is not held") in error.message
