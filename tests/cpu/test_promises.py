"""A prefix that somebody is about to compute: who waits for it, until when, and who does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memd.core.operations import Suspend, Truncate
from memd.core.pool import Pool
from memd.core.promises import MIN_TOKENS, PATIENCE_S, Promises
from memd.core.values import Commit, Grant, Refusal, RefusalReason, Step, TableRequest
from tests.cpu.prefix_rig import B, Worker, a_pool

LONG = list(range(100, 100 + 2 * MIN_TOKENS))
"""Full blocks, of which the last cannot be found by a prompt that ends there."""


@pytest.fixture
def pool() -> Pool:
    return a_pool(80)


@pytest.fixture
def first(pool: Pool) -> Worker:
    return Worker(pool)


@pytest.fixture
def second(pool: Pool) -> Worker:
    return Worker(pool, "another lock")


def ask(
    worker: Worker, tokens: Sequence[int], now: float = 0.0, salt: bytes = b"", *, waits: bool = True
) -> Grant | Refusal:
    worker.steps += 1
    request = TableRequest(tokens, -(-len(tokens) // B), salt, wait_for_prefix=waits)
    outcome = worker.pool.step(worker.lease, Step(worker.steps, creates=[request]), now)
    worker.pool.check()
    return [*outcome.grants, *outcome.refusals][0]


def granted(answer: Grant | Refusal) -> Grant:
    assert isinstance(answer, Grant)
    return answer


def is_told_to_wait(answer: Grant | Refusal) -> bool:
    return isinstance(answer, Refusal) and answer.reason is RefusalReason.PREFIX_PENDING


def told(worker: Worker) -> bool:
    """Whether the worker hears that it may ask again; each news comes once."""
    return worker.lease in [lease_id for lease_id, _ in worker.pool.waiting.take_news()]


def commit(worker: Worker, table_id: int, tokens: Sequence[int], now: float = 0.0) -> None:
    worker.steps += 1
    worker.pool.step(worker.lease, Step(worker.steps, [Commit(table_id, tokens)]), now)
    worker.pool.check()


def test_a_request_waits_until_the_prefix_is_complete_and_finds_it_then(first: Worker, second: Worker) -> None:
    table = granted(ask(first, LONG)).table_id
    held = first.pool.usage().held
    assert is_told_to_wait(ask(second, [*LONG, 1]))
    assert first.pool.usage().held == held  # who waits holds nothing
    commit(first, table, LONG[:-1])
    assert not told(second)
    commit(first, table, LONG[-1:])
    assert told(second)
    assert not told(second)
    assert granted(ask(second, [*LONG, 1])).cached_tokens == len(LONG)


def test_so_it_does_on_the_same_worker_and_in_the_same_step(first: Worker) -> None:
    request = TableRequest(LONG, len(LONG) // B, wait_for_prefix=True)
    outcome = first.pool.step(first.lease, Step(1, creates=[request, request, request]), 0.0)
    assert (len(outcome.grants), [one.reason for one in outcome.refusals]) == (1, [RefusalReason.PREFIX_PENDING] * 2)
    counters = first.pool.counters
    assert (counters.refused_requests, counters.prefix_pending_requests) == (0, 2)


def test_who_does_not_want_to_wait_computes_too(first: Worker, second: Worker) -> None:
    ask(first, LONG)
    assert granted(ask(second, LONG, waits=False)).cached_tokens == 0


@pytest.mark.parametrize(("shared", "waits"), [(MIN_TOKENS, True), (MIN_TOKENS - 1, False), (MIN_TOKENS + 5, True)])
def test_a_wait_saves_so_many_tokens_at_least(first: Worker, second: Worker, shared: int, waits: bool) -> None:
    ask(first, LONG)
    assert is_told_to_wait(ask(second, [*LONG[:shared], *[7] * 40])) is waits


def test_what_is_found_already_is_not_waited_for(first: Worker, second: Worker) -> None:
    table = granted(ask(first, LONG)).table_id
    commit(first, table, LONG[: MIN_TOKENS + B])
    assert granted(ask(second, LONG)).cached_tokens == MIN_TOKENS + B  # 56 more to come, and 48 of them could be found


def test_prefixes_of_another_salt_are_not_waited_for(first: Worker, second: Worker) -> None:
    ask(first, LONG, salt=b"x")
    assert granted(ask(second, LONG, salt=b"y")).cached_tokens == 0
    assert is_told_to_wait(ask(second, LONG, salt=b"x"))


def test_the_last_token_is_not_waited_for(first: Worker, second: Worker) -> None:
    ask(first, LONG[:MIN_TOKENS])
    assert granted(ask(second, LONG[:MIN_TOKENS])).cached_tokens == 0
    assert is_told_to_wait(ask(second, [*LONG[:MIN_TOKENS], 1]))


@pytest.mark.parametrize("how", ["release", "suspend", "truncate", "detach", "lost", "gone", "other tokens"])
def test_what_will_not_be_is_not_waited_for_any_more(first: Worker, second: Worker, how: str) -> None:
    table = granted(ask(first, LONG)).table_id
    assert is_told_to_wait(ask(second, LONG))
    match how:
        case "release":
            first.step(releases=[table])
        case "suspend":
            first.step(operations=[Suspend(table, LONG)])
        case "truncate":
            first.step(operations=[Truncate(table, 0)])
        case "detach":
            first.pool.detach(first.lease, 0.0)
        case "lost":
            first.pool.fail_lease(first.lease, 1.0)
        case "gone":
            first.pool.stream_broken(first.lease)
            first.pool.process_gone(first.lease, 0.0)
        case _:
            first.step(commits=[Commit(table, [5] * B)])
    first.pool.check()
    assert told(second)
    assert granted(ask(second, LONG)).cached_tokens == 0


def test_a_resumed_table_promises_what_it_computes_anew(first: Worker, second: Worker) -> None:
    table = granted(ask(first, LONG)).table_id
    first.step(operations=[Suspend(table, LONG)])
    first.step(creates=[TableRequest([], len(LONG) // B, resume_table_id=table)])
    assert is_told_to_wait(ask(second, LONG))


def test_a_table_promises_no_more_than_it_has_blocks_for(first: Worker, second: Worker) -> None:
    first.create(LONG, MIN_TOKENS // B - 1)
    assert granted(ask(second, LONG)).cached_tokens == 0


def test_nobody_waits_for_a_table_that_commits_nothing_for_some_seconds(first: Worker, second: Worker) -> None:
    table = granted(ask(first, LONG, 10.0)).table_id
    commit(first, table, LONG[:B], 12.0)
    assert is_told_to_wait(ask(second, LONG, 12.0 + PATIENCE_S - 0.1))
    first.pool.tick(12.0 + PATIENCE_S - 0.1)
    assert not told(second)
    first.pool.tick(12.0 + PATIENCE_S)
    assert told(second)
    assert granted(ask(second, LONG, 12.0 + PATIENCE_S)).cached_tokens == B


def test_of_two_that_compute_the_same_the_other_is_waited_for_if_one_ends(first: Worker, second: Worker) -> None:
    third = Worker(first.pool, "a third lock")
    one, other = (granted(ask(each, LONG, waits=False)).table_id for each in (first, second))
    assert is_told_to_wait(ask(third, LONG))
    first.step(releases=[one])
    assert not told(third)
    commit(second, other, LONG)
    assert told(third)


def test_of_those_that_wait_one_goes_on_and_the_others_wait_for_it(first: Worker, second: Worker) -> None:
    third = Worker(first.pool, "a third lock")
    table = granted(ask(first, LONG)).table_id
    assert is_told_to_wait(ask(second, LONG))
    assert is_told_to_wait(ask(third, LONG))
    first.step(releases=[table])
    assert first.pool.waiting.take_news() == [(second.lease, 80), (third.lease, 80)]
    assert granted(ask(third, LONG)).cached_tokens == 0
    assert is_told_to_wait(ask(second, LONG))


def test_a_worker_whose_stream_broke_is_told_when_it_is_back(first: Worker, second: Worker) -> None:
    table = granted(ask(first, LONG)).table_id
    ask(second, LONG)
    second.pool.stream_broken(second.lease)
    first.step(releases=[table])
    assert not told(second)
    second.pool.attach("worker", "another lock", 1e6, 0.0, (second.pool.epoch, second.lease))
    assert told(second)


def test_nothing_is_left_of_promises_that_were_kept_or_dropped(first: Worker, second: Worker) -> None:
    promises: Promises = first.pool._state.promises
    for worker in (first, second):
        table = granted(ask(worker, [*LONG, worker.lease], waits=False)).table_id
        commit(worker, table, LONG[:B])
        worker.step(releases=[table])
    assert not promises
    assert promises.by_table() == {}


def test_the_bounds_are_what_the_proto_says() -> None:
    assert (MIN_TOKENS, PATIENCE_S) == (64, 5.0)
