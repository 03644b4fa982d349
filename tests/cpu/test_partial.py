"""The last, partly matching block: which one is copied, and that it stays until it has been."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memd.core.beginnings import MAX_LOOKED_AT, MIN_RUN
from memd.core.errors import InvariantError
from memd.core.operations import Release, ReserveRequest, Suspend, Truncate
from memd.core.values import BlockState, Commit, Grant, Step, TableRequest
from tests.cpu.prefix_rig import B, Worker, a_pool

A = [1] * B
LINE = [10, 11, 12, 13, 14, 15, 16, 17]
"""A block of different tokens."""


def ask(worker: Worker, tokens: Sequence[int], num_blocks: int, salt: bytes = b"", *, no_match: bool = False) -> Grant:
    request = TableRequest(tokens, num_blocks, salt, no_match=no_match, partial=True)
    grants = worker.step(creates=[request])
    worker.pool.check()
    return grants[0]


def entry_of(worker: Worker, block_id: int) -> int:
    return worker.pool.block(block_id, 0.0).entry


def holders(worker: Worker, block_id: int) -> list[tuple[int, int]]:
    return [(one.lease_id, one.table_id) for one in worker.pool.block(block_id, 0.0).holders]


@pytest.fixture
def worker() -> Worker:
    return Worker(a_pool(20))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([*A, *LINE[:5], 99, 99], B + 5),
        ([*A, *LINE[:4], 99], B + 4),
        ([*A, *LINE[:3], 99], B),  # too few to copy
        ([*A, *LINE], 2 * B - 1),  # all of them, but never the last token
        ([*A, *LINE[:5]], B + 4),
        ([*A, *LINE[:4]], B),
        ([*A, 99, *LINE], B),
        ([*A[:6], 99], 6),  # of a first block
        ([*A[1:], *LINE], 7),
        (LINE, 0),  # only after its own prefix
        ([], 0),
    ],
)
def test_a_block_that_matches_in_part_is_granted_as_a_copy(worker: Worker, tokens: list[int], found: int) -> None:
    ids = worker.serve(A + LINE, release=True).blocks.block_ids
    granted = ask(worker, tokens, 3)
    assert granted.cached_tokens == found
    full, part = divmod(found, B)
    assert list(granted.blocks.block_ids[:full]) == list(ids[:full])
    assert granted.copy_source == (entry_of(worker, ids[full]) if part else None)
    table = worker.pool.table(granted.table_id, 0.0)
    assert (table.num_tokens, list(table.token_ids)) == (found, tokens[:found])
    worker.step(commits=[Commit(granted.table_id, tokens[found:])])
    assert list(worker.pool.table(granted.table_id, 0.0).token_ids) == tokens
    worker.pool.check()


def test_nothing_is_copied_unasked_or_from_another_salt_or_without_a_block_for_it(worker: Worker) -> None:
    worker.serve(A + LINE, b"x", release=True)
    prompt = [*A, *LINE[:6], 99]
    assert worker.create(prompt, 3, b"x").copy_source is None
    assert ask(worker, prompt, 3, b"y").copy_source is None
    assert ask(worker, [*A[:6], 99], 3, b"y").copy_source is None
    assert ask(worker, prompt, 3, b"x", no_match=True).copy_source is None
    assert ask(worker, prompt, 1, b"x").copy_source is None
    assert ask(worker, prompt, 2, b"x").cached_tokens == B + 6


def test_the_block_with_most_in_common_is_taken_and_the_newest_of_equals(worker: Worker) -> None:
    served = {
        length: worker.serve([*A, *LINE[:length], *[length + 50] * (B - length)], release=True).blocks.block_ids[1]
        for length in (4, 6, 5)
    }
    assert ask(worker, [*A, *LINE, 99], 3).copy_source == entry_of(worker, served[6])
    again = worker.serve([*A, *LINE[:6], 70, 70], release=True).blocks.block_ids[1]
    assert ask(worker, [*A, *LINE, 99], 3).copy_source == entry_of(worker, again)


def test_what_a_copy_completes_is_sealed_and_found_like_any_other_block(worker: Worker) -> None:
    worker.serve(A + LINE, release=True)
    other = [*A, *LINE[:5], 90, 91, 92]
    first = worker.serve(other)
    second = ask(worker, [*other, *LINE[:5], 99], 3)
    assert second.cached_tokens == 2 * B
    assert list(second.blocks.block_ids[:2]) == list(first.blocks.block_ids)


def test_a_source_is_held_until_the_first_commit_and_may_go_then(worker: Worker) -> None:
    source = worker.serve(A + LINE, release=True).blocks.block_ids[1]
    granted = ask(worker, [*A, *LINE[:5], 99], 3)
    assert holders(worker, source) == [(worker.lease, 0)]
    assert worker.pool.usage().cached == 0  # so nobody can be given it
    worker.step(creates=[TableRequest([], 1)])
    worker.pool.check()
    assert holders(worker, source) == [(worker.lease, 0)]
    worker.step(commits=[Commit(granted.table_id, [99])])
    assert worker.pool.block(source, 0.0).state is BlockState.CACHED
    worker.step(commits=[Commit(granted.table_id, [98])])
    worker.pool.check()


@pytest.mark.parametrize("commit", [False, True])
def test_a_release_lets_the_source_go_once(worker: Worker, commit: bool) -> None:
    source = worker.serve(A + LINE, release=True).blocks.block_ids[1]
    granted = ask(worker, [*A, *LINE[:5], 99], 3)
    commits = [Commit(granted.table_id, [99])] if commit else []
    worker.step(commits=commits, releases=[granted.table_id])
    assert worker.pool.block(source, 0.0).state is BlockState.CACHED
    worker.pool.check()


def test_two_copies_of_one_block_hold_it_twice(worker: Worker) -> None:
    source = worker.serve(A + LINE, release=True).blocks.block_ids[1]
    tables = [ask(worker, [*A, *LINE[:5], last], 3).table_id for last in (98, 99)]
    assert worker.pool.block(source, 0.0).ref_count == 2
    for left, table in zip((1, 0), tables, strict=True):
        worker.step(releases=[table])
        assert worker.pool.block(source, 0.0).ref_count == left


def test_a_lost_worker_keeps_the_source_until_its_process_is_gone(worker: Worker) -> None:
    other = Worker(worker.pool, "another lock")
    source = worker.serve(A + LINE, release=True).blocks.block_ids[1]
    ask(other, [*A, *LINE[:5], 99], 3)
    worker.pool.fail_lease(other.lease, 1.0)
    worker.pool.check()
    assert holders(worker, source) == [(other.lease, 0)]
    worker.pool.process_gone(other.lease, 0.0)
    worker.pool.check()
    assert worker.pool.block(source, 0.0).state is BlockState.CACHED


def test_an_answer_repeated_after_a_reclaim_names_the_source_that_is_still_held(worker: Worker) -> None:
    source = worker.serve(A + LINE, release=True).blocks.block_ids[1]
    step = Step(worker.steps + 1, creates=[TableRequest([*A, *LINE[:5], 99], 3, partial=True)])
    (first,) = worker.pool.step(worker.lease, step, 0.0).grants
    worker.pool.stream_broken(worker.lease)
    worker.pool.attach("worker", "lock", 1e6, 0.0, (worker.pool.epoch, worker.lease))
    (again,) = worker.pool.step(worker.lease, step, 0.0).grants
    assert again == first
    assert again.copy_source == entry_of(worker, source)
    assert holders(worker, source) == [(worker.lease, 0)]
    worker.pool.check()


def test_truncation_into_the_copied_part_drops_what_follows(worker: Worker) -> None:
    worker.serve(A + LINE, release=True)
    granted = ask(worker, [*A, *LINE[:6], 99], 3)
    worker.step(operations=[Truncate(granted.table_id, B + 4)])
    worker.pool.check()
    view = worker.pool.table(granted.table_id, 0.0)
    assert (list(view.token_ids), view.cached_tokens) == ([*A, *LINE[:4]], B)


def test_a_source_gives_way_where_its_room_is_needed() -> None:
    worker = Worker(a_pool(4))
    worker.serve(A + LINE, release=True)
    worker.step(reserves=[ReserveRequest(1, 0)])
    prompt = [*A, *LINE[:6], 99]
    assert ask(worker, prompt, 3).cached_tokens == B  # LINE goes for the second fresh block


def test_only_so_many_blocks_are_compared() -> None:
    worker = Worker(a_pool(MAX_LOOKED_AT + 8))
    best = worker.serve([*LINE[:7], 90], release=True).blocks.block_ids[0]
    for last in range(MAX_LOOKED_AT - 1):
        worker.serve([*LINE[:5], 200 + last, 1, 1], release=True)
    assert ask(worker, [*LINE, 99], 2).copy_source == entry_of(worker, best)
    worker.serve([*LINE[:5], 300, 1, 1], release=True)
    assert ask(worker, [*LINE, 99], 2).cached_tokens == 5


def test_blocks_that_are_evicted_are_found_no_more() -> None:
    worker = Worker(a_pool(4))
    worker.serve(A + LINE, release=True)
    table = worker.create([], 3).table_id  # takes the block of LINE
    worker.step(releases=[table])
    worker.pool.check()
    assert ask(worker, [*A, *LINE[:6], 99], 2).cached_tokens == B


def test_check_finds_a_block_under_the_first_tokens_of_another(worker: Worker) -> None:
    ids = worker.serve(A + LINE, release=True).blocks.block_ids
    store = worker.pool._state.store
    assert store is not None
    frame = store.blocks.frame_of[ids[1]]
    beginnings, first = store.index.beginnings, frame * B * 4
    home = beginnings._chain_of(frame)
    beginnings.remove(frame)
    with pytest.raises(InvariantError, match="first tokens"):
        worker.pool.check()
    while beginnings._chain_of(frame) == home:  # there are few chains, and each run of Python hashes anew
        store.blocks.tokens[first] = (store.blocks.tokens[first] + 1) % 256
    beginnings.add(frame)
    store.blocks.tokens[first] = LINE[0]
    with pytest.raises(InvariantError, match="not its first"):
        worker.pool.check()


def test_the_least_run_is_what_the_proto_says() -> None:
    assert MIN_RUN == 4
    assert MAX_LOOKED_AT == 64


def test_a_suspended_table_lets_the_source_go_and_may_copy_anew_when_it_is_resumed(worker: Worker) -> None:
    source = worker.serve(A + LINE, release=True).blocks.block_ids[1]
    granted = ask(worker, [*A, *LINE[:5], 99], 3)
    worker.step(operations=[Suspend(granted.table_id, [99, 98])])
    worker.pool.check()
    assert worker.pool.block(source, 0.0).state is BlockState.CACHED
    (again,) = worker.step(creates=[TableRequest([], 3, resume_table_id=granted.table_id, partial=True)])
    worker.pool.check()
    assert (again.cached_tokens, again.copy_source) == (B + 5, entry_of(worker, source))
    worker.step(operations=[Suspend(granted.table_id, []), Release(granted.table_id)])
    worker.pool.check()
    assert worker.pool.usage().held == 0
