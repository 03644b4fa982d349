"""Rules: requests that part from what is cached inside a block."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import rule

from memd.core.beginnings import MIN_RUN
from memd.core.values import Commit, LeaseState, Step, TableRequest
from tests.cpu.pool_machine import PoolMachine
from tests.cpu.pool_model_values import SIZE


class PrefixRules(PoolMachine):
    @rule(run=st.integers(MIN_RUN - 1, SIZE), data=st.data())
    def worker_parts(self, run: int, data: st.DataObject) -> None:
        """A request that parts from a matchable block after some tokens, and what becomes of it."""
        lease, prefixes = self.worker(data), list(self.model.index)
        if not prefixes:
            return
        salt, tokens = data.draw(st.sampled_from(prefixes))
        salt = data.draw(st.sampled_from([salt] * 8 + [b"salt"]))
        prompt = [*tokens[: len(tokens) - SIZE + run], 7, 7]
        request = TableRequest(prompt, -(-len(prompt) // SIZE), salt, partial=True)
        self.send(lease, Step(self.next_step(lease), creates=[request]))
        known, table_id = self.model.leases.get(lease), max(self.model.prefixes.sources, default=0)
        if table_id in self.own_tables(lease) and known is not None and known.state is LeaseState.LIVE:
            what = data.draw(st.sampled_from(["commit", "release", "nothing"]))
            commits = [Commit(table_id, [7])] if what == "commit" else []
            if self.model.workers.commits_are_lawful(lease, Step(1, commits)):
                self.send(lease, Step(self.next_step(lease), commits, [table_id] if what == "release" else []))

    @rule(blocks=st.integers(1, 3), first=st.integers(0, 1), data=st.data())
    def worker_waits(self, blocks: int, first: int, data: st.DataObject) -> None:
        """A request that another table computes the prefix of, by whoever it is, and what becomes of that table."""
        one, other = self.worker(data), self.worker(data)
        prompt = [first] * (blocks * SIZE) + [9]
        request = TableRequest(prompt, blocks + 1, wait_for_prefix=True)
        self.send(one, Step(self.next_step(one), creates=[dataclasses.replace(request, wait_for_prefix=False)]))
        table_id = max(self.own_tables(one), default=0)
        self.send(other, Step(self.next_step(other), creates=[request]))
        table = self.model.tables.get(table_id)
        known = self.model.leases.get(one)
        if table is None or known is None or known.state is not LeaseState.LIVE:
            return
        what = data.draw(st.sampled_from(["commit", "commit", "other", "release", "nothing"]))
        count = data.draw(st.sampled_from([blocks * SIZE, blocks * SIZE, SIZE, 3])) if what == "commit" else SIZE
        token = first if what == "commit" else 7
        commits = [Commit(table_id, [token] * count)] if what in {"commit", "other"} else []
        if self.model.workers.commits_are_lawful(one, Step(1, commits)):
            self.send(one, Step(self.next_step(one), commits, [table_id] if what == "release" else []))
        self.capacity_news()
