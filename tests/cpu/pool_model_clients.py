"""The model's answer to the commands of clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memd.core.values import TableRequest
from pagepool.errors import Reason
from tests.cpu.pool_model_values import SIZE, ModelLease, ModelTable, Refused

if TYPE_CHECKING:
    from tests.cpu.pool_model import Model


class Clients:
    """What a client's lease may do."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def client_forks(self, lease_id: int, table_id: int, now: float) -> Any:
        self.own_table(lease_id, table_id, now)
        new_id, self.model.next_id = self.model.next_id, self.model.next_id + 1
        self.model.operations.fork(table_id, new_id)
        return new_id, *self.model.run(self.model.tables[new_id].blocks), self.model.tables[new_id].cached

    def client_truncates(self, lease_id: int, table_id: int, count: int, now: float) -> Any:
        table = self.own_table(lease_id, table_id, now)
        if count > len(table.tokens):
            raise Refused(Reason.INVALID_FIELD)
        one, copies = 0, []
        if self.model.operations.must_copy(table, count):
            self.model.require(1, 1, self.model.waiting.spare(None))
            (one,) = self.model.grant(1, (lease_id, 0))
            self.model.leases[lease_id].reserve.append(one)
            self.model.order[lease_id].append(one)
            copies = [(self.model.entry(table.blocks[count // SIZE]), self.model.entry(one))]
        self.model.operations.truncate(table_id, count, one)
        return *self.model.run(table.blocks), table.cached, copies

    def client_copies(self, lease_id: int, ids: Sequence[int], now: float) -> Any:
        self.readable(lease_id, ids, now)
        spare = self.model.waiting.spare(None) - sum(map(self.model.is_spare, set(ids)))
        self.model.require(len(ids), len(ids), spare)
        spared = [one for one in dict.fromkeys(ids) if one in self.model.cached]
        for one in spared:
            self.model.cached.remove(one)
        made = self.model.grant(len(ids), (lease_id, 0))
        self.model.cached += reversed(spared)
        self.model.order[lease_id] += made
        for source, target in zip(ids, made, strict=True):
            self.model.operations.copy(source, target, SIZE)
        copies = [
            (self.model.entry(source), self.model.entry(target)) for source, target in zip(ids, made, strict=True)
        ]
        return *self.model.run(made), copies

    def readable(self, lease_id: int, ids: Sequence[int], now: float) -> None:
        self.client(lease_id, now)
        if any(one not in self.model.blocks for one in ids):
            raise Refused(Reason.BLOCK_NOT_FOUND)
        for one in ids:
            block = self.model.blocks[one]
            if block.prefix is None and lease_id not in [lease for lease, _ in block.holders]:
                raise Refused(Reason.BLOCK_NOT_SEALED)

    def client(self, lease_id: int, now: float) -> ModelLease:
        lease = self.model.leases.get(lease_id)
        if lease is None:
            raise Refused(Reason.LEASE_NOT_FOUND)
        if lease.worker:
            raise Refused(Reason.LEASE_IS_WORKERS)
        if now >= lease.deadline:
            self.expire(lease_id)
            raise Refused(Reason.LEASE_NOT_FOUND)
        return lease

    def expire(self, lease_id: int) -> None:
        self.model.end(lease_id)
        self.model.counts["lost"] += 1

    def allocate(self, lease_id: int, count: int, now: float) -> Any:
        self.client(lease_id, now)
        self.model.require(count, count, self.model.waiting.spare(None))
        ids = self.model.grant(count, (lease_id, 0))
        self.model.order[lease_id] += ids
        return self.model.run(ids)

    def free_blocks(self, lease_id: int, ids: Sequence[int], now: float) -> None:
        self.client(lease_id, now)
        if any(one not in self.model.blocks for one in ids):
            raise Refused(Reason.BLOCK_NOT_FOUND)
        if any(self.model.blocks[one].holders.count((lease_id, 0)) < count for one, count in Counter(ids).items()):
            raise Refused(Reason.BLOCK_NOT_HELD)
        for one in reversed(ids):
            block = self.model.blocks[one]
            self.model.release(one, (lease_id, 0))
            if (lease_id, 0) not in block.holders:
                self.model.order[lease_id].remove(one)

    def share(self, lease_id: int, ids: Sequence[int], now: float) -> None:
        self.readable(lease_id, ids, now)
        for one in ids:
            self.model.hold(one, (lease_id, 0))
            if one not in self.model.order[lease_id]:
                self.model.order[lease_id].append(one)

    def create_table(self, lease_id: int, request: TableRequest, now: float) -> Any:
        self.client(lease_id, now)
        matched, spare = self.model.found(request, None)
        table_id = self.model.try_table(lease_id, request, now, None)
        if table_id is None:
            self.model.require(request.num_blocks, max(request.num_blocks - len(matched), 0), spare)
            raise AssertionError("a table is refused that there is room for")
        return table_id, *self.model.run(self.model.tables[table_id].blocks), self.model.tables[table_id].cached

    def own_table(self, lease_id: int, table_id: int, now: float) -> ModelTable:
        self.client(lease_id, now)
        if table_id not in self.model.tables:
            raise Refused(Reason.TABLE_NOT_FOUND)
        if self.model.tables[table_id].lease != lease_id:
            raise Refused(Reason.TABLE_NOT_HELD)
        return self.model.tables[table_id]

    def extend_table(self, lease_id: int, table_id: int, count: int, now: float) -> Any:
        table = self.own_table(lease_id, table_id, now)
        self.model.require(len(table.blocks) + count, count, self.model.waiting.spare(None))
        ids = self.model.grant(count, (lease_id, table_id))
        table.blocks += ids
        return self.model.run(ids)
