"""What lies in the pool's memory while blocks change formats and tiers: every sealed block holds its own KV, and exact
ones nothing that was computed from lossy ones; workers read what their tables say, as far as they have heard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from memd.core.fp8 import Fp8, Policy
from memd.core.operations import Fork, ReserveRequest, Suspend, Truncate
from memd.core.recodes import Recode, RecodeNews
from memd.core.values import BlockCopy, Commit, Grant, TableRequest
from pagepool.errors import PagepoolError, Reason
from tests.cpu.bytes_rig import Computer, Memory, columns, meanings
from tests.cpu.compression_rig import BAD, GOOD, B, make, tokens

REFUSED = (Reason.POOL_EXHAUSTED, Reason.BLOCK_MOVING, Reason.BLOCK_WANTED_EXACT, Reason.NO_WORKER)


class ByteHunt:
    """Random words of workers and a client over a pool with both tiers and formats."""

    def __init__(self, seed: int) -> None:
        self.random, self.now, self.memory = Random(seed), 3.0, Memory()
        choice, kept = self.random.choice, self.random.choice([0.0, 0.1])
        fp8 = Fp8(choice(list(Policy)), 0.2, self.random.randrange(3), 0.5, 2000, kept)
        self.pool, self.lease = make(
            choice([8, 14, 20]), choice([fp8, fp8, None]), choice([2, 4, 12, 12]), slab=choice([0, 1])
        )
        self.pool.remaps.ack_timeout_s = 1e6
        self.workers = [Computer(self.pool, name, self.memory) for name in ("one", "two")]
        self.moves: list[tuple[Recode, list[BlockCopy]]] = []
        self.told: dict[int, list[RecodeNews]] = {}
        self.meant: dict[bytes, list[int]] = {}
        self.kept: dict[int, list[int]] = {}  # of suspended tables
        self.stopped: list[tuple[Computer, list[int]]] = []  # lost ones, and what they may still write

    def publish(self) -> None:
        """What memd does after each command."""
        for worker in self.workers:
            worker.inbox += self.pool.remaps.take_news(worker.lease)
            worker.hear()
        self.pool.compression.take_finished()
        self.copy(self.pool.tiering.take_hurried())
        for move, copies in self.pool.tiering.take_copies():
            at_once = self.random.random() < 0.5
            self.copy(copies if at_once else ())
            self.moves.append((move, [] if at_once else copies))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for one in copies:
            self.memory.copy(one.source, one.target)

    def verify(self) -> None:
        """Every sealed block is what its digest says."""
        self.pool.check()
        store = self.pool._state.store
        assert store is not None
        for place in store.blocks.frame_of.values():
            if store.blocks.prefixes[place]:
                kv, want = self.memory.read(store.entry(place)), self.meant[store.blocks.digests[place]]
                assert [one and one[0] for one in kv] == want, f"block {store.blocks.ids[place]} in place {place}"
                lossy = any(one is not None and one[1] for one in kv)
                assert store.blocks.lossy[place] or not lossy, f"block {store.blocks.ids[place]} is not exact"

    def learn(self, worker: Computer, table_id: int) -> None:
        """After a commit: what the digests of the table's blocks mean."""
        state = self.pool._state
        assert state.store is not None
        meant = meanings(worker.words[table_id])
        for index, place in enumerate(state.tables[table_id].frames[: len(meant) // B]):
            self.meant[state.store.blocks.digests[place]] = meant[index * B : (index + 1) * B]

    def run(self, turns: int) -> None:
        often = [self.serve, self.serve, self.grow, self.grow, self.recode, self.answer, self.answer, self.moved]
        often += [self.release, self.release, self.acknowledge, self.resume]
        seldom = [self.hear, self.fork, self.truncate, self.client_copy]
        seldom += [self.suspend, self.reclaim, self.lose, self.scribble, self.client]
        for _ in range(turns):
            self.now += 0.01
            if self.random.random() < 0.3:
                self.pool.tick(self.now)
                self.publish()
            action: Callable[[Computer], None] = self.random.choice([*often, *seldom])
            try:
                action(self.random.choice(self.workers))
            except PagepoolError as error:
                if error.reason not in (*REFUSED, Reason.COMPRESSION_OFF, Reason.REQUEST_TOO_LARGE):
                    raise
            self.publish()
            self.verify()

    def serve(self, worker: Computer) -> None:
        most = self.random.choice([5, 5, 5, 16])  # blocks: now and then more than the device has
        prompt = tokens(self.random.randrange(1, most * B), self.random.randrange(3))
        some = {name: self.random.random() < share for name, share in (("exact", 0.3), ("partial", 0.7))}
        for grant in worker.step(self.now, creates=[TableRequest(prompt, -(-(len(prompt) + 1) // B), **some)]).grants:
            self.publish()
            worker.granted(grant, prompt)
            self.kept[grant.table_id] = prompt

    def grow(self, worker: Computer) -> None:
        tables = [one for one in worker.views if len(worker.words[one]) < len(self.kept[one])]
        for table_id in self.random.sample(tables, min(1, len(tables))):
            done = len(worker.words[table_id])
            more = self.kept[table_id][done : done + self.random.randrange(1, 3 * B)]
            worker.compute(table_id, more)
            if self.random.random() < 0.5:
                self.pool.tick(self.now)  # while the step is in flight
                self.publish()
            worker.step(self.now, commits=[Commit(table_id, more)])
            self.learn(worker, table_id)

    def some_table(self, worker: Computer) -> int | None:
        return self.random.choice(list(worker.views)) if worker.views else None

    def recode(self, _: Computer) -> None:
        sealed = [one for one in self.pool.blocks_between(0, 10**9, None, self.now) if one.sealed]
        some = [one.block_id for one in self.random.sample(sealed, min(len(sealed), self.random.choice([1, 1, 2, 4])))]
        do = self.pool.compression.compress if self.random.random() < 0.7 else self.pool.compression.decompress
        if some:
            do(self.lease, some, self.now)

    def answer(self, worker: Computer) -> None:
        if worker.hear():
            news, failed = worker.told[0], self.random.random() < 0.1
            for source, target in zip(news.sources, news.targets, strict=True):
                self.memory.copy(source, target)
            errors = [self.random.choice([GOOD, GOOD, BAD]) for _ in news.sources]
            self.pool.compression.take_finished()
            worker.answer(self.now, errors=errors, failed=failed)

    def moved(self, _: Computer) -> None:
        for move, copies in self.moves:
            self.copy(copies)
            self.pool.tiering.done(move, self.now, failed=self.random.random() < 0.1)
        self.moves.clear()

    def hear(self, worker: Computer) -> None:
        worker.listen_to_remaps()

    def acknowledge(self, worker: Computer) -> None:
        worker.listen_to_remaps()
        worker.step(self.now, acknowledged=worker.heard)

    def release(self, worker: Computer) -> None:
        if (table_id := self.some_table(worker)) is not None:
            worker.step(self.now, releases=[table_id])
            self.forget(worker, table_id)

    def forget(self, worker: Computer, table_id: int) -> None:
        for known in (worker.views, worker.words, worker.sources):
            known.pop(table_id, None)  # type: ignore[attr-defined]

    def reserve(self, worker: Computer, num_tables: int) -> Grant | None:
        grants = worker.step(self.now, reserves=[ReserveRequest(1, num_tables)]).grants
        self.publish()
        return grants[0] if grants else None

    def fork(self, worker: Computer) -> None:
        table_id = self.some_table(worker)
        if table_id is None or len(worker.words[table_id]) % B or (grant := self.reserve(worker, 1)) is None:
            return
        worker.step(self.now, operations=[Fork(table_id, grant.table_id)], frees=grant.blocks.block_ids)
        worker.views[grant.table_id] = [list(block) for block in worker.views[table_id]]
        worker.words[grant.table_id] = list(worker.words[table_id])
        for one in (table_id, grant.table_id):  # what both have behind it is nobody's to write
            self.kept[one] = list(worker.words[table_id])

    def truncate(self, worker: Computer) -> None:
        table_id = self.some_table(worker)
        if table_id is None or not (length := len(worker.words[table_id])):
            return
        wanted, shared = self.random.randrange(length), len(self.kept[table_id]) == length
        by_copy = bool(wanted % B) and wanted // B < length // B
        if shared or (wanted % B and not by_copy) or (grant := self.reserve(worker, 0) if by_copy else 0) is None:
            return
        worker.copy_part(table_id)
        view, block_id = worker.views[table_id], 0
        if isinstance(grant, Grant):
            (block_id,), (entry,) = columns(grant)
            self.memory.copy(view[wanted // B][1], entry)
            view[wanted // B] = [block_id, entry]
        del view[-(-wanted // B) : -(-length // B)]
        worker.step(self.now, operations=[Truncate(table_id, wanted, block_id)])
        worker.words[table_id] = worker.words[table_id][:wanted]
        self.kept[table_id] = self.kept[table_id][: min(len(view) * B, len(self.kept[table_id]))]

    def suspend(self, worker: Computer) -> None:
        if (table_id := self.some_table(worker)) is not None and len(worker.words[table_id]) < len(self.kept[table_id]):
            rest = self.kept[table_id][len(worker.words[table_id]) :]
            worker.step(self.now, operations=[Suspend(table_id, rest)])
            del worker.views[table_id]

    def resume(self, worker: Computer) -> None:
        for table_id in [one for one in worker.words if one not in worker.views][:1]:
            prompt = self.kept[table_id]
            request = TableRequest((), -(-(len(prompt) + 1) // B), resume_table_id=table_id, partial=True)
            worker.sources.pop(table_id, None)
            for grant in worker.step(self.now, creates=[request]).grants:
                self.publish()
                worker.granted(grant, prompt)

    def client_copy(self, _: Computer) -> None:
        sealed = [one for one in self.pool.blocks_between(0, 10**9, None, self.now) if one.sealed]
        if sealed:
            ids = [one.block_id for one in self.random.choices(sealed, k=2)]
            run, copies = self.pool.sharing.copy_blocks(self.lease, ids, self.now)
            self.copy(copies)
            self.verify()
            self.pool.free_blocks(self.lease, run.block_ids, self.now)

    def client(self, _: Computer) -> None:
        prompt = tokens(self.random.randrange(1, 5 * B), self.random.randrange(3))
        table = self.pool.create_table(self.lease, TableRequest(prompt, -(-(len(prompt) + 1) // B)), self.now)
        self.publish()
        if (wanted := self.random.randrange(table.num_tokens + 1)) < table.num_tokens:
            try:
                self.copy(self.pool.sharing.truncate_table(self.lease, table.table_id, wanted, self.now)[1])
            except PagepoolError as error:
                if error.reason not in (Reason.BLOCK_COMPRESSED, Reason.POOL_EXHAUSTED):
                    raise
        self.verify()
        self.pool.release_table(self.lease, table.table_id, self.now)

    def reclaim(self, worker: Computer) -> None:
        worker.reclaim(self.now)
        worker.inbox.clear()

    def lose(self, worker: Computer) -> None:
        if self.random.random() < 0.8:
            return
        writable = [entry for news in worker.told for entry in news.targets]
        for table_id, view in worker.views.items():
            writable += [entry for _, entry in view[-(-len(worker.words[table_id]) // B) :]]
        self.pool.fail_lease(worker.lease, self.now)
        self.workers[self.workers.index(worker)] = Computer(self.pool, f"{worker.name}+", self.memory)
        self.stopped.append((worker, writable))

    def scribble(self, _: Computer) -> None:
        """Lost workers write where they may, are fenced, or are gone."""
        for _, writable in self.stopped:
            for entry in writable:
                self.memory.write(entry, [(0, True)] * B)
        if self.stopped and self.random.random() < 0.5:
            self.pool.remaps.fenced(self.stopped[0][0].lease, self.now)
        elif self.stopped:
            self.pool.process_gone(self.stopped.pop(0)[0].lease, self.now)

    def end(self) -> None:
        """All is let go."""
        for worker, _ in self.stopped:
            self.pool.process_gone(worker.lease, self.now)
        for worker in self.workers:
            self.pool.detach(worker.lease, self.now)
        self.pool.release_lease(self.lease, self.now)
        self.publish()
        while self.moves:
            self.moved(self.workers[0])
            self.publish()
        self.verify()


@pytest.mark.parametrize("seed", range(60))
def test_every_block_holds_its_own_kv_wherever_it_is(seed: int) -> None:
    hunt = ByteHunt(seed)
    hunt.run(120)
    hunt.end()
    usage = hunt.pool.usage()
    assert (usage.held, usage.quarantined, usage.available + usage.kept) == (0, 0, usage.total)
