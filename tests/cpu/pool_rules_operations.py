"""Rules: forks, copies, truncations and releases in the steps of workers."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from memd.core.operations import CopyOnWrite, Fork, Release, ReserveRequest, TableOperation, Take, Truncate
from memd.core.values import (
    Commit,
    LeaseState,
    Step,
    TableRequest,
)
from tests.cpu.pool_machine import PoolMachine, streams, tails
from tests.cpu.pool_model import Model
from tests.cpu.pool_model_values import SIZE, TIMEOUT, ModelLease, ModelTable


class OperationRules(PoolMachine):
    def some_operation(self, data: st.DataObject, lease: int, model: Model) -> TableOperation:
        """Mostly one that can be."""
        own = [one for one, table in model.tables.items() if table.lease == lease]
        table_id = data.draw(st.sampled_from(own * 8 + [model.next_id])) if own else 1
        table = model.tables.get(table_id) or ModelTable(lease, b"", [], [], 0)
        known = model.leases.get(lease) or ModelLease(True, TIMEOUT, 0.0)
        spare = known.reserve * 8 + [model.next_block]
        kind = data.draw(st.sampled_from(["fork", "fork", "copy", "take", "cut", "cut", "cut", "release"]))
        if kind == "fork":
            return Fork(table_id, data.draw(st.sampled_from(known.ids * 8 + [table_id, model.next_id])))
        if kind == "copy":
            count = data.draw(st.sampled_from([1, 1, 1, 2, 0]))
            first = data.draw(st.integers(0, len(table.blocks)))
            return CopyOnWrite(table_id, max(first - 1, 0), [*known.reserve, model.next_block][:count])
        if kind == "take":
            return Take(table_id, data.draw(st.lists(st.sampled_from(spare), min_size=1, max_size=2)))
        if kind == "release":
            return Release(table_id)
        count = data.draw(st.integers(0, len(table.tokens) + (data.draw(st.integers(0, 9)) == 9)))
        needed = count <= len(table.tokens) and model.operations.must_copy(table, count)
        wrong = data.draw(st.integers(0, 9)) == 9
        return Truncate(table_id, count, data.draw(st.sampled_from(spare)) if needed != wrong else 0)

    @rule(prompt=streams, tail=tails, copies=st.sampled_from([True, True, True, False]), data=st.data())
    def worker_branches(self, prompt: list[int], tail: list[int], copies: bool, data: st.DataObject) -> None:
        """A table, a fork of it, an append to one of them, preceded by a copy where they share, and its truncation."""
        lease, model = self.worker(data), self.model
        request = TableRequest(prompt, -(-len(prompt + tail) // SIZE))
        self.send(lease, Step(self.next_step(lease), creates=[request], reserves=[ReserveRequest(2, 1, 1)]))
        known = model.leases.get(lease)
        own = self.own_tables(lease)
        if not own or known is None or not known.reserve or not known.ids or known.state is not LeaseState.LIVE:
            return
        table_id, new_id = own[-1], known.ids[0]
        table = model.tables[table_id]
        commits = [Commit(table_id, prompt[len(table.tokens) :])] if table.tokens != prompt else []
        if not model.workers.commits_are_lawful(lease, Step(1, commits)):
            commits = []
        self.send(lease, Step(self.next_step(lease), commits, operations=[Fork(table_id, new_id)]))
        index, one = len(table.tokens) // SIZE, data.draw(st.sampled_from([table_id, new_id]))
        if index >= len(table.blocks):
            return
        copy_first = [CopyOnWrite(one, index, known.reserve[:1])] if copies else []
        self.send(lease, Step(self.next_step(lease), operations=copy_first))
        room = SIZE - len(table.tokens) % SIZE
        self.send(lease, Step(self.next_step(lease), [Commit(one, tail[:room])]))
        if one in model.tables and copies:
            length = data.draw(st.integers(0, len(model.tables[one].tokens)))
            by_copy = model.operations.must_copy(model.tables[one], length)
            if known.reserve or not by_copy:
                cut = Truncate(one, length, known.reserve[0] if by_copy else 0)
                self.send(lease, Step(self.next_step(lease), operations=[cut]))

    @rule(count=st.integers(1, 4), fill=st.booleans(), frees=st.booleans(), data=st.data())
    def worker_operates(self, count: int, fill: bool, frees: bool, data: st.DataObject) -> None:
        """Operations that build on each other: each is drawn for the tables as those before it leave them."""
        lease = self.worker(data)
        known = self.model.leases.get(lease)
        if fill and known is not None and known.worker and known.state is LeaseState.LIVE and len(known.reserve) < 2:
            self.send(lease, Step(self.next_step(lease), reserves=[ReserveRequest(2, 2, 5)]))
        commits = self.some_commits(data, lease)
        trial = self.model.trial()
        if not trial.workers.commits_are_lawful(lease, Step(1, commits)):
            commits = []
        for commit in commits:
            trial.commit(trial.tables[commit.table_id], commit.token_ids)
        operations = []
        for _ in range(count):
            operations.append(self.some_operation(data, lease, trial))
            if lease not in trial.leases or not trial.operations.can(lease, operations[-1]):
                break
            trial.operations.operate(lease, operations[-1])
        left = trial.leases[lease].reserve[:1] if frees and lease in trial.leases else []
        self.send(lease, Step(self.next_step(lease), commits, operations=operations, frees=left))
