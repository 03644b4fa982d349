"""What pins keep from requests is said by name: in memd's refusals, and to whoever would wait for it in vain."""

from __future__ import annotations

import pytest

from inferd.core.messages import Failed
from memd.core.pool import Pool
from memd.core.values import Commit, PinRequest, Refusal, RefusalReason, ReserveRequest, Step, TableRequest
from memd.messages import step_result
from pagepool.errors import PagepoolError, Reason
from pagepool_client.wire import events_of
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import make_pool

B = 8
KEPT = list(range(6 * B))


@pytest.fixture
def pool() -> Pool:
    """12 blocks, of which 6 are pinned and in nobody's use."""
    made = make_pool(12, B)
    worker = made.attach("first", "first", 100.0, 0.0).lease.lease_id
    (grant,) = made.step(worker, Step(1, creates=[TableRequest(KEPT, 6)]), 0.0).grants
    made.step(worker, Step(2, [Commit(grant.table_id, KEPT)], [grant.table_id]), 0.0)
    made.detach(worker, 0.0)
    made.prefixes.pin(PinRequest(KEPT, 1000.0, pinned=True), 0.0)
    return made


def refusals(pool: Pool, step: Step) -> list[Refusal]:
    worker = pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id
    return list(pool.step(worker, step, 0.0).refusals)


# -- memd


def test_a_refusal_says_how_many_blocks_are_pinned(pool: Pool) -> None:
    asked = [TableRequest([], 7), TableRequest([*KEPT[: 2 * B], 0], 9), TableRequest([], 13)]
    exhausted, matched, too_large, reserve = refusals(pool, Step(1, creates=asked, reserves=[ReserveRequest(7, 0)]))
    assert (exhausted.reason, exhausted.available_blocks, exhausted.pinned_blocks) == (1, 6, 6)
    assert (matched.reason, matched.available_blocks, matched.pinned_blocks) == (1, 8, 4), "what it finds is its own"
    assert (too_large.reason, too_large.pinned_blocks) == (RefusalReason.REQUEST_TOO_LARGE, 6)
    assert (reserve.reason, reserve.available_blocks, reserve.pinned_blocks) == (1, 6, 6)


def test_the_wire_carries_it(pool: Pool) -> None:
    worker = pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id
    result = step_result(pool.step(worker, Step(1, creates=[TableRequest([], 7)]), 0.0)).step_result
    (event,) = events_of(result)
    assert (event.total_blocks, event.pinned_blocks) == (12, 6)  # type: ignore[union-attr]


def test_a_client_is_told_that_pins_are_in_its_way(pool: Pool) -> None:
    client = pool.create_lease("client", 100.0, 0.0).lease_id
    with pytest.raises(PagepoolError, match="6 more are cached, but pinned: UnpinPrefix gives them back") as caught:
        pool.allocate_blocks(client, 7, 0.0)
    assert caught.value.metadata["pinned"] == "6"
    pool.prefixes.unpin(KEPT, b"", 0.0)
    assert len(pool.allocate_blocks(client, 7, 0.0).block_ids) == 7


# -- a worker, over the same pool


def rig_of(pool: Pool) -> Rig:
    rig = Rig(pool=pool)
    rig.settle()
    return rig


def check_pinned(end: Failed, num_blocks: int) -> None:
    assert (end.reason, end.retry_after_s) == (Reason.POOL_EXHAUSTED, 60.0)
    assert end.metadata == {"num_blocks": f"{num_blocks}", "pinned_blocks": "6", "total_blocks": "12"}
    assert "are pinned by PinPrefix" in end.message


def test_a_request_that_pins_leave_no_room_for_ends_by_name_and_those_behind_it_run(pool: Pool) -> None:
    rig = rig_of(pool)
    rig.submit(1, list(range(100, 150)), most=20)
    rig.submit(2, [7, 8, 9], most=4)
    rig.settle()
    check_pinned(rig.failed(1), 9)
    assert len(rig.generated(2)) == 4
    rig.check_nothing_held()
    pool.prefixes.unpin(KEPT, b"", 0.0)
    rig.submit(3, list(range(100, 150)), most=20)
    rig.settle()
    assert len(rig.generated(3)) == 20


def test_a_request_that_has_begun_ends_by_name_when_it_meets_the_pins(pool: Pool) -> None:
    rig = rig_of(pool)
    rig.submit(1, list(range(100, 110)), most=70)
    rig.settle()
    check_pinned(rig.failed(1), 7)
    assert rig.generated(1), "what it could compute was delivered"
    rig.check_nothing_held()


def test_a_request_that_finds_the_pinned_prefix_is_not_held_up_by_it() -> None:
    rig = Rig(num_blocks=12)
    rig.submit(2, KEPT, most=1)
    rig.settle()
    rig.pool.prefixes.pin(PinRequest(KEPT, 1000.0, pinned=True), 0.0)
    rig.submit(1, [*KEPT, 5], most=40)
    rig.settle()
    assert len(rig.generated(1)) == 40
    assert rig.finished(1).used.cached_tokens == 6 * B
    rig.check_nothing_held()


def test_one_that_only_waits_for_others_is_not_refused(pool: Pool) -> None:
    rig = rig_of(pool)
    rig.submit(1, list(range(100, 110)), most=30)  # 5 of the 6 blocks
    rig.submit(2, list(range(120, 140)), most=4)  # 3
    rig.settle()
    assert (len(rig.generated(1)), len(rig.generated(2))) == (30, 4)
    rig.check_nothing_held()
