"""What random sequences of the pool's commands share: the pool, the model, and their comparison after each command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memd.core.pool import Pool
from memd.core.values import BlockState as B
from memd.core.values import (
    Commit,
    LeaseState,
    Step,
    StepOutcome,
    TableRequest,
)
from pagepool.errors import PagepoolError, Reason
from tests.cpu.pool_model import Model
from tests.cpu.pool_model_values import ACK_TIMEOUT, GEOMETRY, SIZE, TIMEOUT, TREE_SHARE, ModelLease, Refused

# A token stream is a list of blocks of one repeated token, so that prefixes often agree, and a part of a block.
streams = st.builds(
    lambda blocks, rest: [token for token in blocks for _ in range(SIZE)] + [9] * rest,
    st.sampled_from([[], [0], [0, 0], [0, 0], [0, 0, 0], [0, 1], [1]]),
    st.sampled_from([0, 1, 5]),
)
tails = st.builds(
    lambda token, count: [token] * count, st.integers(0, 1), st.sampled_from([1, 3, SIZE, SIZE, 2 * SIZE])
)
requests = st.builds(
    TableRequest,
    token_ids=streams,
    num_blocks=st.integers(0, 5),
    salt=st.sampled_from([b"", b"", b"", b"salt"]),
    no_match=st.sampled_from([False, False, False, True]),
    ref=st.integers(0, 99),
    partial=st.booleans(),
    wait_for_prefix=st.booleans(),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    arrival=st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0]),
    headroom=st.sampled_from([0, 0, 0, 1, 2]),
    num_yields=st.sampled_from([0, 0, 0, 3, 4]),
)


class PoolMachine(RuleBasedStateMachine):
    """A pool of few enough blocks that they are always short, beside its model; the rules are in pool_rules_*.py."""

    @initialize(total=st.sampled_from([3, 5, 6, 7, 9]))
    def start(self, total: int) -> None:
        self.pool = Pool(7, SIZE, 1 << 30, total)
        self.pool.declare(GEOMETRY)
        self.pool._state.promises.min_tokens, self.pool._state.promises.patience_s = SIZE, inf
        self.pool.prefixes.tree_share = TREE_SHARE
        self.model = Model(total)
        if total == 6:  # in a pool of its own size no table would be left out
            self.pool.victims.max_looked = self.model.waiting.max_looked = 4
        if total == 7:
            self.pool.victims.max_yields = self.model.waiting.max_yields = 1
        self.now = 0.0
        self.version, self.before = self.pool.version, self.seen()
        self.pool.remaps.ack_timeout_s = ACK_TIMEOUT
        for lock in ("one", "two"):
            self.attach_worker(lock, None)
        self.new_client(30.0)

    def agree(self, actual: Callable[[], Any], expected: Callable[[], Any]) -> Any:
        """Both must answer alike, or refuse for the same reason; the answer, or the reason."""
        try:
            predicted: Any = expected()
        except Refused as refusal:
            predicted = refusal.reason
        try:
            answer = actual()
        except PagepoolError as error:
            answer = error.reason
        assert answer == predicted
        return answer

    def client(self, data: st.DataObject) -> int:
        """A lease for a client's command."""
        alive = [one for one, lease in self.model.leases.items() if not lease.worker and self.now < lease.deadline]
        if data.draw(st.integers(0, 9)):
            return data.draw(st.sampled_from(alive)) if alive else self.new_client(30.0)
        return data.draw(st.integers(1, self.model.next_id))

    def worker(self, data: st.DataObject) -> int:
        """A lease for a worker's command."""
        alive = [one for one, lease in self.model.leases.items() if lease.worker and lease.state is LeaseState.LIVE]
        if data.draw(st.integers(0, 9)):
            return data.draw(st.sampled_from(alive)) if alive else self.attach_worker("one", None)
        return data.draw(st.integers(1, self.model.next_id))

    def tables(self, lease: int) -> st.SearchStrategy[int]:
        own = [one for one, table in self.model.tables.items() if table.lease == lease]
        return st.sampled_from(own * 8 + list(self.model.tables) + [self.model.next_id])

    def own_tables(self, lease: int) -> list[int]:
        return [one for one, table in self.model.tables.items() if table.lease == lease]

    def blocks(self) -> st.SearchStrategy[list[int]]:
        ids = list(self.model.blocks) or [1]
        return st.lists(st.sampled_from(ids * 4 + [self.model.next_block]), min_size=1, max_size=3)

    def new_client(self, ttl: float) -> int:
        granted = max(ttl, 1.0)
        expected = self.model.new_lease(ModelLease(False, granted, self.now + granted))
        lease = self.pool.create_lease("client", ttl, self.now)
        assert (lease.lease_id, lease.ttl_s, lease.deadline) == (expected, granted, self.now + granted)
        return expected

    def attach_worker(self, lock: str, reclaim: tuple[int, int] | None) -> int:
        def actual() -> Any:
            attached = self.pool.attach("worker", lock, TIMEOUT, self.now, reclaim)
            return attached.lease.lease_id, attached.reclaimed

        answer = self.agree(actual, lambda: self.model.workers.attach(lock, self.now, reclaim))
        if answer is Reason.LEASE_LOST:  # a lost lease has that file
            return self.attach_worker(f"{lock}-{self.model.next_id}", None)
        lease: int = answer[0]
        if not lock.startswith("two"):
            self.pool.remaps.listen(lease, self.now)
            self.model.remaps.listen(lease, self.now)
        return lease

    def reclaim(self, lease: int) -> None:
        """A worker's stream breaks, and it takes its lease back if that can be."""
        known = self.model.leases[lease]
        self.pool.stream_broken(lease)
        known.state = LeaseState.DETACHED if known.state is LeaseState.LIVE else known.state
        self.attach_worker(known.lock, (7, lease))

    def send(self, lease: int, step: Step) -> None:
        def actual() -> Any:
            return self.plain(self.pool.step(lease, step, self.now))

        if self.agree(actual, lambda: self.model.workers.step(lease, step, self.now)) is Reason.PROTOCOL_VIOLATION:
            self.pool.fail_lease(lease, self.now)
            self.model.workers.lose(lease)

    @staticmethod
    def plain(outcome: StepOutcome) -> list[Any]:
        """Grants and refusals in the order of their numbers."""
        answers: list[Any] = [
            (
                "grant",
                one.ref,
                one.table_id,
                one.cached_tokens,
                list(one.blocks.block_ids),
                list(one.blocks.entries),
                one.num_tables,
                one.copy_source,
            )
            for one in outcome.grants
        ]
        for one in outcome.refusals:
            answers.append(("refusal", one.ref, one.reason, one.available_blocks, one.held_blocks))
        return sorted(answers, key=lambda answer: answer[1])

    def next_step(self, lease: int) -> int:
        known = self.model.leases.get(lease)
        return known.last_step + 1 if known else 1

    def some_commits(self, data: st.DataObject, lease: int) -> list[Commit]:
        commits = []
        for one in self.own_tables(lease)[-3:]:
            table = self.model.tables[one]
            room = len(table.blocks) * SIZE - len(table.tokens)
            if room > 0 and data.draw(st.integers(0, 3)):
                tail = data.draw(tails)[:room]
                if self.model.workers.is_alone(table, len(tail)) or not data.draw(st.integers(0, 4)):
                    commits.append(Commit(one, tail))
        return commits

    @rule()
    def capacity_news(self) -> None:
        assert dict(self.pool.waiting.take_news()) == self.model.waiting.news()
        assert sorted(self.pool.victims.take_news()) == sorted(self.model.waiting.victim_news())

    @invariant()
    def pool_is_whole_and_equals_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        self.pool.check()
        seen = self.seen()
        assert seen == self.wanted()
        assert self.pool.version > self.version or seen == self.before, "a change did not raise the version"
        self.version, self.before = self.pool.version, seen
        self.compare_leases()
        self.compare_digests()

    def seen(self) -> Any:
        pool, counters = self.pool, self.pool.counters
        blocks = {
            one.block_id: (
                one.entry,
                one.state,
                sorted((holder.lease_id, holder.table_id, holder.ref_count) for holder in one.holders),
                one.ref_count,
                one.sealed,
                one.num_tokens,
                (one.priority, one.pinned),
            )
            for one in pool.blocks_between(0, 1 << 20, None, self.now)
        }
        tables = {}
        for listed in pool.tables_after(0, 1000, self.now):
            one = pool.table(listed.table_id, self.now)
            held = (one.lease_id, list(one.blocks.block_ids), list(one.token_ids), one.cached_tokens)
            tables[one.table_id] = (*held, one.suspended, one.priority)
        counts = (
            counters.allocated_blocks,
            counters.freed_blocks,
            counters.evicted_blocks,
            counters.prefix_hit_tokens,
            counters.refused_requests,
            counters.lost_leases,
            counters.merged_blocks,
            counters.remaps,
        )
        usage = pool.usage()
        return blocks, tables, (usage.free, usage.held, usage.cached, usage.quarantined, usage.pinned), counts

    def wanted(self) -> Any:
        model = self.model
        blocks = {
            one: (
                model.run([one])[1][0],
                self.state_of(one),
                sorted((*holder, count) for holder, count in Counter(block.holders).items()),
                len(block.holders),
                block.prefix is not None,
                len(block.tokens),
                model.kept.get(one, (0, False))[:2],
            )
            for one, block in model.blocks.items()
        }
        tables = {
            one: (table.lease, table.blocks, table.tokens, table.cached, table.suspended, table.priority)
            for one, table in model.tables.items()
        }
        names = ("allocated", "freed", "evicted", "hits", "refused", "lost", "merged", "remaps")
        states = Counter(state for _, state, *_ in blocks.values())
        pinned = sum(map(model.is_pinned, model.cached))
        usage = (len(model.free), states[B.HELD], states[B.CACHED], states[B.QUARANTINED], pinned)
        return blocks, tables, usage, tuple(model.counts[name] for name in names)

    def state_of(self, one: int) -> B:
        block = self.model.blocks[one]
        if not block.holders:
            return B.CACHED
        if block.prefix is not None:
            return B.QUARANTINED if self.model.remaps.is_retired(one) else B.HELD
        lost = self.model.leases[block.holders[0][0]].state is LeaseState.LOST
        return B.QUARANTINED if lost else B.HELD

    def compare_leases(self) -> None:
        for one, lease in self.model.leases.items():
            view = self.pool.lease(one)
            assert (view.state, view.deadline, view.is_worker) == (lease.state, lease.deadline, lease.worker)
        alive = [lease for lease in self.model.leases.values() if lease.state is not LeaseState.LOST]
        assert self.pool.num_leases == len(alive)
        assert self.pool.deadlines.next() == min((lease.due for lease in alive), default=None)

    def compare_digests(self) -> None:
        """Equal exactly where salt and all tokens up to the block's end are."""
        pairs = {(self.pool.block(one, self.now).digest, block.prefix) for one, block in self.model.blocks.items()}
        assert len(pairs) == len({digest for digest, _ in pairs}) == len({prefix for _, prefix in pairs})
