"""Rules: steps of workers."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import rule

from memd.core.operations import ReserveRequest
from memd.core.values import (
    Commit,
    ExtendRequest,
    LeaseState,
    Step,
    TableRequest,
)
from tests.cpu.pool_machine import PoolMachine, requests, streams, tails
from tests.cpu.pool_model_values import SIZE


class WorkerRules(PoolMachine):
    @rule(blocks=st.integers(0, 3), ids=st.integers(0, 2), data=st.data())
    def worker_reserves(self, blocks: int, ids: int, data: st.DataObject) -> None:
        lease = self.worker(data)
        self.send(lease, Step(self.next_step(lease), reserves=[ReserveRequest(blocks, ids, 5)]))

    @rule(requested=st.lists(requests, min_size=1, max_size=2), data=st.data())
    def worker_creates(self, requested: list[TableRequest], data: st.DataObject) -> None:
        lease = self.worker(data)
        creates = [dataclasses.replace(request, ref=ref) for ref, request in enumerate(requested)]
        self.send(lease, Step(self.next_step(lease), creates=creates))

    @rule(prompt=streams, more=tails, salt=st.sampled_from([b"", b"", b"salt"]), keep=st.booleans(), data=st.data())
    def worker_serves(self, prompt: list[int], more: list[int], salt: bytes, keep: bool, data: st.DataObject) -> None:
        """A request from admission to its end, or nearly."""
        lease, tokens = self.worker(data), prompt + more
        request = TableRequest(prompt, -(-len(tokens) // SIZE), salt, partial=data.draw(st.booleans()))
        self.send(lease, Step(self.next_step(lease), creates=[request]))
        table_id = self.model.next_id - 1
        table = self.model.tables.get(table_id)
        if table is None or table.lease != lease or table.blocks == [] or len(table.tokens) != table.cached:
            return  # refused
        commit = Commit(table_id, tokens[table.cached : len(table.blocks) * SIZE])
        self.send(lease, Step(self.next_step(lease), [commit], [] if keep else [table_id]))

    @rule(counts=st.lists(st.integers(1, 3), min_size=1, max_size=2), data=st.data())
    def worker_extends(self, counts: list[int], data: st.DataObject) -> None:
        lease = self.worker(data)
        if own := self.own_tables(lease):
            extends = [ExtendRequest(data.draw(st.sampled_from(own)), count, ref) for ref, count in enumerate(counts)]
            self.send(lease, Step(self.next_step(lease), extends=extends))

    @rule(data=st.data())
    def worker_commits(self, data: st.DataObject) -> None:
        lease = self.worker(data)
        self.send(lease, Step(self.next_step(lease), commits=self.some_commits(data, lease)))

    @rule(requested=st.lists(requests, max_size=2), extends=st.lists(st.integers(1, 3), max_size=2), data=st.data())
    def worker_works(self, requested: list[TableRequest], extends: list[int], data: st.DataObject) -> None:
        lease = self.worker(data)
        commits = self.some_commits(data, lease)
        releases = [one for one in self.own_tables(lease) if data.draw(st.integers(0, 2)) == 2]
        left = [one for one in self.own_tables(lease) if one not in releases]
        creates = [dataclasses.replace(request, ref=ref) for ref, request in enumerate(requested)]
        more = [
            ExtendRequest(data.draw(st.sampled_from(left)), count, 10 + ref)
            for ref, count in enumerate(extends)
            if left
        ]
        self.send(lease, Step(self.next_step(lease), commits, releases, creates, more))
        self.capacity_news()

    @rule(off=st.sampled_from([0, 0, -1, 1]), tail=tails, data=st.data())
    def worker_errs(self, off: int, tail: list[int], data: st.DataObject) -> None:
        lease = self.worker(data)
        commits = [Commit(one, tail * 4) for one in data.draw(st.lists(self.tables(lease), max_size=2))]
        releases = data.draw(st.lists(self.tables(lease), max_size=2))
        extends = [
            ExtendRequest(one, 1, ref) for ref, one in enumerate(data.draw(st.lists(self.tables(lease), max_size=1)))
        ]
        self.send(lease, Step(self.next_step(lease) + off, commits, releases, (), extends))

    @rule(back=st.integers(1, 3), data=st.data())
    def worker_reclaims_and_repeats(self, back: int, data: st.DataObject) -> None:
        lease = self.worker(data)
        known = self.model.leases.get(lease)
        if known is not None and known.worker:
            self.reclaim(lease)
            if known.state is LeaseState.LIVE:
                self.send(lease, Step(known.last_step + 1 - back))
