"""The model's answer to a step's operations: one after the other, each on its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memd.core.operations import CopyOnWrite, Fork, Release, Suspend, TableOperation, Take, Truncate
from memd.core.values import Step
from tests.cpu.pool_model_values import SIZE, ModelLease, ModelTable

if TYPE_CHECKING:
    from tests.cpu.pool_model import Model


class Operations:
    """What is done to the tables that a step names."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def operate(self, lease_id: int, operation: TableOperation) -> None:
        match operation:
            case Fork(table_id, new_id):
                self.model.leases[lease_id].ids.remove(new_id)
                self.fork(table_id, new_id)
            case CopyOnWrite(table_id, first, ids):
                for index, one in reversed(list(enumerate(ids, first))):
                    self.replace(table_id, index, one, SIZE)
            case Take(table_id, ids):
                for one in ids:
                    self.spend(lease_id, one, (lease_id, table_id))
                    self.model.tables[table_id].blocks.append(one)
            case Truncate(table_id, count, one):
                self.truncate(table_id, count, one)
            case Release(table_id):
                self.model.drop_table(table_id)
            case Suspend(table_id, more):
                self.suspend(table_id, more)

    def fork(self, table_id: int, new_id: int) -> None:
        table = self.model.tables[table_id]
        for one in table.blocks:
            self.model.hold(one, (table.lease, new_id))
        self.model.tables[new_id] = dataclasses.replace(
            table, blocks=[*table.blocks], tokens=[*table.tokens], yielding=None
        )

    def suspend(self, table_id: int, more: Sequence[int]) -> None:
        table = self.model.tables[table_id]
        for one in reversed(table.blocks):
            self.model.release(one, (table.lease, table_id))
        self.model.prefixes.copied(table_id)
        self.model.prefixes.drop(table_id)
        table.yields += table.yielding is not None
        table.blocks, table.cached, table.suspended, table.yielding = [], 0, True, None
        table.tokens += more

    def spend(self, lease_id: int, one: int, holder: tuple[int, int]) -> None:
        """A block of the reserve gets another holder."""
        self.model.leases[lease_id].reserve.remove(one)
        self.model.order[lease_id].remove(one)
        self.model.hold(one, holder)
        self.model.release(one, (lease_id, 0))

    def replace(self, table_id: int, index: int, one: int, length: int) -> None:
        table = self.model.tables[table_id]
        old = table.blocks[index]
        self.spend(table.lease, one, (table.lease, table_id))
        self.copy(old, one, length)
        table.blocks[index] = one
        self.model.release(old, (table.lease, table_id))

    def copy(self, source: int, target: int, length: int) -> None:
        old, new = self.model.blocks[source], self.model.blocks[target]
        new.tokens = old.tokens[:length]
        if old.prefix is not None and length == SIZE:
            new.prefix, new.identity, new.parent = old.prefix, old.identity, old.parent

    def must_copy(self, table: ModelTable, count: int) -> bool:
        if count % SIZE == 0 or count == len(table.tokens) or table.suspended:
            return False
        cut = self.model.blocks[table.blocks[count // SIZE]]
        return cut.prefix is not None or len(cut.holders) > 1

    def truncate(self, table_id: int, count: int, one: int) -> None:
        table = self.model.tables[table_id]
        for index in range(-(-len(table.tokens) // SIZE) - 1, -(-count // SIZE) - 1, -1):
            self.model.release(table.blocks.pop(index), (table.lease, table_id))
        if one:
            self.replace(table_id, count // SIZE, one, count % SIZE)
        elif count % SIZE and count < len(table.tokens):
            del self.model.blocks[table.blocks[count // SIZE]].tokens[count % SIZE :]
        del table.tokens[count:]
        if count < table.cached:
            table.cached = count // SIZE * SIZE
        self.model.prefixes.drop(table_id)

    def can(self, lease_id: int, operation: TableOperation) -> bool:
        lease = self.model.leases[lease_id]
        table = self.model.tables.get(operation.table_id)
        if table is None or table.lease != lease_id or (table.suspended and not isinstance(operation, Release)):
            return False
        match operation:
            case Fork(_, new_id):
                return new_id in lease.ids
            case CopyOnWrite(_, first, ids):
                return first + len(ids) <= len(table.blocks) and self.in_reserve(lease, ids)
            case Take(_, ids):
                return self.in_reserve(lease, ids)
            case Truncate(_, count, one):
                fits = count <= len(table.tokens) and self.must_copy(table, count) == bool(one)
                return fits and (not one or one in lease.reserve)
        return True

    @staticmethod
    def in_reserve(lease: ModelLease, ids: Sequence[int]) -> bool:
        return len(ids) > 0 and len(set(ids)) == len(ids) and set(ids) <= set(lease.reserve)

    def operates(self, lease_id: int, step: Step) -> bool:
        """Whether all operations of a step can be; they are done if so."""
        for operation in [*step.operations, *map(Release, step.releases)]:
            if not self.can(lease_id, operation):
                return False
            self.operate(lease_id, operation)
        for one in step.frees:
            if one not in self.model.leases[lease_id].reserve:
                return False
            self.model.leases[lease_id].reserve.remove(one)
            self.model.order[lease_id].remove(one)
            self.model.release(one, (lease_id, 0))
        return True
