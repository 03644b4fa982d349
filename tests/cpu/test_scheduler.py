"""What the scheduler asks memd for, and what it puts into a step."""

from __future__ import annotations

import pytest

from inferd.core.block_tables import BlockTables
from inferd.core.limits import Limits
from inferd.core.messages import Ending, Submit
from inferd.core.plan import Plan
from inferd.core.ports import Grant, PoolInfo, Refusal, Step
from inferd.core.scheduler import Scheduler
from inferd.core.sequence import Phase, Sequence
from pagepool.errors import PagepoolError, Reason
from pagepool.pool_values import Release

BLOCK = 8
INFO = PoolInfo(epoch=1, lease_id=1, block_size=BLOCK, num_blocks=100, unit_bytes=128)


def make(request: int, prompt: int = 10, most: int = 4, priority: int = 0, at: float = 0.0) -> Sequence:
    return Sequence(Submit(request, list(range(prompt)), most, priority=priority), at)


def grant(sequence: Sequence, cached: int = 0) -> Grant:
    count = sequence.blocks_needed(BLOCK)
    ids = [100 * sequence.request + index for index in range(count)]
    return Grant(sequence.request, 1000 + sequence.request, cached, ids, [(1 << 29) | each for each in ids])


def refusal(sequence: Sequence, *, never: bool = False) -> Refusal:
    return Refusal(sequence.request, never, available_blocks=1, total_blocks=100)


def attached(limits: Limits | None = None) -> Scheduler:
    scheduler = Scheduler(limits or Limits())
    scheduler.attach(INFO)
    return scheduler


def queue(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def told(scheduler: Scheduler) -> Step:
    """What memd is told, as one step."""
    steps = scheduler.take_steps(0.0)
    assert len(steps) <= 1
    return steps[0] if steps else Step()


def committed(step: Step) -> list[tuple[int, list[int]]]:
    return [(commit.table_id, list(commit.token_ids)) for commit in step.commits]


def asked(scheduler: Scheduler) -> list[int]:
    return [create.ref for create in told(scheduler).creates]


def released(step: Step) -> list[int]:
    return [each.table_id for each in step.operations if isinstance(each, Release)]


def sampled(scheduler: Scheduler, plan: Plan, token: int = 77) -> None:
    scheduler.collected(plan)
    for sequence in plan.sampled:
        sequence.accept(token, 1.0, frozenset())


# -- sequences


@pytest.mark.parametrize(("prompt", "most", "blocks"), [(1, 1, 1), (8, 1, 1), (8, 2, 2), (9, 8, 2), (9, 9, 3)])
def test_a_sequence_asks_for_room_for_all_but_the_last_token(prompt: int, most: int, blocks: int) -> None:
    assert make(1, prompt, most).blocks_needed(BLOCK) == blocks


def test_a_request_without_work_is_refused_by_name() -> None:
    with pytest.raises(PagepoolError) as empty:
        make(1, prompt=0)
    assert empty.value.reason is Reason.PROMPT_EMPTY
    with pytest.raises(PagepoolError, match="max_tokens is 0") as none:
        make(1, most=0)
    assert none.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILL, Phase.FINISHED])
def test_a_finished_sequence_stays_finished(phase: Phase) -> None:
    sequence = make(1)
    sequence.finish()
    with pytest.raises(RuntimeError, match="cannot go from FINISHED"):
        sequence.enter(phase)


def test_a_sequence_cannot_decode_before_it_was_admitted() -> None:
    sequence = make(1)
    sequence.num_computed = 10
    assert sequence.phase is Phase.WAITING
    with pytest.raises(RuntimeError):
        sequence.enter(Phase.DECODE)


def test_the_phases_of_a_sequence_are_timed_one_after_the_other() -> None:
    sequence = make(1, prompt=4, most=2, at=1.0)
    sequence.admit(BlockTables(BLOCK).created(grant(sequence)))
    assert sequence.launch(4, 0, 1, 3.0)
    sequence.advance(4)
    assert sequence.accept(5, 6.0, frozenset()) is None
    assert sequence.launch(1, 0, 2, 7.0)
    sequence.advance(1)
    assert sequence.accept(6, 10.0, frozenset()) is Ending.MAX_TOKENS
    used = sequence.used(99.0)
    assert (used.queue_s, used.prefill_s, used.decode_s) == (2.0, 3.0, 4.0)
    assert used.generated_tokens == 2


# -- limits


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_batch_tokens": 3, "max_num_seqs": 4}, "--max-batch-tokens"),
        ({"max_queue": -1}, "--max-queue"),
    ],
)
def test_limits_that_allow_no_step_name_the_flag(limits: dict[str, int], flag: str) -> None:
    with pytest.raises(PagepoolError) as error:
        Limits(**limits)
    assert error.value.field == flag


def test_the_queue_is_bounded_beyond_what_can_run() -> None:
    scheduler = attached(Limits(max_num_seqs=2, max_queue=1))
    queue(scheduler, make(1), make(2), make(3))
    with pytest.raises(PagepoolError) as full:
        scheduler.add(make(4))
    assert full.value.reason is Reason.QUEUE_FULL
    assert full.value.retry_after_s


def test_what_the_pool_can_never_hold_is_refused_with_the_numbers() -> None:
    with pytest.raises(PagepoolError, match=r"need 101 blocks of 8 tokens.*has 100;.*--pool-bytes") as error:
        attached().add(make(1, prompt=800, most=2))
    assert error.value.reason is Reason.REQUEST_TOO_LARGE


# -- admission


def test_nothing_is_asked_for_before_the_pool_is_there() -> None:
    scheduler = Scheduler(Limits())
    queue(scheduler, make(1))
    assert asked(scheduler) == []
    scheduler.attach(INFO)
    assert asked(scheduler) == [1]


def test_the_queue_goes_by_priority_and_then_by_arrival() -> None:
    scheduler = attached()
    queue(scheduler, make(1, at=1), make(2, at=2), make(3, priority=1, at=3), make(4, priority=-1, at=0))
    assert asked(scheduler) == [3, 1, 2, 4]


def test_a_table_is_asked_for_once_and_the_next_ones_when_memd_has_answered() -> None:
    scheduler = attached()
    first = make(1)
    queue(scheduler, first)
    assert asked(scheduler) == [1]
    queue(scheduler, make(2, at=1), make(3, at=2))
    assert asked(scheduler) == []
    scheduler.granted(grant(first))
    assert asked(scheduler) == [2, 3]
    assert asked(scheduler) == []


def test_no_more_is_asked_for_than_may_run() -> None:
    scheduler = attached(Limits(max_num_seqs=2))
    first, second, third = make(1), make(2, at=1), make(3, at=2)
    queue(scheduler, first, second, third)
    assert asked(scheduler) == [1, 2]
    scheduler.granted(grant(first))
    scheduler.granted(grant(second))
    assert asked(scheduler) == []
    scheduler.finish(first)
    step = told(scheduler)
    assert (released(step), [create.ref for create in step.creates]) == ([1001], [3])


@pytest.mark.parametrize("grant_first", [True, False])
def test_what_was_granted_behind_a_refused_request_is_given_back(grant_first: bool) -> None:
    scheduler = attached()
    big, small = make(1, prompt=80), make(2, at=1)
    queue(scheduler, big, small)
    assert asked(scheduler) == [1, 2]
    answers = [lambda: scheduler.granted(grant(small)), lambda: scheduler.refused(refusal(big))]
    for answer in answers if grant_first else reversed(answers):
        answer()
    assert scheduler.waiting == [big, small]
    assert scheduler.plan(0.0) is None
    step = told(scheduler)
    assert released(step) == [1002]
    assert [create.ref for create in step.creates] == [1]


def test_after_a_refusal_only_the_head_asks_and_only_when_blocks_came_free() -> None:
    scheduler = attached()
    runs, big, small = make(1), make(2, prompt=80, at=1), make(3, at=2)
    queue(scheduler, runs)
    asked(scheduler)
    scheduler.granted(grant(runs))
    queue(scheduler, big)
    assert asked(scheduler) == [2]
    scheduler.refused(refusal(big))
    queue(scheduler, small)
    assert asked(scheduler) == []
    scheduler.freed()
    assert asked(scheduler) == [2]
    scheduler.refused(refusal(big))
    assert asked(scheduler) == []
    scheduler.finish(runs)
    assert asked(scheduler) == [2]
    scheduler.granted(grant(big))
    assert asked(scheduler) == [3]


def test_a_late_refusal_behind_the_head_does_not_undo_the_news_that_blocks_came_free() -> None:
    scheduler = attached()
    head, behind = make(1, prompt=40), make(2, prompt=80, at=1)
    queue(scheduler, head, behind)
    assert asked(scheduler) == [1, 2]
    scheduler.refused(refusal(head))
    scheduler.freed()
    assert asked(scheduler) == [], "the other answer is still to come"
    scheduler.refused(refusal(behind))
    assert asked(scheduler) == [1]


def test_a_more_urgent_request_may_ask_though_the_old_head_was_refused() -> None:
    scheduler = attached()
    big = make(1, prompt=80)
    queue(scheduler, big)
    asked(scheduler)
    scheduler.refused(refusal(big))
    queue(scheduler, make(2, priority=5, at=1))
    assert asked(scheduler) == [2]


def test_a_cancelled_head_lets_the_others_ask() -> None:
    scheduler = attached()
    big = make(1, prompt=80)
    queue(scheduler, big)
    asked(scheduler)
    scheduler.refused(refusal(big))
    queue(scheduler, make(2, at=1))
    scheduler.finish(big)
    assert asked(scheduler) == [2]


def test_a_table_granted_to_a_cancelled_request_goes_back() -> None:
    scheduler = attached()
    sequence = make(1)
    queue(scheduler, sequence)
    asked(scheduler)
    scheduler.finish(sequence)
    scheduler.granted(grant(sequence))
    assert released(told(scheduler)) == [1001]


def test_a_request_refused_for_ever_is_handed_to_the_caller() -> None:
    scheduler = attached()
    sequence = make(1)
    queue(scheduler, sequence)
    asked(scheduler)
    ended = scheduler.refused(refusal(sequence, never=True))
    assert ended is not None
    assert (ended[0], ended[1].reason) == (sequence, Reason.REQUEST_TOO_LARGE)


def test_a_lost_pool_ends_what_had_begun_and_keeps_what_waits() -> None:
    scheduler = attached(Limits(max_batch_tokens=10, max_num_seqs=3))
    began, granted, waits, late = make(1), make(2, at=1), make(3, at=2), make(4, at=3)
    queue(scheduler, began, granted, waits, late)
    assert asked(scheduler) == [1, 2, 3]
    scheduler.granted(grant(began))
    scheduler.granted(grant(granted))
    assert scheduler.plan(0.0)
    assert scheduler.lose() == [began]
    assert scheduler.waiting == [granted, waits, late]
    assert not told(scheduler)
    scheduler.attach(INFO)
    assert asked(scheduler) == [2, 3, 4]


# -- steps


def ready(scheduler: Scheduler, *sequences: Sequence, cached: int = 0) -> None:
    queue(scheduler, *sequences)
    asked(scheduler)
    for sequence in sequences:
        scheduler.granted(grant(sequence, cached))


def test_a_prompt_is_computed_in_one_chunk_if_it_fits_and_its_last_row_is_sampled() -> None:
    scheduler = attached()
    sequence = make(1, prompt=10)
    ready(scheduler, sequence)
    plan = scheduler.plan(0.0)
    assert plan
    assert plan.input.token_ids == list(range(10))
    assert plan.input.positions == list(range(10))
    assert plan.input.slots == [800 + position for position in range(10)]
    assert (plan.input.q_lens, plan.input.kv_lens, plan.input.logit_rows) == ([10], [10], [9])
    assert plan.sampled == [sequence]


def test_cached_tokens_are_not_computed_again() -> None:
    scheduler = attached()
    ready(scheduler, make(1, prompt=20), cached=16)
    plan = scheduler.plan(0.0)
    assert plan
    assert plan.input.positions == [16, 17, 18, 19]
    assert (plan.input.q_lens, plan.input.kv_lens) == ([4], [20])


def test_decodes_come_first_and_prefill_fills_the_budget_in_chunks() -> None:
    scheduler = attached(Limits(max_batch_tokens=12, max_num_seqs=4))
    old = make(1, prompt=4)
    ready(scheduler, old)
    first = scheduler.plan(0.0)
    assert first
    sampled(scheduler, first)
    long, short = make(2, prompt=18, at=1), make(3, prompt=3, at=2)
    ready(scheduler, long, short)

    mixed = scheduler.plan(1.0)
    assert mixed
    assert [(sequence.request, count) for sequence, count in mixed.chunks] == [(1, 1), (2, 11)]
    assert mixed.sampled == [old]
    assert mixed.input.logit_rows == [0]
    sampled(scheduler, mixed)

    last = scheduler.plan(2.0)
    assert last
    assert [(sequence.request, count) for sequence, count in last.chunks] == [(1, 1), (2, 7), (3, 3)]
    assert last.sampled == [old, long, short]
    assert last.input.logit_rows == [0, 7, 10]
    assert last.input.kv_lens == [6, 18, 3]


def test_exactly_the_computed_tokens_are_committed_before_the_table_goes_back() -> None:
    scheduler = attached()
    sequence = make(1, prompt=3)
    ready(scheduler, sequence)
    for _ in range(2):
        plan = scheduler.plan(0.0)
        assert plan
        sampled(scheduler, plan)
    scheduler.finish(sequence)
    step = told(scheduler)
    # The second sampled token is known, but its KV was never written.
    assert committed(step) == [(1001, [0, 1, 2]), (1001, [77])]
    assert released(step) == [1001]
    assert not told(scheduler)


def test_a_step_that_was_not_computed_commits_nothing() -> None:
    scheduler = attached(Limits(max_batch_tokens=4, max_num_seqs=1))
    sequence = make(1, prompt=10)
    ready(scheduler, sequence)
    plan = scheduler.plan(0.0)
    assert plan
    scheduler.collected(plan)
    assert scheduler.plan(0.0)  # fails in the model
    scheduler.finish(sequence)
    assert committed(told(scheduler)) == [(1001, [0, 1, 2, 3])]


def test_a_step_planned_before_the_tokens_of_the_one_before_are_known_refers_to_them() -> None:
    scheduler = attached()
    first, second = make(1, prompt=9, most=3), make(2, prompt=3, most=2, at=1)
    ready(scheduler, first, second)
    plans = [scheduler.plan(0.0) for _ in range(4)]
    inputs = [plan.input for plan in plans if plan]
    assert [step.token_ids for step in inputs[1:]] == [[-1, -2], [-1]]
    assert [step.positions for step in inputs[1:]] == [[9, 3], [10]]
    assert [step.slots for step in inputs[1:]] == [[101 * BLOCK + 1, 200 * BLOCK + 3], [101 * BLOCK + 2]]
    assert plans[3] is None, "the last token of each is being sampled"


def test_the_table_of_a_sequence_that_has_ended_goes_back_after_its_last_step_in_flight() -> None:
    scheduler = attached()
    ready(scheduler, sequence := make(1, prompt=3))
    before, after = scheduler.plan(0.0), scheduler.plan(0.0)
    assert before
    assert after
    scheduler.collected(before)
    scheduler.finish(sequence)
    step = told(scheduler)
    assert (committed(step), step.operations) == ([(1001, [0, 1, 2])], [])
    scheduler.collected(after)
    step = told(scheduler)
    assert (step.commits, step.operations) == ([], [Release(1001)])
