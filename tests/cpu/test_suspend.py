"""Tables that give up their blocks and get them again: what is kept, what is found, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memd.core import draft
from memd.core.operations import CopyOnWrite, Fork, Release, ReserveRequest, Suspend, TableOperation, Take, Truncate
from memd.core.pool import Pool
from memd.core.values import Commit, ExtendRequest, LeaseState, PinRequest, Step, TableRequest
from pagepool.errors import PagepoolError, Reason
from tests.cpu.core_worker import B, Worker, make_pool

TOTAL = 8


@pytest.fixture
def pool() -> Pool:
    return make_pool(TOTAL)


@pytest.fixture
def worker(pool: Pool) -> Worker:
    return Worker(pool)


PROMPT = [1] * B + [2] * B + [3] * 5


def test_a_suspended_table_has_no_blocks_and_all_its_tokens(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 4, priority=3)
    worker.suspend(table, 4, 5)
    view = pool.table(table, 3.0)
    assert (view.suspended, view.blocks.block_ids, view.num_tokens, view.cached_tokens) == (
        True,
        [],
        len(PROMPT) + 2,
        0,
    )
    assert (list(view.token_ids), view.priority, view.idle_s) == ([*PROMPT, 4, 5], 3, 2.0)
    assert [one.num_tokens for one in pool.tables_after(0, 9, 3.0)] == [len(PROMPT) + 2]
    assert (pool.usage().held, pool.usage().cached, pool.usage().free) == (0, 2, TOTAL - 2)


def test_commits_of_the_same_step_are_kept_too(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 4)
    worker.step(commits=[Commit(table, [8, 9])], operations=[Suspend(table, [7])])
    assert list(pool.table(table, 1.0).token_ids) == [*PROMPT, 8, 9, 7]


def test_a_resumed_table_finds_its_own_sealed_blocks_but_never_its_last_token(pool: Pool, worker: Worker) -> None:
    (grant,) = worker.step(creates=[TableRequest(PROMPT, 4)]).grants
    table, first = grant.table_id, list(grant.blocks.block_ids)
    worker.step(commits=[Commit(table, PROMPT)])
    worker.suspend(table, 4, 5)
    (grant,) = worker.step(creates=[TableRequest((), 5, ref=9, resume_table_id=table)]).grants
    assert (grant.ref, grant.table_id, grant.cached_tokens, len(grant.blocks.block_ids)) == (9, table, 2 * B, 5)
    assert list(grant.blocks.block_ids[:2]) == first[:2]
    view = pool.table(table, 1.0)
    assert (view.suspended, view.num_tokens, view.cached_tokens) == (False, 2 * B, 2 * B)
    worker.step(commits=[Commit(table, [*PROMPT[2 * B :], 4, 5])])
    assert list(pool.table(table, 1.0).token_ids) == [*PROMPT, 4, 5]

    worker.step(
        operations=[Truncate(table, 2 * B), Suspend(table, ())]
    )  # two whole blocks: the last has the last token
    (grant,) = worker.step(creates=[TableRequest((), 2, resume_table_id=table)]).grants
    assert grant.cached_tokens == B


def test_a_resumed_table_is_no_query_of_the_prefix_cache(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 4)
    before = (pool.counters.prefix_query_tokens, pool.counters.prefix_hit_tokens)
    worker.suspend(table)
    worker.step(creates=[TableRequest((), 4, resume_table_id=table)])
    assert (pool.counters.prefix_query_tokens, pool.counters.prefix_hit_tokens) == before


def test_its_salt_is_its_own_and_no_match_computes_everything(worker: Worker) -> None:
    table = worker.table(PROMPT, 3, salt=b"mine")
    worker.suspend(table)
    (grant,) = worker.step(creates=[TableRequest((), 3, salt=b"other", resume_table_id=table)]).grants
    assert grant.cached_tokens == 2 * B
    worker.suspend(table)
    (grant,) = worker.step(creates=[TableRequest((), 3, no_match=True, resume_table_id=table)]).grants
    assert grant.cached_tokens == 0


def test_a_refused_resume_leaves_the_table_suspended(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 4)
    worker.suspend(table)
    other = worker.table([9], TOTAL - 1)
    (refusal,) = worker.step(creates=[TableRequest((), 4, ref=3, resume_table_id=table)]).refusals
    assert (refusal.ref, pool.table(table, 1.0).suspended, pool.table(table, 1.0).num_tokens) == (3, True, len(PROMPT))
    (refusal,) = worker.step(creates=[TableRequest((), TOTAL + 1, resume_table_id=table)]).refusals
    assert refusal.reason.name == "REQUEST_TOO_LARGE"
    (grant,) = worker.step(releases=[other], creates=[TableRequest((), 4, resume_table_id=table)]).grants
    assert grant.table_id == table


def test_what_a_table_keeps_is_what_it_had_then_though_its_fork_is_cut_next(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 3)
    (grant,) = worker.step(reserves=[ReserveRequest(1, 1)]).grants
    fork = grant.table_id
    worker.step(operations=[Fork(table, fork), Suspend(table, [4]), Truncate(fork, 2 * B + 1)])
    assert list(pool.table(table, 1.0).token_ids) == [*PROMPT, 4]
    assert list(pool.table(fork, 1.0).token_ids) == PROMPT[: 2 * B + 1]


def test_a_fork_may_be_suspended_and_resumed_by_itself(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 3, priority=5, arrival=2.5)
    (grant,) = worker.step(reserves=[ReserveRequest(0, 1)]).grants
    fork = grant.table_id
    worker.step(operations=[Fork(table, fork), Suspend(fork, [6])])
    assert (pool.table(fork, 1.0).priority, pool.usage().held) == (5, 3)
    (grant,) = worker.step(creates=[TableRequest((), 3, resume_table_id=fork)]).grants
    assert (grant.cached_tokens, pool.usage().held) == (2 * B, 4)


def test_release_and_the_end_of_the_lease_drop_what_was_kept(pool: Pool, worker: Worker) -> None:
    tables = [worker.table([one] * B, 2) for one in (1, 2, 3)]
    worker.step(operations=[Suspend(one, ()) for one in tables])
    worker.step(operations=[Release(tables[0])], releases=[tables[1]])
    assert [one.table_id for one in pool.tables_after(0, 9, 1.0)] == [tables[2]]
    pool.detach(worker.lease, 1.0)
    assert (pool.num_tables, pool.usage().held) == (0, 0)
    pool.check()


def test_a_suspended_table_survives_a_broken_stream_and_steps_are_answered_again(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 4)
    suspend = Step(3, operations=[Suspend(table, [4])])
    resume = Step(4, creates=[TableRequest((), 4, resume_table_id=table)])
    pool.step(worker.lease, suspend, 1.0)
    answer = pool.step(worker.lease, resume, 1.0)
    pool.stream_broken(worker.lease)
    assert pool.attach("one", "one", 100.0, 2.0, (7, worker.lease)).reclaimed
    assert pool.step(worker.lease, suspend, 2.0).grants == []
    assert pool.step(worker.lease, resume, 2.0) == answer
    assert not pool.table(table, 2.0).suspended
    pool.check()


def test_a_lost_lease_keeps_suspended_tables_until_its_process_is_gone(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 4)
    worker.suspend(table)
    (lost,) = pool.tick(101.0)
    assert (lost.state, pool.table(table, 101.0).suspended) == (LeaseState.LOST, True)
    pool.check()
    pool.process_gone(worker.lease, 102.0)
    assert pool.num_tables == 0


def test_pinned_blocks_stay_pinned_while_their_table_is_suspended(pool: Pool, worker: Worker) -> None:
    table = worker.table(PROMPT, 3)
    pool.prefixes.pin(PinRequest(PROMPT, 50.0, pinned=True), 1.0)
    worker.suspend(table)
    assert (pool.usage().pinned, pool.usage().available) == (2, TOTAL - 2)
    (grant,) = worker.step(creates=[TableRequest((), 3, resume_table_id=table)]).grants
    assert grant.cached_tokens == 2 * B


Words = Callable[[int], dict[str, Any]]


def doing(*operations: Callable[[int], TableOperation]) -> Words:
    return lambda table: {"operations": [operation(table) for operation in operations]}


FORBIDDEN: dict[str, Words] = {
    "suspend twice": doing(lambda table: Suspend(table, ())),
    "fork": doing(lambda table: Fork(table, table + 1)),
    "truncate": doing(lambda table: Truncate(table, 0)),
    "copy": doing(lambda table: CopyOnWrite(table, 0, [1])),
    "take": doing(lambda table: Take(table, [1])),
    "unknown table": doing(lambda table: Suspend(table + 99, ())),
    "release, then suspend": doing(Release, lambda table: Suspend(table, ())),
    "commit": lambda table: {"commits": [Commit(table, ())]},
    "extend": lambda table: {"extends": [ExtendRequest(table, 1)]},
    "reserve for it": lambda table: {"reserves": [ReserveRequest(1, 0, for_table_id=table)]},
    "reserve for none": lambda table: {"reserves": [ReserveRequest(1, 0, for_table_id=table + 99)]},
    "resume with tokens": lambda table: {"creates": [TableRequest([1], 1, resume_table_id=table)]},
    "resume with packed tokens": lambda table: {
        "creates": [TableRequest((), 1, packed=b"1234", resume_table_id=table)]
    },
    "resume twice": lambda table: {"creates": [TableRequest((), 1, resume_table_id=table)] * 2},
    "resume an unknown one": lambda table: {"creates": [TableRequest((), 1, resume_table_id=table + 99)]},
    "resume what is released": lambda table: {
        "creates": [TableRequest((), 1, resume_table_id=table)],
        "releases": [table],
    },
    "arrival is no number": lambda table: {"creates": [TableRequest([1], 1, arrival=float("nan"))]},
    "arrival is infinite": lambda table: {"creates": [TableRequest([1], 1, arrival=float("inf"))]},
    "arrival is negative": lambda table: {"creates": [TableRequest([1], 1, arrival=-1.0)]},
}


@pytest.mark.parametrize("words", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_cannot_be_done_to_a_suspended_table_breaks_the_protocol(pool: Pool, worker: Worker, words: Words) -> None:
    table = worker.table(PROMPT, 4)
    worker.step(reserves=[ReserveRequest(0, 1)])
    worker.suspend(table, 4)
    before = pool.usage()
    with pytest.raises(PagepoolError) as caught:
        worker.step(**words(table))
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert (pool.usage(), list(pool.table(table, 1.0).token_ids)) == (before, [*PROMPT, 4])
    pool.check()


def test_a_table_that_runs_or_is_anothers_cannot_be_resumed(pool: Pool, worker: Worker) -> None:
    running, other = worker.table([1], 1), Worker(pool, "two")
    suspended = other.table([2], 1)
    other.suspend(suspended)
    for table in (running, suspended):
        with pytest.raises(PagepoolError, match=rf"table {table} is (resumed, but not suspended|not held)"):
            pool.step(worker.lease, Step(3, creates=[TableRequest((), 1, resume_table_id=table)]), 1.0)
    with pytest.raises(PagepoolError, match="not held"):
        pool.step(worker.lease, Step(3, operations=[Suspend(suspended, ())]), 1.0)
    pool.check()


def test_token_ids_are_checked_and_what_is_kept_is_limited(
    pool: Pool, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [worker.table([one] * B, 1) for one in (1, 2, 3)]
    for wrong in (-1, 1 << 32):
        with pytest.raises(PagepoolError, match="unsigned 32-bit"):
            pool.step(worker.lease, Step(7, operations=[Suspend(tables[0], [wrong])]), 1.0)
    monkeypatch.setattr(draft, "MAX_KEPT_BYTES", 2 * 4 * (B + 1))
    for table in tables[:2]:
        worker.suspend(table, 5)
    beyond = [Suspend(tables[2], ())]
    with pytest.raises(PagepoolError, match="keep 26 tokens, but may keep 18; release") as caught:
        pool.step(worker.lease, Step(9, operations=beyond), 1.0)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    worker.step(operations=[Release(tables[0]), *beyond])
    assert pool.table(tables[2], 1.0).suspended
