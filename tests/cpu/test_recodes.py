"""Blocks that are stored in another format by a worker: what may happen until it has, and if it never does."""

from __future__ import annotations

from random import Random

import pytest

from memd.core.fp8 import Fp8, Policy
from memd.core.operations import Fork, ReserveRequest, Truncate
from memd.core.pool import Pool
from memd.core.recodes import Recoded
from memd.core.values import BlockState, Commit, Step, TableRequest
from pagekernels.layout import Format, unpack_entry
from pagepool.errors import PagepoolError, Reason
from tests.cpu.compression_rig import BAD, GOOD, B, Worker, compress, make, move_all, tokens


def reason_of(pool: Pool, lease: int, block_ids: list[int]) -> Reason:
    with pytest.raises(PagepoolError) as caught:
        pool.compression.compress(lease, block_ids, 2.0)
    pool.check()
    return caught.value.reason


def test_nothing_is_different_until_the_worker_has_done_it() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(2 * B))
    before = [pool.block(block_id, 2.0) for block_id in grant.blocks.block_ids[:2]]
    there, (recode,) = pool.compression.compress(lease, grant.blocks.block_ids[:2], 2.0)
    pool.check()
    assert there == []
    assert not recode.is_over
    after = [pool.block(block_id, 2.0) for block_id in grant.blocks.block_ids[:2]]
    assert [(one.entry, one.format, one.exact) for one in after] == [(one.entry, one.format, True) for one in before]
    assert not pool.remaps.leases_with_news()
    (news,) = worker.hear()
    assert list(news.sources) == [one.entry for one in before]
    assert [unpack_entry(entry)[0] for entry in news.targets] == [Format.FP8_E4M3] * 2
    worker.answer(errors=[GOOD, BAD])
    assert [one.format for one in recode.outcomes] == [Format.FP8_E4M3, Format.BF16]
    assert [pool.block(one, 3.0).errors[1] for one in grant.blocks.block_ids[:2]] == [pytest.approx(GOOD), BAD]
    assert (pool.counters.compressed_blocks, pool.counters.blocks_over_error) == (1, 1)


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_is_over_the_bound(error: float) -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(B))
    (done,) = compress(pool, lease, grant.blocks.block_ids[:1], [worker], errors=error)
    assert done.format is Format.BF16
    assert pool.block(done.block_id, 3.0).exact


def test_two_commands_for_one_block_wait_for_the_same_recode() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(3 * B))
    _, (first,) = pool.compression.compress(lease, grant.blocks.block_ids[:2], 2.0)
    there, (again, second) = pool.compression.compress(lease, grant.blocks.block_ids[1:3], 2.0)
    assert (there, again) == ([], first)
    assert len(second.sources) == 1
    assert worker.answer() is first
    assert worker.answer() is second
    pool.check()


def test_the_worker_that_uses_a_block_stores_it_elsewhere_else_the_one_with_the_least_to_do() -> None:
    pool, lease = make(24)
    one, two = Worker(pool, "one"), Worker(pool, "two")
    grants = [worker.serve(tokens(B, seed)) for seed, worker in enumerate((one, two))]
    for worker, grant in zip((one, two), grants, strict=True):
        _, (recode,) = pool.compression.compress(lease, grant.blocks.block_ids[:1], 2.0)
        assert recode.lease_id == worker.lease
    one.answer()
    one.acknowledge()
    spare = one.serve(tokens(B, 9))
    one.step(releases=[spare.table_id])
    _, (recode,) = pool.compression.compress(lease, spare.blocks.block_ids[:1], 2.0)
    assert recode.lease_id == one.lease, "two has one to do"


def test_a_block_that_another_replaced_meanwhile_stays_where_it_is() -> None:
    pool, lease = make(24)
    one, two = Worker(pool, "one"), Worker(pool, "two")
    prompt = tokens(B)
    (slow,) = two.step(creates=[TableRequest(prompt, 2)]).grants
    grant = one.serve(prompt)
    two.step(commits=[Commit(slow.table_id, prompt)])  # sealed as the other's twin, and merged
    first = grant.blocks.block_ids[0]
    assert pool.table(slow.table_id, 2.0).blocks.block_ids[0] == first
    assert reason_of(pool, lease, [slow.blocks.block_ids[0]]) is Reason.BLOCK_MOVING
    two.acknowledge()
    _, (recode,) = pool.compression.compress(lease, [first], 2.0)
    (exact,) = two.step(creates=[TableRequest([*prompt, 1], 2, exact=True)]).grants
    assert exact.cached_tokens == B
    Worker.answer(one if recode.lease_id == one.lease else two)
    assert [(done.format, done.errors[0]) for done in recode.outcomes] == [(Format.BF16, pytest.approx(GOOD))]
    assert pool.block(first, 3.0).exact
    assert reason_of(pool, lease, [first]) is Reason.BLOCK_WANTED_EXACT


def test_a_table_that_ends_meanwhile_does_no_harm() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(2 * B))
    pool.compression.compress(lease, grant.blocks.block_ids[:2], 2.0)
    worker.step(releases=[grant.table_id])
    worker.answer()
    assert [pool.block(one, 3.0).state for one in grant.blocks.block_ids[:2]] == [BlockState.CACHED] * 2
    assert (pool.usage().cached, pool.usage().held, pool.usage().free) == (1, 0, 11)


def test_a_failure_is_told_and_all_stays_as_it_was() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(B))
    usage = pool.usage()
    pool.compression.compress(lease, grant.blocks.block_ids[:1], 2.0)
    recode = worker.answer(failed=True)
    assert "could not do it" in recode.failure
    assert recode.outcomes == []
    assert pool.usage() == usage


@pytest.mark.parametrize("how", ["lost", "detached", "deaf"])
def test_a_worker_that_goes_leaves_the_blocks_as_they_were(how: str) -> None:
    pool, lease = make()
    worker, other = Worker(pool, "one"), Worker(pool, "two")
    grant = other.serve(tokens(B))
    other.step(releases=[grant.table_id])
    usage = pool.usage()
    _, (recode,) = pool.compression.compress(lease, grant.blocks.block_ids[:1], 2.0)
    if recode.lease_id == other.lease:
        worker, other = other, worker
    match how:
        case "lost":
            pool.fail_lease(worker.lease, 2.0)
            assert pool.usage().quarantined == 1, "its process may still write there"
            pool.check()
            pool.process_gone(worker.lease, 3.0)
        case "detached":
            pool.detach(worker.lease, 2.0)
        case "deaf":
            worker.listens = False
            worker.reclaim(2.0)
            assert pool.usage().held == 1
            pool.detach(worker.lease, 3.0)
    pool.check()
    assert pool.compression.take_finished() == [recode]
    assert "one" in recode.failure or "two" in recode.failure
    assert pool.usage() == usage
    (done,) = compress(pool, lease, grant.blocks.block_ids[:1], [other])
    assert done.format is Format.FP8_E4M3


def test_what_is_not_answered_is_told_again_on_a_new_stream() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(2 * B))
    for block_id in grant.blocks.block_ids[:2]:
        pool.compression.compress(lease, [block_id], 2.0)
    told = list(worker.hear())
    assert [one.sequence for one in told] == [1, 2]
    worker.answer()
    worker.reclaim(3.0)
    assert [one.sequence for one in worker.hear()] == [2]
    worker.answer()
    assert pool.counters.compressed_blocks == 2


def test_a_worker_that_does_not_answer_in_time_is_ended_by_name() -> None:
    pool, lease = make()
    pool.remaps.ack_timeout_s = 5.0
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(2 * B))
    pool.compression.compress(lease, grant.blocks.block_ids[:1], 2.0)
    pool.compression.compress(lease, grant.blocks.block_ids[1:2], 6.0)
    worker.answer(6.5)
    worker.acknowledge(6.5)
    assert pool.tick(11.0) == []
    (lost,) = pool.tick(11.5)
    assert lost.lost_because.startswith("Recode 2 was not answered within --ack-timeout")
    pool.check()


@pytest.mark.parametrize(
    ("recodings", "complaint"),
    [
        ([Recoded(2, [0.0, 0.0])], "not the first"),
        ([Recoded(1, [0.0, 0.0]), Recoded(2, [0.0, 0.0])], "not the first"),
        ([Recoded(1, [0.0])], "needs 2"),
        ([Recoded(1, [0.0, 0.0], failed=True)], "needs 0"),
    ],
)
def test_an_answer_that_fits_nothing_breaks_the_protocol(recodings: list[Recoded], complaint: str) -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(B))
    pool.compression.compress(lease, grant.blocks.block_ids[:1], 2.0)
    worker.hear()
    with pytest.raises(PagepoolError, match=complaint) as caught:
        pool.step(worker.lease, Step(worker.steps + 1, recodings=recodings), 2.0)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    pool.check()


def test_an_answer_to_what_was_not_told_breaks_the_protocol() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    grant = worker.serve(tokens(B))
    pool.compression.compress(lease, grant.blocks.block_ids[:1], 2.0)
    with pytest.raises(PagepoolError, match="not the first"):
        pool.step(worker.lease, Step(worker.steps + 1, recodings=[Recoded(1, [0.0, 0.0])]), 2.0)


def test_without_fp8_and_without_a_worker_nothing_is_compressed() -> None:
    pool, lease = make()
    deaf = Worker(pool, "deaf", listens=False)
    grant = deaf.serve(tokens(B))
    deaf.step(releases=[grant.table_id])
    assert reason_of(pool, lease, list(grant.blocks.block_ids[:1])) is Reason.NO_WORKER
    off = Pool(7, B, 1 << 30, 4)
    with pytest.raises(PagepoolError, match="--fp8 is off") as caught:
        off.compression.compress(off.create_lease("me", 10.0, 0.0).lease_id, [1], 1.0)
    assert caught.value.reason is Reason.COMPRESSION_OFF


def test_clients_copy_fp8_blocks_as_they_are_and_cut_none() -> None:
    pool, lease = make()
    worker = Worker(pool, "one")
    prompt = tokens(2 * B)
    grant = worker.serve(prompt)
    compress(pool, lease, grant.blocks.block_ids[:1], [worker])
    run, copies = pool.sharing.copy_blocks(lease, grant.blocks.block_ids[:2], 3.0)
    pool.check()
    assert [unpack_entry(entry)[0] for entry in run.entries] == [Format.FP8_E4M3, Format.BF16]
    assert [(unpack_entry(one.source)[0], one.target) for one in copies] == [
        (Format.FP8_E4M3, run.entries[0]),
        (Format.BF16, run.entries[1]),
    ]
    assert [pool.block(one, 3.0).exact for one in run.block_ids] == [False, True]
    table = pool.create_table(lease, TableRequest([*prompt, 5], 3), 3.0)
    with pytest.raises(PagepoolError, match="truncate to a multiple of 8") as caught:
        pool.sharing.truncate_table(lease, table.table_id, 3, 3.0)
    assert caught.value.reason is Reason.BLOCK_COMPRESSED
    pool.sharing.truncate_table(lease, table.table_id, B, 3.0)
    pool.check()


class Hunt:
    """Random words of two workers and a client, with Recodes that are done late, or never."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        policy, kept, recent = (
            self.random.choice(list(Policy)),
            self.random.choice([0.0, 0.1]),
            self.random.randrange(3),
        )
        fp8 = Fp8(policy, idle_s=0.2, keep_recent=recent, watermark=0.5, step_bytes=2000, kept_share=kept)
        host, slab = self.random.choice([0, 4, 12]), self.random.randrange(2)
        self.pool, self.lease = make(self.random.choice([8, 20]), fp8, host, slab=slab)
        self.pool.remaps.ack_timeout_s = 1e6
        self.workers = [Worker(self.pool, name) for name in ("one", "two")]
        self.tables: dict[int, Worker] = {}
        self.now = 3.0

    def run(self, turns: int) -> None:
        actions = [self.serve, self.serve, self.recode, self.recode, self.recode, self.answer, self.answer]
        actions += [self.acknowledge, self.release, self.fork, self.truncate, self.copy, self.reclaim, self.lose]
        actions += [self.move]
        for _ in range(turns):
            self.now += 0.01
            worker = self.random.choice(self.workers)
            self.pool.tick(self.now)
            self.pool.tiering.take_hurried()
            try:
                self.random.choice(actions)(worker)
            except PagepoolError as error:
                if error.reason not in (
                    Reason.POOL_EXHAUSTED,
                    Reason.BLOCK_MOVING,
                    Reason.BLOCK_WANTED_EXACT,
                    Reason.REQUEST_TOO_LARGE,
                ):
                    raise
            self.pool.check()

    def serve(self, worker: Worker) -> None:
        prompt = tokens(self.random.randrange(1, self.random.choice([5, 5, 14]) * B), self.random.randrange(3))
        exact = self.random.random() < 0.2
        request = TableRequest(prompt, -(-(len(prompt) + 1) // B), exact=exact, partial=True)
        for grant in worker.step(self.now, creates=[request]).grants:
            worker.step(self.now, commits=[Commit(grant.table_id, prompt[grant.cached_tokens :])])
            self.tables[grant.table_id] = worker

    def recode(self, _: Worker) -> None:
        sealed = [one for one in self.pool.blocks_between(0, 10**9, None, self.now) if one.sealed]
        some = [one.block_id for one in self.random.sample(sealed, min(len(sealed), self.random.randrange(1, 6)))]
        do = self.pool.compression.compress if self.random.random() < 0.8 else self.pool.compression.decompress
        if some:
            do(self.lease, some, self.now)

    def answer(self, worker: Worker) -> None:
        if worker.hear():
            errors = [self.random.choice([GOOD, GOOD, BAD]) for _ in worker.told[0].sources]
            worker.answer(self.now, errors=errors, failed=self.random.random() < 0.1)

    def acknowledge(self, worker: Worker) -> None:
        worker.acknowledge(self.now)

    def move(self, _: Worker) -> None:
        for move, _copies in self.pool.tiering.take_copies():
            self.pool.tiering.done(move, self.now, failed=self.random.random() < 0.1)
            self.pool.check()

    def some_table(self) -> int | None:
        return self.random.choice(list(self.tables)) if self.tables else None

    def release(self, _: Worker) -> None:
        if (table_id := self.some_table()) is not None:
            self.tables.pop(table_id).step(self.now, releases=[table_id])

    def fork(self, _: Worker) -> None:
        table_id = self.some_table()
        if table_id is None or self.pool.table(table_id, self.now).num_tokens % B:
            return
        owner = self.tables[table_id]
        for grant in owner.step(self.now, reserves=[ReserveRequest(1, 1)]).grants:
            owner.step(self.now, operations=[Fork(table_id, grant.table_id)], frees=grant.blocks.block_ids)
            self.tables[grant.table_id] = owner

    def truncate(self, _: Worker) -> None:
        table_id = self.some_table()
        if table_id is None or not (length := self.pool.table(table_id, self.now).num_tokens):
            return
        owner, wanted = self.tables[table_id], self.random.randrange(length)
        sealed = wanted % B and wanted // B < length // B
        grants = owner.step(self.now, reserves=[ReserveRequest(1, 0)]).grants if sealed else ()
        if sealed and not grants:
            return
        block_id = grants[0].blocks.block_ids[0] if grants else 0
        if sealed or wanted % B == 0:
            owner.step(self.now, operations=[Truncate(table_id, wanted, block_id)])

    def copy(self, _: Worker) -> None:
        sealed = [one.block_id for one in self.pool.blocks_between(0, 10**9, None, self.now) if one.sealed]
        if sealed:
            run, _ = self.pool.sharing.copy_blocks(self.lease, self.random.choices(sealed, k=2), self.now)
            self.pool.check()
            self.pool.free_blocks(self.lease, run.block_ids, self.now)

    def reclaim(self, worker: Worker) -> None:
        worker.reclaim(self.now)

    def lose(self, worker: Worker) -> None:
        if self.random.random() < 0.5:
            return
        self.pool.fail_lease(worker.lease, self.now)
        self.pool.check()
        self.pool.process_gone(worker.lease, self.now)
        self.workers.remove(worker)
        self.tables = {table_id: owner for table_id, owner in self.tables.items() if owner is not worker}
        self.workers.append(Worker(self.pool, f"{worker.name}+"))
        self.pool.compression.take_finished()

    def end(self) -> None:
        """All is let go."""
        for worker in self.workers:
            while worker.hear():
                worker.answer(self.now)
            worker.acknowledge(self.now)
            self.pool.detach(worker.lease, self.now)
            self.pool.check()
        self.pool.release_lease(self.lease, self.now)
        move_all(self.pool, self.now)
        self.pool.check()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_meanwhile_tables_keep_their_blocks_and_all_comes_back(seed: int) -> None:
    hunt = Hunt(seed)
    hunt.run(80)
    hunt.end()
    usage = hunt.pool.usage()
    assert (usage.held, usage.quarantined, usage.available + usage.kept) == (0, 0, usage.total)
