"""The answers that are kept for a worker whose stream breaks: how many, and what they take."""

from __future__ import annotations

import tracemalloc

import pytest

from memd.core import replay
from memd.core.pool import Pool
from memd.core.values import Commit, Step, StepOutcome, TableRequest
from pagepool.errors import PagepoolError, Reason
from tests.cpu.memory_pool import make_pool

B = 8


def reclaimed(pool: Pool, lease: int) -> None:
    pool.stream_broken(lease)
    assert pool.attach("worker", "lock", 10.0, 0.0, (pool.epoch, lease)).reclaimed


def played(pool: Pool, lease: int, count: int, length: int) -> list[tuple[Step, StepOutcome]]:
    """Steps that each ask for a table of so many blocks, and release the one before."""
    steps, before = list[tuple[Step, StepOutcome]](), list[int]()
    for step_id in range(1, count + 1):
        step = Step(step_id, releases=before, creates=[TableRequest((), length, ref=step_id)])
        outcome = pool.step(lease, step, 0.0)
        steps.append((step, outcome))
        before = [outcome.grants[0].table_id]
    return steps


@pytest.mark.parametrize(
    ("steps", "blocks", "kept"),
    [(4, 10**6, 4), (10**6, 3 * (replay.REPLY_BLOCKS + 2), 3), (10**6, 1, 1), (10**6, 3 * replay.REPLY_BLOCKS + 5, 2)],
)
def test_answers_are_kept_up_to_a_number_of_steps_and_of_blocks_and_the_last_one_always(
    steps: int, blocks: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MAX_REPLAYED_STEPS", steps)
    monkeypatch.setattr(replay, "MAX_REPLAYED_BLOCKS", blocks)
    pool = make_pool(8)
    lease = pool.attach("worker", "lock", 10.0, 0.0).lease.lease_id
    said = played(pool, lease, 7, 2)
    reclaimed(pool, lease)
    for step, outcome in said[-kept:]:
        assert pool.step(lease, step, 0.0) == outcome
    with pytest.raises(PagepoolError, match=rf"only the last {kept} answers are kept") as caught:
        pool.step(lease, said[-kept - 1][0], 0.0)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    pool.check()


def test_a_refusal_counts_though_it_has_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_REPLAYED_BLOCKS", 2 * replay.REPLY_BLOCKS)
    pool = make_pool(8)
    lease = pool.attach("worker", "lock", 10.0, 0.0).lease.lease_id
    steps = [Step(number, creates=[TableRequest((), 9, ref=number)]) for number in range(1, 5)]
    outcomes = [pool.step(lease, step, 0.0) for step in steps]
    assert all(outcome.refusals for outcome in outcomes)
    reclaimed(pool, lease)
    assert [pool.step(lease, step, 0.0) for step in steps[2:]] == outcomes[2:]
    with pytest.raises(PagepoolError, match="only the last 2 answers"):
        pool.step(lease, steps[1], 0.0)


def test_a_kept_answer_takes_little_more_than_its_numbers_on_the_wire() -> None:
    """As after a burst of requests with one long prompt: each answer names all of its blocks."""
    pool, length = make_pool(2200, B), 1024
    lease = pool.attach("worker", "lock", 10.0, 0.0).lease.lease_id
    prompt = list(range(B * length))
    table = pool.step(lease, Step(1, creates=[TableRequest((), length)]), 0.0).grants[0].table_id
    pool.step(lease, Step(2, commits=[Commit(table, prompt)]), 0.0)
    taken: list[int] = []
    tracemalloc.start()
    try:
        for number in range(3, 83, 2):
            grant = pool.step(lease, Step(number, creates=[TableRequest([*prompt, 1], length + 1)]), 0.0).grants[0]
            assert len(grant.blocks.block_ids) == length + 1
            pool.step(lease, Step(number + 1, releases=[grant.table_id]), 0.0)
            del grant
            taken.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # Of the first ones each block also gets a tuple of its holders, once.
    assert (taken[-1] - taken[9]) / 30 < 16 * length, "12 bytes a block; as lists of numbers it was 72"
