"""Pins by example: several over one head, each with its own time, priority and end; and queues that leave nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from memd.core import pins
from memd.core.allocator import Links
from memd.core.cached import CachedFrames
from memd.core.errors import InvariantError
from memd.core.eviction import Retention
from memd.core.geometry import Geometry
from memd.core.kept import PinTree
from memd.core.pool import Pool
from memd.core.units import SplitFrames
from memd.core.values import Commit, PinRequest, Step, TableRequest, UnpinnedPrefix
from pagekernels.layout import Format, LayerShape
from pagepool.errors import PagepoolError, Reason

B = 8
GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.BF16, False, 1, b"w" * 32, "model")
SYSTEM = [1] * 2 * B
ANN, BOB = [*SYSTEM, *[2] * B], [*SYSTEM, *[3] * B]


def make_pool(num_blocks: int) -> Pool:
    pool = Pool(7, B, 1 << 30, num_blocks)
    pool.declare(GEOMETRY)
    return pool


@pytest.fixture
def pool() -> Pool:
    made = make_pool(16)
    for tokens in (ANN, BOB):
        serve(made, tokens)
    return made


def serve(pool: Pool, tokens: list[int]) -> None:
    """As a worker does it: from request to release."""
    worker = pool.attach("worker", "lock", 100.0, 0.0).lease.lease_id
    (grant,) = pool.step(worker, Step(1, creates=[TableRequest(tokens, len(tokens) // B)]), 0.0).grants
    pool.step(worker, Step(2, [Commit(grant.table_id, tokens[grant.cached_tokens :])], [grant.table_id]), 0.0)
    pool.detach(worker, 0.0)


def kept(pool: Pool, tokens: list[int], now: float) -> list[tuple[int, bool, float] | None]:
    """How the blocks of a prefix are kept: priority, pinned, for how long."""
    lease = pool.create_lease("reader", 3600.0, now).lease_id
    table = pool.create_table(lease, TableRequest([*tokens, 0], 0), now)
    views = [pool.block(one, now) for one in table.blocks.block_ids]
    pool.release_lease(lease, now)
    pool.check()
    return [(one.priority, one.pinned, one.kept_s) if one.kept_s else None for one in views]


def keep(pool: Pool, tokens: list[int], ttl_s: float, priority: int = 0, *, pinned: bool = False) -> None:
    pool.prefixes.pin(PinRequest(tokens, ttl_s, b"", priority, pinned), 0.0)


def test_a_later_pin_of_a_shared_head_takes_nothing_from_an_earlier_one(pool: Pool) -> None:
    keep(pool, ANN, 60.0, 5)
    keep(pool, SYSTEM, 10.0, 1)
    keep(pool, BOB, 30.0, 3, pinned=True)
    assert kept(pool, ANN, 0.0) == [(5, True, 60.0), (5, True, 60.0), (5, False, 60.0)]
    assert kept(pool, BOB, 0.0) == [(5, True, 60.0), (5, True, 60.0), (3, True, 30.0)]
    pool.tick(10.0)
    assert kept(pool, ANN, 10.0) == [(5, True, 50.0), (5, True, 50.0), (5, False, 50.0)]
    pool.tick(30.0)
    assert kept(pool, ANN, 30.0) == [(5, False, 30.0)] * 3
    assert kept(pool, BOB, 30.0) == [(5, False, 30.0), (5, False, 30.0), None]
    pool.tick(60.0)
    assert kept(pool, ANN, 60.0) == [None] * 3


def test_the_end_of_one_pin_leaves_what_the_others_said(pool: Pool) -> None:
    keep(pool, SYSTEM, 20.0, 1)
    keep(pool, ANN, 60.0, 5)
    keep(pool, BOB, 30.0, 3)
    assert pool.prefixes.unpin(ANN, b"", 0.0) == UnpinnedPrefix(3 * B, 3, was_kept=True)
    assert kept(pool, ANN, 0.0) == [(3, False, 30.0), (3, False, 30.0), None]
    assert pool.prefixes.unpin(ANN, b"", 0.0) == UnpinnedPrefix(3 * B, 3, was_kept=False)
    assert pool.prefixes.unpin([*ANN[:B], 9], b"", 0.0) == UnpinnedPrefix(B, 1, was_kept=False)
    assert kept(pool, BOB, 0.0) == [(3, False, 30.0)] * 3, "a repeated or shorter unpin ends nobody else's pin"
    assert pool.prefixes.unpin(BOB, b"", 0.0).was_kept
    assert kept(pool, BOB, 0.0) == [(1, False, 20.0), (1, False, 20.0), None]


def test_the_same_token_ids_replace_what_was_said_of_them(pool: Pool) -> None:
    keep(pool, ANN, 60.0, 5, pinned=True)
    keep(pool, [*ANN, 7, 7], 10.0, -1)  # the same whole blocks
    assert kept(pool, ANN, 0.0) == [(-1, False, 10.0)] * 3
    keep(pool, ANN, 90.0)
    for now in (10.0, 60.0):
        pool.tick(now)
        assert kept(pool, ANN, now) == [(0, False, 90.0 - now)] * 3, "the end of what was replaced means nothing"


def test_a_prefix_that_is_kept_whole_is_never_found_without_its_head(pool: Pool) -> None:
    """The head is pinned later, for less time and with less priority; then the pool fills up."""
    keep(pool, ANN, 60.0, 5)
    keep(pool, SYSTEM, 1.0, -100)
    keep(pool, BOB, 2.0, 1)
    pool.tick(2.0)
    client = pool.create_lease("client", 3600.0, 2.0).lease_id
    for free in range(13, 16):
        pool.allocate_blocks(client, free - (pool.num_blocks - pool.usage().available), 2.0)
        found = len(kept(pool, ANN, 2.0))
        assert found == 16 - free, "eaten from its end"


def test_a_pin_of_what_grew_since_covers_the_new_blocks_too(pool: Pool) -> None:
    tokens = [*ANN, *[4] * B]
    keep(pool, tokens, 60.0, 2)
    assert kept(pool, ANN, 0.0) == [(2, False, 60.0)] * 3
    serve(pool, tokens)
    keep(pool, tokens, 60.0, 3)
    assert kept(pool, tokens, 0.0) == [(3, False, 60.0)] * 4
    assert pool.prefixes.unpin(tokens, b"", 0.0).was_kept
    assert kept(pool, tokens, 0.0) == [None] * 4


def test_a_pin_of_what_was_evicted_is_ended_without_an_error_and_one_that_never_was_is_none() -> None:
    pool = make_pool(3)
    serve(pool, ANN)
    keep(pool, ANN, 60.0, -1)
    client = pool.create_lease("client", 3600.0, 0.0).lease_id
    pool.free_blocks(client, pool.allocate_blocks(client, 3, 0.0).block_ids, 0.0)
    version = pool.version
    with pytest.raises(PagepoolError) as caught:
        pool.prefixes.unpin(BOB, b"", 0.0)
    assert (caught.value.reason, pool.version) == (Reason.PREFIX_NOT_FOUND, version)
    assert pool.prefixes.unpin(ANN, b"", 0.0) == UnpinnedPrefix(0, 0, was_kept=True)
    with pytest.raises(PagepoolError):
        pool.prefixes.unpin(ANN, b"", 0.0)
    pool.check()


def test_a_salt_is_part_of_what_is_pinned(pool: Pool) -> None:
    keep(pool, ANN, 60.0)
    with pytest.raises(PagepoolError) as caught:
        pool.prefixes.unpin(ANN, b"other", 0.0)
    assert caught.value.reason is Reason.PREFIX_NOT_FOUND
    assert kept(pool, ANN, 0.0) == [(0, False, 60.0)] * 3


def test_so_many_prefixes_are_kept_and_no_more(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 2)
    keep(pool, ANN, 60.0)
    keep(pool, BOB, 60.0)
    with pytest.raises(PagepoolError) as caught:
        keep(pool, SYSTEM, 60.0)
    assert (caught.value.reason, caught.value.metadata) == (Reason.PIN_LIMIT, {"pins": "2", "limit": "2"})
    keep(pool, BOB, 70.0)
    pool.prefixes.unpin(ANN, b"", 0.0)
    keep(pool, SYSTEM, 60.0)
    assert kept(pool, BOB, 0.0) == [(0, False, 70.0)] * 3


def test_pins_of_prefixes_that_are_long_gone_take_no_more_than_the_pool_has() -> None:
    """One prefix after the other fills the pool, and each is kept for a day, but after all others."""
    pool = make_pool(16)
    tree = pool.prefixes._tree
    for number in range(40):
        prompt = [number] * 12 * B
        serve(pool, prompt)
        pool.prefixes.pin(PinRequest(prompt, 86400.0, b"", -1), 0.0)
        assert tree.num_blocks <= 2 * 16
        assert len(tree) <= 4
        pool.check()
    assert pool.prefixes.unpin([39] * 12 * B, b"", 0.0) == UnpinnedPrefix(12 * B, 12, was_kept=True)
    assert pool.prefixes.unpin([38] * 12 * B, b"", 0.0) == UnpinnedPrefix(4 * B, 4, was_kept=True)
    with pytest.raises(PagepoolError) as caught:
        pool.prefixes.unpin([1] * 12 * B, b"", 0.0)
    assert caught.value.reason is Reason.PREFIX_NOT_FOUND
    pool.check()


def test_what_is_left_of_a_prefix_is_kept_as_before_when_evicted_blocks_are_forgotten() -> None:
    """Of 1 - 2 - 3 - 4 and 1 - 2 - 5, one by one: pins move to the last block before, holes close, the rest ends."""
    tree = PinTree()
    tree.add(b"long", [1, 2, 3, 4], Retention(5, False, 10.0))
    tree.add(b"short", [1, 2, 3], Retention(1, True, 60.0))
    tree.add(b"other", [1, 2, 5], Retention(-3, False, 90.0))
    tree.settle()
    everything = Retention(5, True, 90.0)
    steps: list[tuple[set[int], dict[int, Retention]]] = [
        ({1, 2, 3, 5}, {1: everything, 2: everything, 3: Retention(5, True, 60.0), 5: Retention(-3, False, 90.0)}),
        ({1, 3, 5}, {1: everything, 3: Retention(5, True, 60.0), 5: Retention(-3, False, 90.0)}),
        ({3, 5}, {3: Retention(5, True, 60.0), 5: Retention(-3, False, 90.0)}),
        ({5}, {5: Retention(-3, False, 90.0)}),
    ]
    for there, expected in steps:
        tree.forget_evicted(there)
        assert tree.num_blocks == len(there)
        tree.check(expected.items())
        assert tree.settle() == []
    assert [tree.get(key) for key in (b"long", b"short")] == [None, None]
    tree.drop(b"other")
    assert tree.settle() == [(5, None)]
    assert (len(tree), tree.num_blocks) == (0, 0)


def test_a_forgotten_hole_in_a_prefix_is_filled_by_what_is_computed_anew() -> None:
    tree = PinTree()
    tree.add(b"all", [1, 2, 3], Retention(2, False, 10.0))
    tree.settle()
    tree.forget_evicted({1, 3})
    tree.add(b"again", [1, 12, 3], Retention(1, False, 20.0))
    both = Retention(2, False, 20.0)
    assert tree.settle() == [(3, both), (12, both), (1, both)]
    tree.drop(b"again")
    assert tree.settle() == [(block, Retention(2, False, 10.0)) for block in (3, 12, 1)]


def test_many_pins_of_one_head_end_together_in_the_time_of_their_blocks() -> None:
    tree, head = PinTree(), range(1, 401)

    def seconds(count: int) -> float:
        keys = [number.to_bytes(4, "big") for number in range(count)]
        for number, key in enumerate(keys):
            tree.add(key, [*head, 1000 + number], Retention(0, False, 1.0))
        assert len(tree.settle()) == 400 + count
        begin = time.process_time()
        for key in keys:
            tree.drop(key)
        assert [retention for _, retention in tree.settle()] == [None] * (400 + count)
        return time.process_time() - begin

    most = min(seconds(4000) for _ in range(3))  # one of them may meet a collection of garbage
    assert most < 40 * max(seconds(400), 1e-4), "not that of their blocks times their number"
    assert len(tree) == 0
    tree.check([])
    with pytest.raises(InvariantError, match="block 5 is kept"):
        tree.check([(5, Retention(0, False, 1.0))])


# -- queues


def fill(frames: CachedFrames, priorities: range) -> None:
    for frame, priority in enumerate(priorities):
        frames.keep(frame, Retention(priority, False, 1.0))
        frames.append(frame)


def empty_by_pop(frames: CachedFrames, count: int) -> None:
    assert [frames.pop() for _ in range(count)] == list(range(count))
    for frame in range(count):
        frames.keep(frame, None)


def empty_by_removal(frames: CachedFrames, count: int) -> None:
    for frame in range(count):
        frames.remove(frame)
        frames.keep(frame, None)


@pytest.mark.parametrize("empty", [empty_by_pop, empty_by_removal])
def test_a_priority_that_no_block_has_leaves_nothing_behind(empty: Callable[[CachedFrames, int], None]) -> None:
    links = Links(201)
    frames = CachedFrames(links, SplitFrames(201, 2, 201), 201)
    sizes = set()
    for shift in range(5):
        fill(frames, range(-100 + shift, 101))
        assert len(frames.orders()[0].queues()) == 202 - shift, "one for each priority, and one for the pinned"
        empty(frames, 201 - shift)
        assert [(priority, list(queue)) for priority, queue in frames.orders()[0].queues()] == [(0, []), (None, [])]
        sizes.add(len(links.after))
    assert len(sizes) == 1
