"""Rules: tables that are suspended and resumed, and workers that wait for blocks."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import rule

from memd.core.operations import Fork, ReserveRequest, Suspend
from memd.core.values import Commit, LeaseState, Step, TableRequest
from tests.cpu.pool_machine import PoolMachine
from tests.cpu.pool_model_values import SIZE


class WaitingRules(PoolMachine):
    @rule(blocks=st.integers(1, 4), more=st.integers(0, 1), now=st.booleans(), data=st.data())
    def table_cannot_go_on(self, blocks: int, more: int, now: bool, data: st.DataObject) -> None:
        """It asks, and perhaps for less beside it; the news is heard now or later."""
        lease = self.worker(data)
        reserves = [ReserveRequest(blocks, 0, 5, data.draw(self.tables(lease)))]
        self.send(lease, Step(self.next_step(lease), reserves=[*reserves, ReserveRequest(1, 1, 6)][: 1 + more]))
        if now:
            self.capacity_news()

    @rule(arrivals=st.permutations([1.0, 2.0, 3.0]), by=st.integers(1, 2), fork=st.booleans(), data=st.data())
    def tables_fill_the_pool(self, arrivals: list[float], by: int, fork: bool, data: st.DataObject) -> None:
        """Up to three tables of any workers take all that there is; then one of them needs more."""
        made = []
        for arrival, share in zip(arrivals, (3, 2, 1), strict=True):
            lease, table_id = self.worker(data), self.model.next_id
            blocks = -(-self.model.available // share)
            creates = [TableRequest((), blocks, arrival=arrival, ref=1)]
            self.send(lease, Step(self.next_step(lease), creates=creates, reserves=[ReserveRequest(0, 1, 2)]))
            if table_id in self.own_tables(lease):
                made.append((lease, table_id))
        if not made:
            return
        lease, table_id = data.draw(st.sampled_from(made))
        known = self.model.leases[lease]
        if fork and known.ids:
            self.send(lease, Step(self.next_step(lease), operations=[Fork(table_id, known.ids[0])]))
            lease, table_id = data.draw(st.sampled_from(made))
        self.send(lease, Step(self.next_step(lease), reserves=[ReserveRequest(by, 0, 5, table_id)]))
        self.capacity_news()

    @rule(data=st.data())
    def victims_yield(self, data: st.DataObject) -> None:
        """As well-behaved workers do, all or some."""
        for one, table in list(self.model.tables.items()):
            named = table.yielding is not None and self.model.leases[table.lease].state is LeaseState.LIVE
            if named and self.now < self.model.leases[table.lease].deadline and data.draw(st.integers(0, 3)):
                self.suspend(table.lease, one, data)
        self.capacity_news()

    @rule(data=st.data())
    def who_has_yielded_runs_again_and_another_lacks_blocks(self, data: st.DataObject) -> None:
        """Which may not be named again, if it has yielded often enough."""
        tables = self.model.tables.items()
        yielded = [one for one, table in tables if table.suspended and table.yields]
        yielded = [one for one in yielded if self.model.waiting.is_live(self.model.tables[one].lease)]
        if not yielded:
            return
        again = data.draw(st.sampled_from(yielded))
        lease = self.model.tables[again].lease
        resume = TableRequest((), 1, no_match=True, ref=1, resume_table_id=again)
        self.send(lease, Step(self.next_step(lease), creates=[resume]))
        other = self.worker(data)
        lacks = ReserveRequest(self.model.available + 1, 0, 5, data.draw(self.tables(other)))
        self.send(other, Step(self.next_step(other), reserves=[lacks]))
        self.capacity_news()

    @rule(back=st.integers(1, 4), data=st.data())
    def who_has_to_yield_comes_back(self, back: int, data: st.DataObject) -> None:
        """It hears what there is, and repeats its last steps, after each of which it hears what there is."""
        leases = {table.lease for table in self.model.tables.values() if table.yielding is not None}
        live = sorted(filter(self.model.waiting.is_live, leases))
        if not live:
            return
        lease = data.draw(st.sampled_from(live))
        self.reclaim(lease)
        known = self.model.leases[lease]
        self.capacity_news()
        for step_id in range(max(known.last_step + 1 - back, 1), known.last_step + 1):
            if known.state is LeaseState.LIVE:
                self.send(lease, Step(step_id))
                self.capacity_news()

    @rule(data=st.data())
    def worker_suspends(self, data: st.DataObject) -> None:
        lease = self.worker(data)
        self.suspend(lease, data.draw(self.tables(lease)), data)

    def suspend(self, lease: int, table_id: int, data: st.DataObject) -> None:
        commits = self.some_commits(data, lease)
        tokens = [7] * data.draw(st.integers(0, 2))
        self.send(lease, Step(self.next_step(lease), commits, operations=[Suspend(table_id, tokens)]))

    @rule(blocks=st.integers(0, 5), headroom=st.integers(0, 2), wrong=st.integers(0, 19), data=st.data())
    def worker_resumes(self, blocks: int, headroom: int, wrong: int, data: st.DataObject) -> None:
        suspended = {one: table for one, table in self.model.tables.items() if table.suspended}
        leases = [table.lease for table in suspended.values() if self.model.waiting.is_live(table.lease)]
        lease = data.draw(st.sampled_from(leases)) if leases else self.worker(data)
        own = [one for one, table in suspended.items() if table.lease == lease]
        table_id = data.draw(st.sampled_from(own)) if own and wrong else data.draw(self.tables(lease))
        tokens = [1] if wrong == 1 else []
        no_match, partial = data.draw(st.integers(0, 4)) == 0, data.draw(st.booleans())
        request = TableRequest(tokens, blocks, no_match=no_match, partial=partial, headroom=headroom)
        resume = dataclasses.replace(request, ref=1, resume_table_id=table_id)
        creates = [resume, request] if data.draw(st.booleans()) else [resume]
        self.send(lease, Step(self.next_step(lease), creates=creates))


class UrgentRules(PoolMachine):
    @rule(prompt=st.integers(1, 3), room=st.integers(0, 1), more=st.integers(1, 2), data=st.data())
    def more_urgent_request_finds_what_another_has(
        self, prompt: int, room: int, more: int, data: st.DataObject
    ) -> None:
        """Of two tables that fill the pool one has a prompt; a request that begins alike lacks blocks beside those."""
        tokens, lease, table_id = [0] * (prompt * SIZE), self.worker(data), self.model.next_id
        low = TableRequest(tokens, prompt + room, no_match=True, ref=1)
        high = TableRequest((), max(self.model.available - prompt - room, 0), priority=2, ref=2)
        self.send(lease, Step(self.next_step(lease), creates=[low, high]))
        if table_id in self.own_tables(lease) and self.model.tables[table_id].blocks:
            self.send(lease, Step(self.next_step(lease), [Commit(table_id, tokens)]))
        other = self.worker(data)
        asked = TableRequest([*tokens, 1], prompt + more, priority=1, ref=3)
        self.send(other, Step(self.next_step(other), creates=[asked]))
        self.capacity_news()

    @rule(back=st.integers(0, 3), data=st.data())
    def who_was_told_of_blocks_comes_back(self, back: int, data: st.DataObject) -> None:
        """And repeats its last steps, after each of which it hears what there is."""
        told = sorted(filter(self.model.waiting.is_live, self.model.waiting.told))
        if not told:
            return
        lease = data.draw(st.sampled_from(told))
        self.reclaim(lease)
        known = self.model.leases[lease]
        for step_id in range(max(known.last_step + 1 - back, 1), known.last_step + 1):
            self.capacity_news()
            if known.state is LeaseState.LIVE:
                self.send(lease, Step(step_id))
        self.capacity_news()
