"""What the prefix index finds, and what it must not find."""

from __future__ import annotations

import pytest

from memd.core import prefix
from memd.core.values import Commit, Step, TableRequest
from tests.cpu.prefix_rig import B, Worker, a_pool

A1, A2, A3 = [1] * B, [2] * B, [3] * B


@pytest.fixture
def worker() -> Worker:
    return Worker(a_pool())


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], 0),
        (A1, 0),
        ([*A1, 9], B),
        (A1 + A2, B),
        ([*A1, *A2, 9], 2 * B),
        (A1 + A2 + A3, 2 * B),
        (A1 + A3 + A2, B),
        (A2 + A1, 0),
        (A1[:-1], 0),
    ],
)
def test_the_longest_sealed_prefix_is_matched_but_never_the_last_token(
    worker: Worker, tokens: list[int], found: int
) -> None:
    first = worker.serve(A1 + A2)
    granted = worker.create(tokens, 3)
    assert granted.cached_tokens == found
    assert list(granted.blocks.block_ids[: found // B]) == list(first.blocks.block_ids[: found // B])
    assert len(granted.blocks.block_ids) == 3
    worker.pool.check()


def test_a_block_can_be_matched_only_once_it_is_full(worker: Worker) -> None:
    table = worker.create(A1, 1).table_id
    worker.step(commits=[Commit(table, A1[:-1])])
    assert worker.create([*A1, 9], 2).cached_tokens == 0
    worker.step(commits=[Commit(table, A1[-1:])])
    assert worker.create([*A1, 9], 2).cached_tokens == B


def test_matched_blocks_are_kept_even_if_fewer_were_asked_for(worker: Worker) -> None:
    worker.serve(A1 + A2)
    granted = worker.create([*A1, *A2, 9], 0)
    assert (granted.cached_tokens, len(granted.blocks.block_ids)) == (2 * B, 2)


def test_another_salt_or_no_match_finds_nothing(worker: Worker) -> None:
    worker.serve(A1, b"x")
    assert worker.create([*A1, 9], 2, b"y").cached_tokens == 0
    assert worker.create([*A1, 9], 2).cached_tokens == 0
    assert worker.create([*A1, 9], 2, b"x", no_match=True).cached_tokens == 0
    assert worker.create([*A1, 9], 0, b"x").cached_tokens == B


def test_digests_differ_by_model_salt_and_what_came_before() -> None:
    digests = set()
    for model in (b"w", b"v"):
        for salt in (b"", b"x"):
            worker = Worker(a_pool(model=model))
            ids = worker.serve(A1 + A1, salt).blocks.block_ids
            digests |= {worker.pool.block(one, 0.0).digest for one in ids}
    assert len(digests) == 8
    assert {len(digest) for digest in digests} == {32}


class Colliding:
    """SHA-256, if all messages had one digest."""

    def __init__(self, _message: bytes) -> None: ...

    def digest(self) -> bytes:
        return b"same" * 8


def test_a_collision_of_digests_gives_no_wrong_block(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "sha256", Colliding)
    worker.serve(A1, release=True)
    assert worker.create([*A2, 9], 2).cached_tokens == 0, "other tokens"
    assert worker.create([*A1, 9], 2, b"salt").cached_tokens == 0, "another salt"
    assert worker.create([*A1, *A1, 9], 3).cached_tokens == B, "the same tokens after another block"


def test_of_two_colliding_blocks_the_newer_can_be_matched(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "sha256", Colliding)
    worker.serve(A1, release=True)
    worker.serve(A2)
    assert worker.create([*A2, 9], 2).cached_tokens == B
    assert (worker.pool.counters.evicted_blocks, worker.pool.usage().cached) == (1, 0)


def test_of_two_equal_blocks_the_first_stays_indexed_and_the_other_is_freed(worker: Worker) -> None:
    first = worker.serve(A1)
    second = worker.serve(A1, no_match=True)
    digests = {worker.pool.block(one.blocks.block_ids[0], 0.0).digest for one in (first, second)}
    assert len(digests) == 1
    assert worker.create([*A1, 9], 0).blocks.block_ids[0] == first.blocks.block_ids[0]
    worker.step(releases=[second.table_id])
    assert (worker.pool.usage().cached, worker.pool.counters.freed_blocks) == (0, 1)
    worker.pool.check()


def test_when_the_first_of_two_equal_blocks_is_evicted_the_other_takes_its_place_on_release() -> None:
    worker = Worker(a_pool(3))
    worker.serve(A1, release=True)
    second = worker.serve(A1, no_match=True)
    filler = worker.create([9], 2)  # evicts the first
    assert worker.pool.counters.evicted_blocks == 1
    worker.step(releases=[second.table_id, filler.table_id])
    assert worker.create([*A1, 9], 0).blocks.block_ids[0] == second.blocks.block_ids[0]
    worker.pool.check()


def test_what_follows_an_equal_block_follows_both(worker: Worker) -> None:
    """Two workers compute one prompt at the same time: one's first block and the other's second are both found."""
    other = Worker(worker.pool, "other")
    one = worker.create(A1 + A2, 2).table_id
    two = other.create(A1 + A2, 2)
    worker.step(commits=[Commit(one, A1)])
    other.step(commits=[Commit(two.table_id, A1 + A2)])
    worker.step(commits=[Commit(one, A2)])
    granted = worker.create([*A1, *A2, 9], 0)
    assert granted.cached_tokens == 2 * B
    assert granted.blocks.block_ids[1] == two.blocks.block_ids[1]
    worker.pool.check()


def test_a_prefix_is_evicted_from_its_end_and_the_oldest_one_first() -> None:
    worker = Worker(a_pool(5))
    worker.serve(A1 + A2, release=True)
    worker.serve(A3, release=True)
    held = worker.create([9], 3).table_id  # two were free: one is evicted
    assert worker.create([*A1, *A2, 9], 0).cached_tokens == B
    worker.step(releases=[held])
    assert worker.create([*A3, 9], 0).cached_tokens == B


def test_what_was_just_matched_is_not_evicted_to_make_room() -> None:
    worker = Worker(a_pool(3))
    worker.serve(A1 + A2, release=True)
    refused = worker.pool.step(worker.lease, Step(4, creates=[TableRequest([*A1, *A2, 9], 4)]), 0.0).refusals
    assert len(refused) == 1
    granted = worker.pool.step(worker.lease, Step(5, creates=[TableRequest([*A1, *A3], 3)]), 0.0).grants[0]
    assert (granted.cached_tokens, worker.pool.counters.evicted_blocks) == (B, 1)
    worker.pool.check()


def test_hits_are_counted_in_tokens(worker: Worker) -> None:
    worker.serve(A1)
    worker.create([*A1, 9], 2)
    assert (worker.pool.counters.prefix_query_tokens, worker.pool.counters.prefix_hit_tokens) == (2 * B + 1, B)
