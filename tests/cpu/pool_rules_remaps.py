"""Rules: workers hear where their blocks are now, acknowledge it, or are fenced."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from memd.core.values import Commit, Step, TableRequest
from tests.cpu.pool_machine import PoolMachine
from tests.cpu.pool_model_values import SIZE


class RemapRules(PoolMachine):
    @rule(data=st.data())
    def worker_hears_and_acknowledges(self, data: st.DataObject) -> None:
        lease = self.worker(data)
        known = self.model.leases.get(lease)
        waiting = [one for one, other in self.model.leases.items() if other.news]
        assert [one for one in self.pool.remaps.leases_with_news() if one in self.model.leases] == waiting
        if known is None or not known.worker:
            assert self.pool.remaps.take_news(lease) == []
            return
        assert self.pool.remaps.take_news(lease) == known.news
        known.news = []
        last = data.draw(st.sampled_from([known.last_remap] * 6 + [max(known.last_remap - 1, 0), known.last_remap + 1]))
        self.send(lease, Step(self.next_step(lease), acknowledged=last))

    @rule(blocks=st.integers(1, 2), tokens=st.integers(0, 1), data=st.data())
    def two_compute_the_same(self, blocks: int, tokens: int, data: st.DataObject) -> None:
        """Without looking for each other, so that blocks of both are merged."""
        lease, prompt = self.worker(data), [tokens] * blocks * SIZE
        for _ in range(2):
            request = TableRequest(prompt, blocks + 1, no_match=True)
            self.send(lease, Step(self.next_step(lease), creates=[request]))
            table = self.model.tables.get(self.model.next_id - 1)
            if table is not None and table.lease == lease and not table.tokens and len(table.blocks) > blocks:
                self.send(lease, Step(self.next_step(lease), [Commit(self.model.next_id - 1, prompt)]))

    @rule(data=st.data())
    def lost_worker_is_fenced(self, data: st.DataObject) -> None:
        lost = {
            one: lease.lock
            for one, lease in self.model.leases.items()
            if lease.worker and lease.is_lost and not lease.fenced
        }
        assert dict(self.pool.remaps.unfenced()) == lost
        lease = data.draw(st.sampled_from(list(lost))) if lost else self.worker(data)
        self.pool.remaps.fenced(lease, self.now)
        self.model.remaps.fence(lease)
        self.capacity_news()
