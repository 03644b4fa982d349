"""Who yields when blocks are short, and who hears of it, by example."""

from __future__ import annotations

import dataclasses

from memd.core.operations import Fork, ReserveRequest, Suspend, Take
from memd.core.pool import Pool
from memd.core.values import Commit, PinRequest, Step, TableRequest
from memd.core.victims import MAX_YIELDS, YIELD_S
from tests.cpu.core_worker import B, Worker, grows, named, one, pool, starts, table, two

__all__ = ["one", "pool", "two"]


def test_the_youngest_yields_whichever_worker_holds_it_and_is_told_once(pool: Pool, one: Worker, two: Worker) -> None:
    old, middle, young = table(one, 1.0, 4), table(one, 2.0, 4), table(two, 3.0, 4)
    assert not grows(one, old, 2)
    assert pool.victims.take_news() == [(two.lease, young)]
    assert not grows(one, old, 2)
    assert pool.victims.take_news() == []
    two.suspend(young)
    assert pool.waiting.take_news() == [(one.lease, 4)]
    (grant,) = grows(one, old, 2)
    one.step(operations=[Take(old, grant.blocks.block_ids)])
    assert not pool.table(middle, 1.0).suspended


def test_as_many_yield_as_are_needed_the_least_urgent_first(pool: Pool, one: Worker, two: Worker) -> None:
    old = table(one, 1.0, 3)
    rest = [table(two, 2.0 + index, 3) for index in range(3)]
    grows(one, old, 1)
    assert named(pool) == {rest[2]}
    grows(one, old, 4)  # those that yield already count
    assert named(pool) == {rest[1]}
    two.suspend(rest[2])  # what came back counts as well
    grows(one, old, 6)
    assert named(pool) == set()
    grows(one, old, 7)
    assert named(pool) == {rest[0]}


def test_priority_goes_before_arrival_across_workers(pool: Pool, one: Worker, two: Worker) -> None:
    low_old, high_young = table(one, 1.0, 4), table(two, 5.0, 4, priority=2)
    low_young, high_old = table(two, 4.0, 2), table(one, 2.0, 2, priority=2)
    grows(two, high_young, 3)
    assert named(pool) == {low_young, low_old}
    grows(one, high_old, 7)
    assert named(pool) == {high_young}


def test_where_nobody_is_less_urgent_the_asker_itself_yields(pool: Pool, one: Worker, two: Worker) -> None:
    old, young = table(one, 1.0, 6), table(two, 2.0, 6)
    assert not grows(two, young, 1)
    assert pool.victims.take_news() == [(two.lease, young)]
    assert not grows(two, young, 1)
    assert pool.victims.take_news() == []
    assert not grows(one, old, 6), "what the other frees is on its way"
    assert named(pool) == set()
    two.suspend(young)
    assert grows(one, old, 6)


def test_what_others_have_too_frees_nothing(pool: Pool, one: Worker, two: Worker) -> None:
    prompt = [1] * (3 * B)
    oldest = one.table([*prompt, 2], 4, arrival=0.5)
    old, alone = table(two, 1.0, 3), table(two, 2.0, 2)
    (grant,) = one.step(creates=[TableRequest([*prompt, 3], 3, arrival=3.0)]).grants  # nothing but what the oldest has
    (other,) = one.step(creates=[TableRequest([*prompt, 4], 4, arrival=4.0)]).grants  # and a block of its own
    assert (grant.cached_tokens, other.cached_tokens, pool.usage().free) == (3 * B, 3 * B, 2)
    assert not grows(two, old, 5)
    assert named(pool) == {other.table_id, alone}
    assert pool.table(oldest, 1.0).num_tokens == 3 * B + 1


def test_what_only_those_have_that_yield_together_is_freed(pool: Pool, one: Worker, two: Worker) -> None:
    first, old = one.table([1] * (3 * B), 4, arrival=3.0), table(two, 1.0, 8)
    (grant,) = one.step(reserves=[ReserveRequest(0, 2)]).grants
    forks = [grant.table_id, grant.table_id + 1]
    one.step(operations=[Fork(first, fork) for fork in forks])
    assert not grows(two, old, 2)
    assert named(pool) == {first, *forks}
    one.step(operations=[Suspend(table_id, ()) for table_id in (first, *forks)])
    assert grows(two, old, 4)


def test_of_tables_that_free_nothing_the_least_urgent_that_shares_with_the_asker_yields(
    pool: Pool, one: Worker, two: Worker
) -> None:
    """Until the asker has its blocks alone; then there is nobody left but itself."""
    first, second = one.table([1] * (3 * B + 1), 4, arrival=1.0), one.table([2] * (3 * B), 8, arrival=2.0)
    (grant,) = one.step(reserves=[ReserveRequest(0, 3)]).grants
    forks = [grant.table_id, grant.table_id + 1, grant.table_id + 2]
    origins = [first, first, second]
    one.step(operations=[Fork(origin, fork) for origin, fork in zip(origins, forks, strict=True)])
    pool.prefixes.pin(PinRequest([2] * (3 * B), 50.0, pinned=True), 1.0)
    assert not grows(one, first, 9)
    assert named(pool) == {second, forks[2]}, "together they free what is not pinned"
    assert not grows(one, first, 9)
    assert named(pool) == {forks[1]}, "the first has all that they have"
    one.suspend(forks[1])
    assert not grows(one, first, 9)
    assert named(pool) == {forks[0]}
    assert not grows(one, first, 9)
    assert named(pool) == {first}


def test_a_table_that_shares_only_with_others_is_spared(pool: Pool, one: Worker, two: Worker) -> None:
    oldest, old = one.table([1] * (4 * B), 6, arrival=1.0), table(two, 2.0, 6)
    (grant,) = one.step(creates=[TableRequest([1] * (4 * B + 1), 4, arrival=3.0)]).grants
    assert grant.cached_tokens == 4 * B
    assert not grows(two, old, 1)
    assert named(pool) == {old}
    assert not pool.table(oldest, 1.0).suspended


def test_pinned_blocks_come_back_to_nobody(pool: Pool, one: Worker, two: Worker) -> None:
    prompt = [1] * (4 * B)
    pinned, old, young = one.table(prompt, 4, arrival=3.0), table(two, 1.0, 4), table(two, 2.0, 4)
    pool.prefixes.pin(PinRequest(prompt, 50.0, pinned=True), 1.0)
    grows(two, old, 1)
    assert named(pool) == {young}
    assert pinned not in named(pool)


def test_clients_tables_and_tables_of_detached_workers_are_not_named(pool: Pool, one: Worker, two: Worker) -> None:
    client = pool.create_lease("client", 100.0, 1.0).lease_id
    pool.create_table(client, TableRequest((), 4, arrival=9.0), 1.0)
    old, young = table(one, 1.0, 4), table(two, 2.0, 4)
    pool.stream_broken(two.lease)
    grows(one, old, 1)
    assert named(pool) == {old}
    assert pool.attach("two", "two", 100.0, 2.0, (7, two.lease)).reclaimed
    grows(one, old, 1)
    assert named(pool) == set(), "who has to yield itself calls for nothing"
    assert pool.table(young, 1.0).num_tokens == 0


def test_a_worker_that_is_back_is_told_again(pool: Pool, one: Worker, two: Worker) -> None:
    old, young = table(one, 1.0, 6), table(two, 2.0, 6)
    grows(one, old, 1)
    pool.stream_broken(two.lease)
    assert pool.victims.take_news() == []
    assert pool.attach("two", "two", 100.0, 2.0, (7, two.lease)).reclaimed
    assert pool.victims.take_news() == [(two.lease, young)]


def test_what_a_repeated_answer_grants_is_named_after_it(pool: Pool, one: Worker, two: Worker) -> None:
    """A worker whose stream broke before it read its grant cannot know the table that it is told at once."""
    old = table(one, 1.0, 6)
    step = Step(two.steps + 1, creates=[TableRequest((), 6, arrival=2.0)])
    (grant,) = pool.step(two.lease, step, 1.0).grants
    pool.stream_broken(two.lease)
    assert pool.attach("two", "two", 100.0, 2.0, (7, two.lease)).reclaimed
    assert not grows(one, old, 1, now=2.0)
    victim = [(two.lease, grant.table_id)]
    assert pool.victims.take_news() == victim
    assert pool.step(two.lease, step, 2.0).grants == [grant]
    assert pool.victims.take_news() == victim
    assert pool.step(two.lease, Step(step.step_id + 1), 2.0).grants == []
    assert pool.victims.take_news() == [], "what is new has been read"


def test_a_table_that_a_repeated_answer_grants_is_named_once_with_it(pool: Pool, one: Worker, two: Worker) -> None:
    old = table(one, 1.0, 6)
    step = Step(two.steps + 1, creates=[TableRequest((), 3, ref=ref, arrival=2.0 + ref) for ref in (0, 1)])
    kept, young = pool.step(two.lease, step, 1.0).grants
    grows(one, old, 1)
    pool.stream_broken(two.lease)
    assert pool.attach("two", "two", 100.0, 2.0, (7, two.lease)).reclaimed
    assert len(pool.step(two.lease, step, 2.0).grants) == 2
    assert pool.victims.take_news() == [(two.lease, young.table_id)]
    assert not pool.table(kept.table_id, 2.0).suspended


def test_who_does_not_yield_in_time_or_dies_is_not_counted_on(pool: Pool, one: Worker, two: Worker) -> None:
    old, middle, young = table(one, 1.0, 4), table(one, 2.0, 4), table(two, 3.0, 4)
    grows(one, old, 1)
    assert named(pool) == {young}
    grows(one, old, 1, now=YIELD_S)
    assert named(pool) == set()
    grows(one, old, 1, now=1.0 + YIELD_S)
    assert named(pool) == {middle}
    pool.fail_lease(two.lease, 1.0)
    pool.process_gone(two.lease, 20.0)
    assert (pool.usage().free, pool.waiting.take_news()) == (4, [(one.lease, 4)])


def test_a_request_makes_only_lower_priorities_yield_and_only_if_that_is_enough(
    pool: Pool, one: Worker, two: Worker
) -> None:
    low, equal = table(one, 8.0, 4), table(one, 9.0, 8, priority=1)
    assert not starts(two, 5, arrival=1.0, priority=1)
    assert named(pool) == set(), "4 blocks are not enough, and its own priority waits"
    assert not starts(two, 4, arrival=1.0)
    assert named(pool) == set()
    assert not starts(two, 4, arrival=10.0, priority=1)
    assert named(pool) == {low}
    one.suspend(low, 5)
    assert starts(two, 4, arrival=10.0, priority=1)
    assert not pool.table(equal, 1.0).suspended


def test_nobody_yields_what_the_request_has_found_with_it(pool: Pool, one: Worker, two: Worker) -> None:
    """Its blocks would be cached then, and taken by the request all the same: there is no more room beside them."""
    prompt = [1] * (5 * B)
    low, high = one.table([*prompt, 2], 6, arrival=1.0), table(one, 2.0, 6, priority=5)
    asked = TableRequest([*prompt, 3], 7, priority=1, arrival=3.0)  # 5 found, 2 lacking, of which it would free 1
    assert not two.step(creates=[asked]).grants
    assert named(pool) == set()
    asked = dataclasses.replace(asked, num_blocks=6)
    assert not two.step(creates=[asked]).grants
    assert named(pool) == {low}
    one.suspend(low, 4)
    (grant,) = two.step(creates=[asked]).grants
    assert grant.cached_tokens == 5 * B
    assert not pool.table(high, 1.0).suspended


def test_a_resumed_table_asks_with_its_own_priority_and_arrival(pool: Pool, one: Worker, two: Worker) -> None:
    high, low = table(one, 5.0, 6, priority=3), table(two, 1.0, 6)
    one.suspend(high, 1)
    filler = table(one, 6.0, 6)
    assert not one.step(creates=[TableRequest((), 6, priority=-9, resume_table_id=high)]).grants
    assert named(pool) == {filler}
    one.suspend(filler)
    assert one.step(creates=[TableRequest((), 6, resume_table_id=high)]).grants
    assert not pool.table(low, 1.0).suspended


def test_a_fork_is_as_old_as_its_origin(pool: Pool, one: Worker, two: Worker) -> None:
    first = one.table([1] * B, 2, arrival=1.0, priority=1)
    (grant,) = one.step(reserves=[ReserveRequest(0, 1)]).grants
    young = table(two, 2.0, 10, priority=1)
    one.step(operations=[Fork(first, grant.table_id)])
    grows(one, grant.table_id, 1)
    assert named(pool) == {young}


def test_without_an_arrival_a_table_came_when_it_was_made(pool: Pool, one: Worker, two: Worker) -> None:
    early = table(one, 50.0, 4)
    (grant,) = two.step(60.0, creates=[TableRequest((), 4)]).grants
    late = table(one, 70.0, 4)
    grows(one, early, 5, now=80.0)
    assert named(pool) == {late, grant.table_id}
    pool.step(two.lease, Step(2, [Commit(grant.table_id, [1])], operations=[Suspend(grant.table_id, ())]), 80.0)
    assert grows(one, early, 4, now=80.0)


def yields_often(worker: Worker, table_id: int, num_blocks: int) -> None:
    """A table yields, to some more urgent one, as often as one may, and has its blocks again."""
    for _ in range(MAX_YIELDS):
        worker.pool._state.tables[table_id].yielding_since = 1.0
        worker.suspend(table_id)
        resumed = worker.step(creates=[TableRequest((), num_blocks, resume_table_id=table_id)])
        assert resumed.grants


def test_a_table_that_has_yielded_often_yields_to_no_other(pool: Pool, one: Worker, two: Worker) -> None:
    old, middle, young = table(one, 1.0, 4), table(one, 2.0, 4), table(two, 3.0, 4)
    yields_often(two, young, 4)
    assert not grows(one, old, 2)
    assert named(pool) == {middle}
    assert not starts(one, 9, priority=1)
    assert named(pool) == set(), "nor to a request of a higher priority"


def test_of_tables_that_have_yielded_often_the_most_urgent_goes_on(pool: Pool, one: Worker, two: Worker) -> None:
    old, middle, young = table(one, 1.0, 4), table(one, 2.0, 4), table(two, 3.0, 4)
    yields_often(two, young, 4)
    yields_often(one, old, 4)
    yields_often(one, middle, 4)
    assert not grows(one, old, 6)
    assert named(pool) == {middle, young}


def test_a_fork_has_yielded_as_often_as_its_origin(pool: Pool, one: Worker, two: Worker) -> None:
    old, young = table(one, 1.0, 5), table(two, 3.0, 4)
    yields_often(two, young, 4)
    (grant,) = two.step(reserves=[ReserveRequest(0, 1)]).grants
    two.step(operations=[Fork(young, grant.table_id)])
    assert not grows(one, old, 4)
    assert named(pool) == {old}
