"""Requests with one prefix at once, over memd's core: who computes it, who waits, and who stops waiting."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from inferd.core.limits import Limits
from inferd.core.messages import Cancel, EngineState, Sampling
from inferd.core.prefix_waits import PrefixWaits
from inferd.prefix_log import PrefixWaitLog
from memd.core.pool import Pool
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import TokenModel, continuation, make_pool

GREEDY = Sampling(temperature=0)
SHARED = [(7 * at) % 200 for at in range(200)]
"""25 blocks."""


def computed(*rigs: Rig) -> int:
    """Tokens of prompts that were computed in all: each sequence's first step samples nothing but its last chunk's."""
    return sum(len(step.token_ids) for rig in rigs for step in rig.model.steps)


def state(rig: Rig) -> EngineState:
    """As of the last one that was sent, a second from now at the latest."""
    rig.now += 1.0
    rig.turn(1)
    return next(message for message in reversed(rig.sent) if isinstance(message, EngineState))


def two_workers(pool: Pool, prefix_wait_s: float = 10.0) -> tuple[Rig, Rig]:
    """Over one memory."""
    model, limits = TokenModel(pool), Limits(max_batch_tokens=64, prefix_wait_s=prefix_wait_s)
    return Rig(pool=pool, limits=limits, bind=lambda _: model), Rig(pool=pool, limits=limits, bind=lambda _: model)


@pytest.mark.parametrize("count", [2, 16])
def test_of_requests_sent_at_once_with_one_prefix_one_computes_it(count: int) -> None:
    rig = Rig(num_blocks=300, limits=Limits(max_batch_tokens=64, max_num_seqs=32))
    for request in range(count):
        rig.submit(request, [*SHARED, 200 + request % 4, request], 1)
    rig.settle()
    own = [
        rig.finished(request).used.prompt_tokens - rig.finished(request).used.cached_tokens for request in range(count)
    ]
    assert sorted(own) == [2] * (count - 1) + [202]
    assert computed(rig) == sum(own)
    for request in range(count):
        assert rig.generated(request) == continuation([*SHARED, 200 + request % 4, request], 1, GREEDY)


def test_whoever_waits_holds_nobody_up_and_nothing() -> None:
    rig = Rig(limits=Limits(max_batch_tokens=16, max_num_seqs=8))
    rig.submit(1, [*SHARED, 1], 4)
    rig.turn(2)
    rig.submit(2, [*SHARED, 2], 4)
    rig.submit(3, [5, 6, 7], 4)
    rig.turn(3)
    assert [sequence.request for sequence in rig.engine._scheduler.running] == [1, 3]
    now = state(rig)
    assert (now.waiting, now.awaiting_prefix, now.running, now.counters.prefix_waits) == (1, 1, 2, 1)
    assert rig.session.pool.num_tables == 2
    rig.settle()
    assert rig.finished(2).used.cached_tokens == 200
    assert rig.finished(3).used.cached_tokens == 0


def test_a_second_worker_waits_for_the_first_and_finds_what_it_computed() -> None:
    pool = make_pool(100)
    first, second = two_workers(pool)
    first.submit(1, [*SHARED, 1], 2)
    first.turn(2)
    second.submit(2, [*SHARED, 2], 2)
    second.settle()
    assert second.end(2) is None
    first.settle()
    second.settle()
    assert second.finished(2).used.cached_tokens == 200


@pytest.mark.parametrize("how", ["cancelled", "gone"])
def test_what_the_first_does_not_finish_the_second_computes(how: str) -> None:
    pool = make_pool(100)
    first, second = two_workers(pool)
    first.submit(1, [*SHARED, 1], 2)
    first.turn(3)
    second.submit(2, [*SHARED, 2], 2)
    second.settle()
    assert second.end(2) is None
    if how == "cancelled":
        first.mailbox.post(Cancel(1))
        first.settle()
    else:
        pool.stream_broken(first.session.lease_id)
        pool.process_gone(first.session.lease_id, 0.0)
    second.settle()
    used = second.finished(2).used
    assert used.cached_tokens < 200
    assert used.cached_tokens % 8 == 0
    assert second.generated(2) == continuation([*SHARED, 2], 2, GREEDY)


def test_a_request_waits_no_longer_than_its_bound_in_all() -> None:
    pool = make_pool(100)
    first, second = two_workers(pool, prefix_wait_s=3.0)
    first.submit(1, [*SHARED, 1], 2)
    first.turn(2)
    second.submit(2, [*SHARED, 2], 2)
    second.settle()
    assert second.engine._scheduler.asks_at == pytest.approx(3.0, abs=0.1)
    second.now += 2.5
    second.settle()
    assert second.end(2) is None
    with capture_logs() as logs:
        second.now += 0.5
        second.settle()
    assert [(line["log_level"], line["requests"]) for line in logs if "--prefix-wait" in line["event"]] == [
        ("warning", 1)
    ]
    counters = state(second).counters
    assert (counters.prefix_waits, counters.prefix_waits_overdue, state(second).awaiting_prefix) == (1, 1, 0)
    assert state(first).counters.prefix_waits == 0
    assert second.finished(2).used.cached_tokens < 200
    assert second.generated(2) == continuation([*SHARED, 2], 2, GREEDY)


def test_a_bound_of_nothing_is_no_waiting() -> None:
    rig = Rig(num_blocks=100, limits=Limits(prefix_wait_s=0.0))
    for request in range(2):
        rig.submit(request, [*SHARED, request], 2)
    rig.settle()
    assert [rig.finished(request).used.cached_tokens for request in range(2)] == [0, 0]


def test_a_request_that_waits_can_be_cancelled() -> None:
    rig = Rig(limits=Limits(max_batch_tokens=16, max_num_seqs=8))
    rig.submit(1, [*SHARED, 1], 4)
    rig.turn(2)
    rig.submit(2, [*SHARED, 2], 4)
    rig.turn(2)
    rig.mailbox.post(Cancel(2))
    rig.settle()
    assert rig.finished(2).used.generated_tokens == 0
    assert rig.finished(1).used.generated_tokens == 4
    rig.check_nothing_held()
    assert rig.engine._scheduler.asks_at is None


def test_those_that_wait_while_the_pool_is_lost_are_told_so() -> None:
    rig = Rig(limits=Limits(max_batch_tokens=16, max_num_seqs=8))
    rig.submit(1, [*SHARED, 1], 4)
    rig.turn(2)
    rig.submit(2, [*SHARED, 2], 4)
    rig.turn(2)
    rig.session.lose()
    rig.turn(2)
    assert "memd is gone" in rig.failed(2).message


def test_the_log_tells_of_a_burst_of_waits_once() -> None:
    waits, told = PrefixWaits(3.0), PrefixWaitLog()
    with capture_logs() as logs:
        told.note(waits, 0.0)
        for request in range(5):
            waits.refused(request)
        told.note(waits, 0.1)
        waits.refused(5)
        waits.refused(0)  # once more
        told.note(waits, 0.2)
        told.note(waits, 1.1)
        told.note(waits, 9.9)
    assert [(line["more"], line["waiting"]) for line in logs] == [(5, 5), (1, 6)]


def test_the_bound_counts_from_the_first_refusal() -> None:
    waits = PrefixWaits(3.0)
    waits.pass_to(10.0)
    assert waits.may_wait(1)
    waits.refused(1)
    assert waits.rests(1)
    assert waits.next_end == 13.0
    waits.wake()
    assert not waits.rests(1)
    waits.pass_to(12.0)
    assert waits.may_wait(1)
    waits.refused(1)
    assert waits.next_end == 13.0
    waits.pass_to(13.0)
    assert not waits.rests(1)
    assert not waits.may_wait(1)
    assert waits.next_end is None
    waits.forget(1)
    assert waits.may_wait(1)
