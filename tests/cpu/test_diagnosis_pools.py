"""What `pagepool doctor` advises about real pools, and that it helps.

Each case is brought about in memd's core, and then again as if what was advised had been done: the finding is gone.
"""

from __future__ import annotations

import pytest

from memd.core.operations import ReserveRequest, Take
from memd.core.pool import Pool
from memd.core.values import Commit, PinRequest, TableRequest
from pagepool.memd.v1.types_pb2 import BLOCK_STATE_HELD
from pagepool_client.diagnosis.figures import measure
from pagepool_client.diagnosis.observation import Observation
from pagepool_client.diagnosis.report import facts
from tests.cpu.core_worker import Worker, grows
from tests.cpu.seen_pools import TOTAL, advice, codes, finding, numbered, pool_of, seen, tokens


def test_more_blocks_help_a_pool_that_is_out_of_them() -> None:
    def served(num_blocks: int) -> Observation:
        worker = Worker(pool_of(num_blocks))
        for index in range(4):
            worker.table(tokens(1000 * index, 24 * 8), 24)
        refused = worker.step(creates=[TableRequest(tokens(9000, 24 * 8), 25)]).refusals
        return seen(worker.pool, waiting=len(refused), running=5 - len(refused))

    short = served(TOTAL)
    assert codes(short) == ["out_of_blocks"]
    assert "out_of_blocks" not in codes(served(int(advice(short, "out_of_blocks", "--max-num-blocks"))))


def test_more_blocks_or_fewer_at_once_help_tables_that_had_to_yield() -> None:
    def served(num_blocks: int, at_once: int) -> Observation:
        worker = Worker(pool_of(num_blocks))
        running = [worker.table(tokens(1000 * index, 32 * 8), 32) for index in range(at_once)]
        if not grows(worker, running[0], 8):
            worker.suspend(running[-1], 5)
        return seen(worker.pool, running=at_once)

    short = served(TOTAL, 3)
    assert "suspended_tables" in codes(short)
    more, fewer = (advice(short, "suspended_tables", name) for name in ("--max-num-blocks", "--max-num-seqs"))
    assert (int(more) > TOTAL, fewer) == (True, "2")
    assert "suspended_tables" not in codes(served(int(more), 3))
    assert "suspended_tables" not in codes(served(TOTAL, int(fewer)))


def test_the_lease_that_is_named_gives_its_blocks_back() -> None:
    pool = pool_of()
    Worker(pool).table(tokens(0, 30 * 8), 30)
    for count in (6, 60):
        pool.allocate_blocks(pool.create_lease("client", 100.0, 1.0).lease_id, count, 1.0)
    of = seen(pool)
    assert codes(of) == ["out_of_blocks", "held_by_leases"]
    pool.release_lease(numbered(advice(of, "held_by_leases", "ReleaseLease")), 1.0)
    assert codes(seen(pool)) == []


def test_what_workers_have_in_reserve_is_nobodys_to_release() -> None:
    pool = pool_of()
    worker = Worker(pool, "w")
    worker.table(tokens(0, 80 * 8), 80)
    worker.step(reserves=[ReserveRequest(18, 0)])
    pool.allocate_blocks(pool.create_lease("client", 100.0, 1.0).lease_id, 1, 1.0)
    of = seen(pool)
    assert codes(of) == ["out_of_blocks"], "a client could not release a worker's lease"
    assert (measure(of).reserve_blocks, measure(of).direct_blocks, of.pool.usage.reserve_blocks) == (18, 1, 18)
    assert [line.split(",")[0] for line in finding(of, "out_of_blocks").evidence][1] == (
        f"held by the reserve of lease {worker.lease} of w: 18 blocks"
    )


def test_a_reserve_that_is_larger_than_the_clients_lease_is_not_the_one_that_is_named() -> None:
    pool = pool_of()
    Worker(pool).step(reserves=[ReserveRequest(60, 0)])
    client = pool.create_lease("client", 100.0, 1.0).lease_id
    pool.allocate_blocks(client, 36, 1.0)
    of = seen(pool)
    assert finding(of, "held_by_leases").figures == {"pinned_blocks": 36, "total_blocks": 100, "leases": 1}
    assert numbered(advice(of, "held_by_leases", "ReleaseLease")) == client


def test_a_block_that_a_worker_has_yet_to_copy_is_no_reserve() -> None:
    pool = pool_of()
    worker = Worker(pool)
    worker.table(tokens(0, 16), 2)
    (grant,) = worker.step(creates=[TableRequest([*tokens(0, 12), 99, 99], 2, partial=True)]).grants
    assert grant.copy_source is not None
    assert seen(pool).pool.usage.reserve_blocks == 0
    assert codes(seen(pool)) == []


def test_the_pinned_prefix_that_is_let_go_leaves_room() -> None:
    pool = pool_of()
    worker = Worker(pool)
    worker.step(releases=[worker.table(tokens(0, 45 * 8), 45)])
    pool.prefixes.pin(PinRequest(tokens(0, 45 * 8), 1000.0, pinned=True), 1.0)
    assert advice(seen(pool, 31.0), "pinned_prefixes", "UnpinPrefix") == "the prefix that was last used 30 s ago"
    pool.prefixes.unpin(tokens(0, 45 * 8), b"", 1.0)
    assert codes(seen(pool)) == []


def test_the_table_that_is_named_is_the_idle_one_and_whose_it_is_decides_how_it_goes() -> None:
    pool = pool_of()
    worker, client = Worker(pool, "w"), pool.create_lease("client", 1000.0, 1.0).lease_id
    ours = worker.table(tokens(0, 30 * 8), 30)
    theirs = pool.create_table(client, TableRequest((), 40), 1.0).table_id
    of = seen(pool, now=100.0)
    assert codes(of) == ["idle_tables"]
    assert numbered(advice(of, "idle_tables", "ReleaseBlockTable")) == theirs
    pool.release_table(client, theirs, 100.0)
    assert advice(seen(pool, now=100.0), "idle_tables", "cancel") == f"the call whose table {ours} is, at w"
    worker.step(releases=[ours])
    assert codes(seen(pool, now=100.0)) == []


@pytest.mark.parametrize("cure", ["the process ends", "the timeout"])
def test_blocks_of_a_lost_worker_come_back_with_its_process_or_it_is_not_lost(cure: str) -> None:
    def after(timeout_s: float) -> tuple[Pool, int]:
        pool = pool_of()
        lease = pool.attach("slow", "slow", timeout_s, 0.0).lease.lease_id
        worker = Worker(pool)
        worker.lease = lease
        worker.table(tokens(0, 12), 4)
        pool.tick(25.0)
        return pool, lease

    pool, lease = after(10.0)
    of = seen(pool, 25.0)
    assert (codes(of), finding(of, "lost_workers").figures["quarantined_blocks"]) == (["lost_workers"], 3)
    if cure == "the process ends":
        pool.process_gone(lease, 26.0)
    else:
        pool, _ = after(float(advice(of, "lost_workers", "--heartbeat-timeout").removesuffix("s")))
    assert codes(seen(pool, 26.0)) == []


def test_smaller_blocks_waste_less_of_short_sequences() -> None:
    def served(block_size: int) -> Observation:
        worker = Worker(pool_of(block_size=block_size))
        for index in range(30):
            worker.table(tokens(100 * index, 20), -(-20 // block_size))
        return seen(worker.pool)

    assert codes(served(128)) == ["waste_inside_blocks"]
    assert "waste_inside_blocks" not in codes(served(int(advice(served(128), "waste_inside_blocks", "--block-size"))))


def test_fewer_prompts_at_once_leave_blocks_to_those_that_are_computed() -> None:
    def served(at_once: int) -> Observation:
        """Prompts of 24 blocks, as many as run, of which the oldest is half computed."""
        worker = Worker(pool_of())
        admitted = [TableRequest(tokens(1000 * index, 24 * 8), 24) for index in range(at_once)]
        grants = worker.step(creates=admitted).grants
        worker.step(commits=[Commit(grants[0].table_id, tokens(0, 12 * 8))])
        return seen(worker.pool, waiting=6 - at_once, running=at_once)

    crowded = served(4)
    assert finding(crowded, "reserved_ahead").figures == {"reserved_blocks": 84, "held_blocks": 96, "tables": 4}
    assert advice(crowded, "reserved_ahead", "--max-num-seqs") == "1", "the one that is computed"
    assert "72 blocks too early" in finding(crowded, "reserved_ahead").remedies[0].effect
    assert "reserved_ahead" not in codes(served(1))


def test_tables_that_decode_from_a_reserve_have_nothing_ahead_however_long_they_may_become() -> None:
    worker = Worker(pool_of())
    for index in range(12):
        table_id = worker.table(tokens(1000 * index, 7 * 8), 7)
        (grant,) = worker.step(reserves=[ReserveRequest(1, 0)]).grants
        worker.step(operations=[Take(table_id, grant.blocks.block_ids)], commits=())
    of = seen(worker.pool, waiting=2, running=12)
    assert codes(of) == ["out_of_blocks"]
    assert measure(of).reserved_blocks == 12


def test_one_long_prompt_that_is_being_computed_can_only_be_given_more_blocks() -> None:
    worker = Worker(pool_of())
    worker.step(creates=[TableRequest(tokens(0, 97 * 8), 97)])
    assert codes(seen(worker.pool, waiting=1, running=1)) == ["out_of_blocks"]


def test_a_clients_table_is_extended_as_its_tokens_come() -> None:
    pool = pool_of()
    client = pool.create_lease("client", 1000.0, 1.0).lease_id
    table_id = pool.create_table(client, TableRequest((), 97), 1.0).table_id
    of = seen(pool)
    assert codes(of) == ["out_of_blocks", "reserved_ahead"]
    assert numbered(advice(of, "reserved_ahead", "ExtendBlockTable")) == table_id
    pool.release_table(client, table_id, 1.0)
    pool.extend_table(client, pool.create_table(client, TableRequest((), 1), 1.0).table_id, 1, 1.0)
    assert codes(seen(pool)) == []


def test_more_requests_at_once_help_a_queue_before_a_pool_with_room() -> None:
    def served(at_once: int) -> Observation:
        worker = Worker(pool_of())
        for index in range(min(at_once, 7)):
            worker.table(tokens(1000 * index, 10 * 8), 10)
        return seen(worker.pool, waiting=max(7 - at_once, 0), running=min(at_once, 7))

    assert codes(served(4)) == ["workers_are_full"]
    assert codes(served(int(advice(served(4), "workers_are_full", "--max-num-seqs")))) == []


def test_requests_that_wait_for_a_prefix_want_neither_blocks_nor_a_larger_worker() -> None:
    def served(total: int, for_prefix: int) -> list[str]:
        worker = Worker(pool_of(total))
        worker.table(tokens(0, 8 * 30), 30)
        of = seen(worker.pool, waiting=3, running=1)
        assert of.workers[0].model is not None
        of.workers[0].model.prefix_waiting_requests = for_prefix
        assert f"1 running and {3 - for_prefix} waiting" in dict(facts(of, measure(of)))["queue"]
        return codes(of)

    assert (served(100, 0), served(100, 3), served(100, 2)) == (["workers_are_full"], [], ["workers_are_full"])
    assert (served(40, 0), served(40, 3)) == (["out_of_blocks"], [])


def test_held_blocks_of_every_kind_are_told_apart_in_a_real_pool() -> None:
    pool = pool_of()
    worker, client = Worker(pool), pool.create_lease("client", 1000.0, 1.0).lease_id
    worker.table(tokens(0, 20), 5)
    worker.step(reserves=[ReserveRequest(4, 0)])
    pool.allocate_blocks(client, 6, 1.0)
    of = seen(pool)
    figures = measure(of)
    assert (figures.reserved_blocks, figures.reserve_blocks, figures.direct_blocks) == (2, 4, 6)
    assert sum(block.state == BLOCK_STATE_HELD for block in of.blocks) == 5 + 4 + 6
