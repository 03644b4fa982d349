"""How much a worker asks memd for at once, whoever waits, and who holds what in memd meanwhile."""

from __future__ import annotations

import pytest

from inferd.core import admission
from inferd.core.limits import Limits
from inferd.core.ports import Step
from tests.cpu.memory_pool import make_pool
from tests.cpu.scheduler_rig import SchedulerRig
from tests.cpu.test_scheduler import asked, attached, grant, make, queue, refusal


def prompt_of(request: int, length: int) -> list[int]:
    return [(7919 * at + 31 * request) % 50_000 for at in range(length)]


def tokens_asked(step: Step) -> int:
    return sum(len(create.token_ids) for create in step.creates)


# -- what memd looks up at once


def test_questions_on_one_long_document_are_asked_for_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ASKED_TOKENS", budget := 10_000)
    rig = SchedulerRig(make_pool(1000), Limits(max_batch_tokens=512, max_num_seqs=64))
    document = prompt_of(0, 2000)
    questions = [rig.submit(1, [*document, 1], 2)]
    rig.turn()
    for request in range(2, 62):
        questions.append(rig.submit(request, [*document, request], 2))
        rig.tell()
    rig.tell()
    assert rig.scheduler.prefix_waits.num_resting == 60
    rig.turn_until(*questions, most=100)
    assert max(map(tokens_asked, rig.session.steps)) <= budget
    assert [question.cached_tokens for question in questions] == [0, *[2000] * 60]


def test_a_request_of_more_tokens_than_are_asked_for_at_once_is_asked_for_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_ASKED_TOKENS", 100)
    rig = SchedulerRig(make_pool(100), Limits(prefix_wait_s=0))
    lengths = [60, 200, 30, 30]
    sequences = [rig.submit(index, prompt_of(index, length), 2) for index, length in enumerate(lengths)]
    rig.turn_until(*sequences)
    creates = [[create.ref for create in step.creates] for step in rig.session.steps if step.creates]
    assert creates == [[0], [1], [2, 3]]


def test_those_woken_again_and_again_do_not_keep_others_from_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ASKED_TOKENS", 1000)
    rig = SchedulerRig(make_pool(1000), Limits(max_batch_tokens=64, max_num_seqs=64))
    document = prompt_of(0, 2000)
    rig.submit(1, [*document, 1], 2)
    rig.turn()
    for request in range(2, 12):
        rig.submit(request, [*document, request], 2)
        rig.tell()
    other = rig.submit(50, [1, 2, 3], 1)
    for _ in range(4):
        rig.scheduler.freed()  # news of another prefix in each turn
        rig.turn()
    assert other in rig.scheduler.running
    assert rig.scheduler.prefix_waits.num_waited == 10


# -- the claim of the head


@pytest.mark.parametrize("count", [10, 300])
def test_the_head_of_a_long_queue_has_the_claim(count: int) -> None:
    """Memd keeps the last claim of a worker to a new table: that of the last step with requests."""
    pool = make_pool(100)
    holder = SchedulerRig(pool, Limits(prefix_wait_s=0))
    holder.submit(1, prompt_of(1, 720), 8)
    holder.turn()
    holder.turn()
    rig = SchedulerRig(pool, Limits(max_batch_tokens=4096, max_num_seqs=400, prefix_wait_s=0))
    head, *_ = [rig.submit(request, prompt_of(request, 150), 4) for request in range(1, count + 1)]
    rig.turn()
    claims = [claim.asker.rank[1] for claim in pool.waiting.claims()]
    assert claims == [head.arrived_at]


# -- a full pool


def test_in_a_full_pool_most_of_what_is_asked_for_is_granted() -> None:
    rig = SchedulerRig(make_pool(100), Limits(max_batch_tokens=256, max_num_seqs=256))
    sequences = [rig.submit(request, prompt_of(request, 200), 8) for request in range(1, 61)]
    rig.turn_until(*sequences)
    first, *later = [len(step.creates) for step in rig.session.steps if step.creates]
    assert first == 60, "nothing was refused yet"
    assert sum(later) <= 3 * 60


def test_after_a_refusal_as_many_are_asked_for_as_were_granted_since() -> None:
    pool = make_pool(100)
    holder = SchedulerRig(pool, Limits())
    runs = holder.submit(100, prompt_of(100, 720), 8)
    holder.turn()
    holder.turn()
    rig = SchedulerRig(pool, Limits(prefix_wait_s=0, max_num_seqs=64))
    for request in range(1, 12):
        rig.submit(request, prompt_of(request, 120 if request == 1 else 20), 4)
    rig.turn()
    rig.turn()
    holder.scheduler.finish(runs)
    holder.tell()
    for _ in range(5):
        rig.turn()
    creates = [len(step.creates) for step in rig.session.steps if step.creates]
    assert creates == [11, 1, 1, 2, 4, 3]


# -- the order within a step


def test_an_urgent_prompt_is_computed_before_those_that_were_granted_before_it() -> None:
    rig = SchedulerRig(make_pool(1000), Limits(max_batch_tokens=64, max_num_seqs=16, prefix_wait_s=0))
    for request in range(1, 5):
        rig.submit(request, prompt_of(request, 1600), 4, priority=-100)
    rig.turn()
    rig.turn()
    urgent = rig.submit(50, [9, 9, 9], 1, priority=100)
    assert rig.turn_until(urgent) <= 2


def test_one_that_resumes_is_computed_before_younger_ones() -> None:
    rig = SchedulerRig(make_pool(1000), Limits(max_batch_tokens=64, max_num_seqs=16, prefix_wait_s=0))
    old = rig.submit(1, prompt_of(1, 100), 50)
    while old.num_generated < 20:
        rig.turn()
    for request in range(2, 5):
        rig.submit(request, prompt_of(request, 1600), 4)
    rig.turn()
    rig.turn()
    rig.scheduler.victim(old.table_id)
    rig.turn()
    resumed = [rig.turn() for _ in range(3)]
    assert any(plan and plan.sampled == [old] for plan in resumed)


# -- what is counted


def test_what_a_prompt_found_counts_when_it_begins_and_once() -> None:
    scheduler = attached()
    big, small = make(1, prompt=80), make(2, prompt=20, at=1)
    queue(scheduler, big, small)
    assert asked(scheduler) == [1, 2]
    scheduler.granted(grant(small, cached=16))
    scheduler.refused(refusal(big))
    assert scheduler.waiting == [big, small], "its grant is taken back"
    asked(scheduler)
    scheduler.granted(grant(big))
    assert asked(scheduler) == [2]
    scheduler.granted(grant(small, cached=8))
    assert scheduler.cached_tokens == 0
    assert scheduler.plan(0.0)
    assert scheduler.cached_tokens == 8
