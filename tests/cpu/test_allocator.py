"""Free frames and the queues they wait in."""

from __future__ import annotations

import random

import pytest

from memd.core.allocator import Allocator, FrameQueue, Links
from memd.core.block import MANY_FRAMES, span_of
from memd.core.errors import InvariantError


def test_unused_frames_come_first_by_rising_index_then_the_one_returned_longest_ago() -> None:
    allocator = Allocator(4, Links(4))
    assert allocator.take(3) == [0, 1, 2]
    for frame in (1, 0):
        allocator.give_back(frame)
    assert list(allocator.free_frames()) == [3, 1, 0]
    assert allocator.take(3) == [3, 1, 0]
    assert allocator.num_free == 0


def test_a_frame_given_back_twice_is_fatal() -> None:
    allocator = Allocator(2, Links(2))
    allocator.take(2)
    allocator.give_back(1)
    with pytest.raises(InvariantError, match="frame 1"):
        allocator.give_back(1)


def test_a_frame_never_taken_cannot_be_given_back() -> None:
    allocator = Allocator(2, Links(2))
    allocator.take(1)
    with pytest.raises(InvariantError, match="frame 1 is given back, but was never taken"):
        allocator.give_back(1)


def test_taking_more_than_there_is_is_fatal() -> None:
    allocator = Allocator(2, Links(2))
    with pytest.raises(InvariantError, match="empty queue"):
        allocator.take(3)


def test_a_queue_keeps_order_when_frames_leave_from_its_middle() -> None:
    queue = FrameQueue(Links(5))
    for frame in (3, 1, 4, 0):
        queue.append(frame)
    queue.remove(1)
    queue.remove(3)
    assert (list(queue), len(queue)) == ([4, 0], 2)
    assert [queue.pop(), queue.pop()] == [4, 0]
    assert (list(queue), len(queue)) == ([], 0)


def test_a_frame_is_in_one_queue_at_a_time() -> None:
    links = Links(3)
    free, cached = FrameQueue(links), FrameQueue(links)
    free.append(2)
    with pytest.raises(InvariantError, match="while it is in one"):
        cached.append(2)
    cached.append(free.pop())
    assert (list(free), list(cached)) == ([], [2])


def test_a_frame_in_no_queue_cannot_be_removed() -> None:
    with pytest.raises(InvariantError, match="while it is in none"):
        FrameQueue(Links(1)).remove(0)


@pytest.mark.parametrize("seed", range(20))
def test_removing_many_at_once_is_removing_each(seed: int) -> None:
    draw = random.Random(seed)
    links, count = Links(60), draw.randrange(61)
    many, each = FrameQueue(links), FrameQueue(Links(60))
    order = draw.choice([draw.sample(range(60), count), list(range(count))[::-1]])
    for queue in (many, each):
        for frame in order:
            queue.append(frame)
    begin, end = sorted(draw.choices(range(count + 1), k=2))
    run = order[begin:end][:: draw.choice([1, -1])]  # in a row, forwards or from its end
    gone = draw.choice(
        [run, run + [f for f in order if f not in run][::2], draw.sample(order, draw.randrange(count + 1))]
    )
    many.remove_all(gone)
    for frame in gone:
        each.remove(frame)
    assert (list(many), len(many)) == (list(each), len(each))
    for frame in gone:  # they are in no queue now
        many.append(frame)
    assert list(many) == [*each, *gone]
    assert [many.pop() for _ in range(len(many))] == [*each, *gone]


@pytest.mark.parametrize("seed", range(10))
def test_removing_frames_that_stand_in_a_row_at_once_is_removing_each(seed: int) -> None:
    """As a prefix leaves them: the last one first."""
    draw = random.Random(seed)
    many, each = FrameQueue(Links(60)), FrameQueue(Links(60))
    for queue in (many, each):
        for frame in reversed(range(60)):
            queue.append(frame)
    first = draw.choice([0, draw.randrange(30)])
    gone = list(range(first, draw.choice([60, first + MANY_FRAMES + draw.randrange(10)])))
    assert span_of(gone) is not None
    many.remove_all(gone)
    for frame in gone:
        each.remove(frame)
    assert (list(many), len(many)) == (list(each), len(each))
    for frame in gone:
        many.append(frame)
    assert [many.pop() for _ in range(len(many))] == [*each, *gone]


def test_a_frame_in_no_queue_cannot_be_removed_among_others() -> None:
    queue = FrameQueue(Links(3))
    queue.append(0)
    with pytest.raises(InvariantError, match="frame 2"):
        queue.remove_all([0, 2])
