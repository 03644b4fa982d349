"""For whom blocks are held back, and who hears when they are there, by example."""

from __future__ import annotations

import pytest

from memd.core.operations import ReserveRequest
from memd.core.pool import Pool
from memd.core.values import PinRequest, Step, TableRequest
from memd.core.waiting import CLAIM_S
from pagepool.errors import PagepoolError
from tests.cpu.core_worker import TOTAL, B, Worker, grows, named, one, pool, starts, table, two

__all__ = ["one", "pool", "two"]


def test_what_is_freed_for_the_more_urgent_is_not_taken_by_others(pool: Pool, one: Worker, two: Worker) -> None:
    old, young = table(one, 1.0, 6), table(two, 3.0, 6)
    assert not grows(one, old, 4)
    client = pool.create_lease("client", 100.0, 1.0).lease_id
    two.suspend(young, 1)
    with pytest.raises(PagepoolError, match="only 2"):
        pool.allocate_blocks(client, 3, 1.0)
    assert not two.step(reserves=[ReserveRequest(3, 0)]).grants
    assert not two.step(creates=[TableRequest((), 3, resume_table_id=young)]).grants
    with pytest.raises(PagepoolError, match="only 0"):
        pool.allocate_blocks(client, 1, 1.0)
    assert starts(two, 2, arrival=9.0), "what is not claimed is there for everybody"
    assert grows(one, old, 4)


def test_the_more_urgent_does_not_mind_the_claim_of_the_less_urgent(pool: Pool, one: Worker, two: Worker) -> None:
    oldest, old, young = table(one, 1.0, 4), table(two, 2.0, 4), table(two, 3.0, 4)
    assert not grows(two, old, 4)
    two.suspend(young)
    assert grows(one, oldest, 4)
    assert not grows(two, old, 1)
    assert named(pool) == {old}


def test_a_table_that_grows_goes_before_a_request_of_its_priority(pool: Pool, one: Worker, two: Worker) -> None:
    running = table(two, 5.0, 8)
    assert not starts(one, 6, arrival=1.0)
    assert not starts(two, 1, arrival=6.0), "but no younger request does"
    assert grows(two, running, 2)
    assert not starts(one, 6, arrival=1.0, priority=1)
    assert not grows(two, running, 1)
    pool.check()


def test_a_request_that_pins_leave_no_room_for_holds_nobody_up(pool: Pool, one: Worker, two: Worker) -> None:
    prompt = [1] * (4 * B)
    one.step(releases=[one.table(prompt, 4)])
    pool.prefixes.pin(PinRequest(prompt, 50.0, pinned=True), 1.0)
    assert not starts(one, TOTAL - 3, arrival=2.0, priority=1)
    assert starts(two, TOTAL - 4, arrival=3.0)
    assert not starts(one, TOTAL - 4, arrival=2.0)
    assert not starts(two, 1, arrival=3.0)


def test_first_come_first_served_across_workers(pool: Pool, one: Worker, two: Worker) -> None:
    running = table(one, 1.0, 8)
    assert not starts(one, 6, arrival=2.0)
    assert not starts(two, 2, arrival=3.0)
    assert pool.waiting.take_news() == []
    one.step(releases=[running])
    assert dict(pool.waiting.take_news()) == {one.lease: TOTAL, two.lease: TOTAL - 6}
    assert starts(two, 6, arrival=3.0)
    assert starts(one, 6, arrival=2.0)


def test_a_claim_lapses_and_whoever_was_refused_for_it_hears(pool: Pool, one: Worker, two: Worker) -> None:
    table(one, 1.0, 8)
    assert not starts(one, 6, arrival=2.0, now=10.0)
    assert not starts(two, 3, arrival=3.0, now=11.0)
    pool.tick(10.0 + CLAIM_S - 0.1)
    assert pool.waiting.take_news() == []
    pool.tick(10.0 + CLAIM_S)
    assert pool.waiting.take_news() == [(two.lease, 4)]
    assert starts(two, 3, arrival=3.0, now=12.5)


def test_asking_again_keeps_a_claim_and_asking_for_less_frees_the_rest(pool: Pool, one: Worker, two: Worker) -> None:
    table(one, 1.0, 8)
    assert not starts(one, 6, arrival=2.0, now=10.0)
    assert not starts(one, 6, arrival=2.0, now=11.5)
    assert not starts(two, 1, arrival=3.0, now=12.5)
    assert starts(one, 2, arrival=2.0, now=12.6)
    assert pool.waiting.take_news() == [(two.lease, 2)]


@pytest.mark.parametrize("end", ["suspend", "release", "detach", "lose", "break"])
def test_a_claim_ends_with_its_table_and_its_lease(pool: Pool, one: Worker, two: Worker, end: str) -> None:
    old, young = table(one, 1.0, 4), table(two, 2.0, 2)
    assert not grows(one, old, 8)
    assert named(pool) == {young}
    assert not starts(two, 1, arrival=9.0)
    match end:
        case "suspend":
            one.suspend(old)
        case "release":
            one.step(releases=[old])
        case "detach":
            pool.detach(one.lease, 1.0)
        case "lose":
            pool.fail_lease(one.lease, 1.0)
        case "break":
            pool.stream_broken(one.lease)
    pool.check()
    assert two.lease in dict(pool.waiting.take_news())
    assert starts(two, 1, arrival=9.0)


def test_a_slow_workers_claim_lasts_until_it_can_ask_again(pool: Pool, one: Worker, two: Worker) -> None:
    old, young = table(one, 1.0, 6), table(two, 2.0, 6)
    assert not grows(one, old, 2, now=6.0)  # 5 s after its last step
    two.suspend(young)
    pool.tick(15.0)
    assert not two.step(15.0, creates=[TableRequest((), 6, resume_table_id=young)]).grants
    assert grows(one, old, 2, now=15.5)


def test_what_a_table_cannot_go_on_without_comes_before_requests_of_the_same_step(pool: Pool, one: Worker) -> None:
    old = table(one, 1.0, 10)
    outcome = one.step(
        creates=[TableRequest((), 2, arrival=0.5, ref=1)], reserves=[ReserveRequest(2, 0, ref=2, for_table_id=old)]
    )
    assert ([grant.ref for grant in outcome.grants], [no.ref for no in outcome.refusals]) == ([2], [1])


def test_the_reserve_that_nobody_waits_for_names_nobody_and_claims_nothing(
    pool: Pool, one: Worker, two: Worker
) -> None:
    table(one, 1.0, 6), table(two, 2.0, 4)
    assert not one.step(reserves=[ReserveRequest(3, 0)]).grants
    assert named(pool) == set()
    assert starts(two, 2)


def test_news_that_may_have_gone_down_with_a_stream_is_told_again(pool: Pool, one: Worker, two: Worker) -> None:
    running = table(one, 1.0, 8)
    step = Step(two.steps + 1, creates=[TableRequest((), 6, arrival=2.0)])
    assert pool.step(two.lease, step, 1.0).refusals
    one.step(releases=[running])
    assert pool.waiting.take_news() == [(two.lease, TOTAL)]
    pool.stream_broken(two.lease)
    assert pool.waiting.take_news() == []
    assert pool.attach("two", "two", 100.0, 1.0, (7, two.lease)).reclaimed
    assert pool.waiting.take_news() == [(two.lease, TOTAL)]
    assert pool.step(two.lease, step, 1.0).refusals, "repeated, for it was not read"
    assert pool.waiting.take_news() == [(two.lease, TOTAL)]
    assert pool.step(two.lease, Step(step.step_id + 1), 1.0).grants == []
    assert pool.waiting.take_news() == []


def test_who_was_told_nothing_hears_nothing_when_it_comes_back(pool: Pool, one: Worker, two: Worker) -> None:
    assert pool.attach("two", "two", 100.0, 1.0, (7, two.lease)).reclaimed
    assert pool.waiting.take_news() == []


# -- headroom


def test_headroom_must_be_there_but_is_not_granted(pool: Pool, one: Worker, two: Worker) -> None:
    running = table(one, 1.0, 6)
    (refusal,) = two.step(creates=[TableRequest((), 4, headroom=3)]).refusals
    assert refusal.available_blocks == 3
    (grant,) = two.step(creates=[TableRequest((), 3, headroom=3)]).grants
    assert (len(grant.blocks.block_ids), pool.usage().free) == (3, 3)
    two.step(releases=[grant.table_id])
    assert not two.step(creates=[TableRequest((), TOTAL - 6, headroom=1)]).grants
    one.step(releases=[running])
    assert pool.waiting.take_news() == [(two.lease, TOTAL)]


def test_headroom_counts_for_nothing_while_no_other_table_has_blocks(pool: Pool, one: Worker, two: Worker) -> None:
    asleep = table(one, 1.0, 6)
    one.suspend(asleep, 1)
    one.step(reserves=[ReserveRequest(2, 0)])
    assert two.step(creates=[TableRequest((), TOTAL - 2, headroom=99)]).grants


def test_headroom_is_for_workers_and_not_for_what_clients_have(pool: Pool, one: Worker, two: Worker) -> None:
    """Clients take what there is for everybody; a table of theirs that stays would make the request wait for good."""
    client = pool.create_lease("client", 100.0, 1.0).lease_id
    pool.create_table(client, TableRequest((), 1), 1.0)
    assert one.step(creates=[TableRequest((), TOTAL - 2, headroom=3, arrival=1.0)]).grants
    assert starts(two, 1)


def test_who_waits_for_headroom_alone_hears_when_no_table_is_left_though_no_block_returns(
    pool: Pool, one: Worker, two: Worker
) -> None:
    tokens = [1] * (4 * B)
    running = one.table(tokens, 4)
    client = pool.create_lease("client", 100.0, 1.0).lease_id
    pool.share_blocks(client, pool.table(running, 1.0).blocks.block_ids, 1.0)
    assert not two.step(creates=[TableRequest((), 8, headroom=1)]).grants
    assert pool.waiting.take_news() == []
    one.suspend(running)
    assert pool.waiting.take_news() == [(two.lease, 8)]
    assert two.step(creates=[TableRequest((), 8, headroom=1)]).grants


def test_matched_blocks_that_are_cached_count_as_taken(pool: Pool, one: Worker, two: Worker) -> None:
    tokens = [1] * (4 * B)
    one.step(releases=[one.table(tokens, 4)])
    running = table(one, 1.0, 6)
    assert pool.usage().available == 6
    (refusal,) = two.step(creates=[TableRequest([*tokens, 1], 7, headroom=0)]).refusals
    assert refusal.available_blocks == 6
    assert not starts(one, 1, arrival=99.0), "4 that were found and 3 fresh ones are claimed"
    one.step(releases=[running])
    assert two.step(creates=[TableRequest([*tokens, 1], 7)]).grants
