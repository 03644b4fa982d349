"""Rules: requests that part from what is cached inside a block."""

from __future__ import annotations

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
