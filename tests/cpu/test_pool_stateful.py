"""Random command sequences against a naive model of the pool, with check() after each; and bugs planted to be found.

The model knows contents where the pool knows digests, and lists where the pool has columns and queues.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from memd.core.block import Blocks
from memd.core.draft import Draft
from memd.core.errors import InvariantError
from memd.core.geometry import Geometry
from memd.core.lease import MAX_REPLAYED_STEPS, Lease
from memd.core.operations import CopyOnWrite, Fork, Release, ReserveRequest, TableOperation, Take, Truncate
from memd.core.pool import Pool
from memd.core.prefix import PrefixIndex
from memd.core.state import Plan, PoolState, pack_tokens
from memd.core.stepping import Stepper
from memd.core.store import BlockStore
from memd.core.table import Table
from memd.core.values import BlockState as B
from memd.core.values import (
    Commit,
    ExtendRequest,
    LeaseState,
    PinRequest,
    RefusalReason,
    Step,
    StepOutcome,
    TableRequest,
)
from memd.core.workers import WorkerLeases
from pagekernels.layout import Format, LayerShape
from pagepool.errors import PagepoolError, Reason

SIZE = 8
TIMEOUT = 6.0
UNITS = Format.BF16.itemsize
GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.BF16, False, 1, b"w" * 32, "model")


class Refused(Exception):  # noqa: N818
    """The model's prediction of an error."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class ModelBlock:
    frame: int
    holders: list[tuple[int, int]]  # (lease, table or 0), one entry per reference
    tokens: list[int] = field(default_factory=list)
    prefix: tuple[bytes, tuple[int, ...]] | None = None  # once sealed: salt, and all tokens up to its end
    identity: int = 0
    parent: int = 0


@dataclass
class ModelTable:
    lease: int
    salt: bytes
    blocks: list[int]
    tokens: list[int]
    cached: int


@dataclass
class ModelLease:
    worker: bool
    ttl: float
    deadline: float
    lock: str = ""
    state: LeaseState = LeaseState.LIVE
    last_step: int = 0
    answers: dict[int, Any] = field(default_factory=dict)
    replaying: bool = False
    reserve: list[int] = field(default_factory=list)  # block ids
    ids: list[int] = field(default_factory=list)  # of tables to come


class Model:
    """What the pool should do, in the plainest way."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = list(range(total))
        self.blocks: dict[int, ModelBlock] = {}
        self.cached: list[int] = []
        self.index: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.tables: dict[int, ModelTable] = {}
        self.leases: dict[int, ModelLease] = {}
        self.next_block = self.next_id = 1
        self.counts: Counter[str] = Counter()
        self.starving: dict[int, tuple[int, int]] = {}
        self.kept: dict[int, tuple[int, bool, float]] = {}  # by block: priority, pinned, until when
        self.order: dict[int, list[int]] = {}  # by lease: blocks it holds directly, in the order it first took them

    # -- blocks

    @property
    def available(self) -> int:
        return len(self.free) + sum(not self.is_pinned(one) for one in self.cached)

    def is_pinned(self, one: int) -> bool:
        return one in self.kept and self.kept[one][1]

    def is_spare(self, one: int) -> bool:
        return not self.blocks[one].holders and not self.is_pinned(one)

    def run(self, ids: Iterable[int]) -> tuple[list[int], list[int]]:
        ids = list(ids)
        return ids, [int(Format.BF16) << 29 | self.blocks[one].frame * UNITS for one in ids]

    def grant(self, count: int, holder: tuple[int, int]) -> list[int]:
        while len(self.free) < count:
            # The first of the lowest priority: the list is in the order of release.
            victim = min((one for one in self.cached if not self.is_pinned(one)), key=self.priority)
            self.cached.remove(victim)
            self.drop(victim)
            self.counts["evicted"] += 1
        ids = list(range(self.next_block, self.next_block + count))
        for one in ids:
            self.blocks[one] = ModelBlock(self.free.pop(0), [holder])
        self.next_block += count
        self.counts["allocated"] += count
        return ids

    def priority(self, one: int) -> int:
        return self.kept[one][0] if one in self.kept else 0

    def drop(self, one: int) -> None:
        block = self.blocks.pop(one)
        self.kept.pop(one, None)
        if block.prefix is not None and self.index.get(block.prefix) == one:
            del self.index[block.prefix]
        self.free.append(block.frame)

    def hold(self, one: int, holder: tuple[int, int]) -> None:
        if not self.blocks[one].holders:
            self.cached.remove(one)
        self.blocks[one].holders.append(holder)

    def release(self, one: int, holder: tuple[int, int]) -> None:
        block = self.blocks[one]
        block.holders.remove(holder)
        if block.holders:
            return
        self.counts["returned"] += 1
        if block.prefix is not None and self.index.setdefault(block.prefix, one) == one:
            self.cached.append(one)
        else:
            self.counts["freed"] += 1
            self.drop(one)

    def match(self, request: TableRequest) -> list[int]:
        return [] if request.no_match else self.prefix(request.token_ids, request.salt, len(request.token_ids))

    def prefix(self, tokens: Sequence[int], salt: bytes, end: int) -> list[int]:
        found: list[int] = []
        identity = 0
        for stop in range(SIZE, end, SIZE):
            one = self.index.get((salt, tuple(tokens[:stop])))
            if one is None or self.blocks[one].parent != identity:
                break
            found.append(one)
            identity = self.blocks[one].identity
        return found

    def commit(self, table: ModelTable, tokens: Sequence[int]) -> None:
        for token in tokens:
            index = len(table.tokens) // SIZE
            table.tokens.append(token)
            self.blocks[table.blocks[index]].tokens.append(token)
            if len(table.tokens) % SIZE == 0:
                self.seal(table, index)

    def seal(self, table: ModelTable, index: int) -> None:
        one = table.blocks[index]
        block = self.blocks[one]
        prefix = (table.salt, tuple(table.tokens[: (index + 1) * SIZE]))
        block.prefix, block.identity = prefix, one
        block.parent = self.blocks[table.blocks[index - 1]].identity if index else 0
        first = self.index.setdefault(prefix, one)
        if first != one and self.blocks[first].parent == block.parent:
            block.identity = self.blocks[first].identity
        elif first != one:
            self.index[prefix] = one
            if not self.blocks[first].holders:
                self.cached.remove(first)
                self.counts["evicted"] += 1
                self.drop(first)

    # -- tables

    def try_table(self, lease: int, request: TableRequest) -> tuple[int, int, Any]:
        """(spare, matched, granted table id or None)."""
        matched = self.match(request)
        fresh = max(request.num_blocks - len(matched), 0)
        spare = self.available - sum(map(self.is_spare, matched))
        if request.num_blocks > self.total or fresh > spare:
            return spare, len(matched), None
        table_id, self.next_id = self.next_id, self.next_id + 1
        for one in matched:
            self.hold(one, (lease, table_id))
        if not request.no_match:
            self.counts["hits"] += len(matched) * SIZE
        blocks = matched + self.grant(fresh, (lease, table_id))
        tokens = list(request.token_ids[: len(matched) * SIZE])
        self.tables[table_id] = ModelTable(lease, request.salt, blocks, tokens, len(tokens))
        return spare, len(matched), table_id

    def drop_table(self, table_id: int) -> None:
        table = self.tables.pop(table_id)
        for one in reversed(table.blocks):
            self.release(one, (table.lease, table_id))

    def end(self, lease_id: int) -> None:
        for table_id in [one for one, table in self.tables.items() if table.lease == lease_id]:
            self.drop_table(table_id)
        for one in reversed(self.order.pop(lease_id)):
            for _ in range(self.blocks[one].holders.count((lease_id, 0))):
                self.release(one, (lease_id, 0))
        del self.leases[lease_id]
        self.starving.pop(lease_id, None)

    # -- operations: one after the other, each on its own

    def operate(self, lease_id: int, operation: TableOperation) -> None:
        match operation:
            case Fork(table_id, new_id):
                self.leases[lease_id].ids.remove(new_id)
                self.fork(table_id, new_id)
            case CopyOnWrite(table_id, first, ids):
                for index, one in reversed(list(enumerate(ids, first))):
                    self.replace(table_id, index, one, SIZE)
            case Take(table_id, ids):
                for one in ids:
                    self.spend(lease_id, one, (lease_id, table_id))
                    self.tables[table_id].blocks.append(one)
            case Truncate(table_id, count, one):
                self.truncate(table_id, count, one)
            case Release(table_id):
                self.drop_table(table_id)

    def fork(self, table_id: int, new_id: int) -> None:
        table = self.tables[table_id]
        for one in table.blocks:
            self.hold(one, (table.lease, new_id))
        self.tables[new_id] = dataclasses.replace(table, blocks=[*table.blocks], tokens=[*table.tokens])

    def spend(self, lease_id: int, one: int, holder: tuple[int, int]) -> None:
        """A block of the reserve gets another holder."""
        self.leases[lease_id].reserve.remove(one)
        self.order[lease_id].remove(one)
        self.hold(one, holder)
        self.release(one, (lease_id, 0))

    def replace(self, table_id: int, index: int, one: int, length: int) -> None:
        table = self.tables[table_id]
        old = table.blocks[index]
        self.spend(table.lease, one, (table.lease, table_id))
        self.copy(old, one, length)
        table.blocks[index] = one
        self.release(old, (table.lease, table_id))

    def copy(self, source: int, target: int, length: int) -> None:
        old, new = self.blocks[source], self.blocks[target]
        new.tokens = old.tokens[:length]
        if old.prefix is not None and length == SIZE:
            new.prefix, new.identity, new.parent = old.prefix, old.identity, old.parent

    def must_copy(self, table: ModelTable, count: int) -> bool:
        if count % SIZE == 0 or count == len(table.tokens):
            return False
        cut = self.blocks[table.blocks[count // SIZE]]
        return cut.prefix is not None or len(cut.holders) > 1

    def truncate(self, table_id: int, count: int, one: int) -> None:
        table = self.tables[table_id]
        for index in range(-(-len(table.tokens) // SIZE) - 1, -(-count // SIZE) - 1, -1):
            self.release(table.blocks.pop(index), (table.lease, table_id))
        if one:
            self.replace(table_id, count // SIZE, one, count % SIZE)
        elif count % SIZE and count < len(table.tokens):
            del self.blocks[table.blocks[count // SIZE]].tokens[count % SIZE :]
        del table.tokens[count:]
        table.cached = min(table.cached, count // SIZE * SIZE)

    def can(self, lease_id: int, operation: TableOperation) -> bool:
        lease = self.leases[lease_id]
        table = self.tables.get(operation.table_id)
        if table is None or table.lease != lease_id:
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
            if one not in self.leases[lease_id].reserve:
                return False
            self.leases[lease_id].reserve.remove(one)
            self.order[lease_id].remove(one)
            self.release(one, (lease_id, 0))
        return True

    # -- pins

    def keep(self, one: int, retention: tuple[int, bool, float] | None) -> None:
        was = self.is_pinned(one)
        self.kept.pop(one, None)
        if retention is not None:
            self.kept[one] = retention
        if one in self.cached:
            self.cached.remove(one)
            self.cached.append(one)
            self.counts["returned"] += was

    def pin(self, tokens: Sequence[int], salt: bytes, retention: tuple[int, bool, float] | None) -> Any:
        found = self.prefix(tokens, salt, len(tokens) + 1)
        if not found:
            raise Refused(Reason.PREFIX_NOT_FOUND)
        pinned = {one for one, (_, is_pinned, _) in self.kept.items() if is_pinned}
        if retention is not None and retention[1] and len(pinned | set(found)) > self.total // 2:
            raise Refused(Reason.PIN_LIMIT)
        for one in reversed(found):
            if retention is not None or one in self.kept:
                self.keep(one, retention)
        return len(found) * SIZE, len(found)

    # -- client commands

    def client_forks(self, lease_id: int, table_id: int, now: float) -> Any:
        self.own_table(lease_id, table_id, now)
        new_id, self.next_id = self.next_id, self.next_id + 1
        self.fork(table_id, new_id)
        return new_id, *self.run(self.tables[new_id].blocks), self.tables[new_id].cached

    def client_truncates(self, lease_id: int, table_id: int, count: int, now: float) -> Any:
        table = self.own_table(lease_id, table_id, now)
        if count > len(table.tokens):
            raise Refused(Reason.INVALID_FIELD)
        one, copies = 0, []
        if self.must_copy(table, count):
            self.require(1, 1, self.available)
            (one,) = self.grant(1, (lease_id, 0))
            self.leases[lease_id].reserve.append(one)
            self.order[lease_id].append(one)
            copies = [(self.entry(table.blocks[count // SIZE]), self.entry(one))]
        self.truncate(table_id, count, one)
        return *self.run(table.blocks), table.cached, copies

    def client_copies(self, lease_id: int, ids: Sequence[int], now: float) -> Any:
        self.readable(lease_id, ids, now)
        spare = self.available - sum(map(self.is_spare, set(ids)))
        self.require(len(ids), len(ids), spare)
        spared = [one for one in dict.fromkeys(ids) if one in self.cached]
        for one in spared:
            self.cached.remove(one)
        made = self.grant(len(ids), (lease_id, 0))
        self.cached += reversed(spared)
        self.order[lease_id] += made
        for source, target in zip(ids, made, strict=True):
            self.copy(source, target, SIZE)
        copies = [(self.entry(source), self.entry(target)) for source, target in zip(ids, made, strict=True)]
        return *self.run(made), copies

    def entry(self, one: int) -> int:
        return self.run([one])[1][0]

    def readable(self, lease_id: int, ids: Sequence[int], now: float) -> None:
        self.client(lease_id, now)
        if any(one not in self.blocks for one in ids):
            raise Refused(Reason.BLOCK_NOT_FOUND)
        for one in ids:
            block = self.blocks[one]
            if block.prefix is None and lease_id not in [lease for lease, _ in block.holders]:
                raise Refused(Reason.BLOCK_NOT_SEALED)

    def client(self, lease_id: int, now: float) -> ModelLease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise Refused(Reason.LEASE_NOT_FOUND)
        if lease.worker:
            raise Refused(Reason.LEASE_IS_WORKERS)
        if now >= lease.deadline:
            self.expire(lease_id)
            raise Refused(Reason.LEASE_NOT_FOUND)
        return lease

    def expire(self, lease_id: int) -> None:
        self.end(lease_id)
        self.counts["lost"] += 1

    def new_lease(self, lease: ModelLease) -> int:
        self.leases[self.next_id] = lease
        self.order[self.next_id] = []
        self.next_id += 1
        return self.next_id - 1

    def require(self, in_all: int, fresh: int, spare: int) -> None:
        if in_all > self.total:
            raise Refused(Reason.REQUEST_TOO_LARGE)
        if fresh > spare:
            self.counts["refused"] += 1
            raise Refused(Reason.POOL_EXHAUSTED)

    def allocate(self, lease_id: int, count: int, now: float) -> Any:
        self.client(lease_id, now)
        self.require(count, count, self.available)
        ids = self.grant(count, (lease_id, 0))
        self.order[lease_id] += ids
        return self.run(ids)

    def free_blocks(self, lease_id: int, ids: Sequence[int], now: float) -> None:
        self.client(lease_id, now)
        if any(one not in self.blocks for one in ids):
            raise Refused(Reason.BLOCK_NOT_FOUND)
        if any(self.blocks[one].holders.count((lease_id, 0)) < count for one, count in Counter(ids).items()):
            raise Refused(Reason.BLOCK_NOT_HELD)
        for one in reversed(ids):
            block = self.blocks[one]
            self.release(one, (lease_id, 0))
            if (lease_id, 0) not in block.holders:
                self.order[lease_id].remove(one)

    def share(self, lease_id: int, ids: Sequence[int], now: float) -> None:
        self.readable(lease_id, ids, now)
        for one in ids:
            self.hold(one, (lease_id, 0))
            if one not in self.order[lease_id]:
                self.order[lease_id].append(one)

    def create_table(self, lease_id: int, request: TableRequest, now: float) -> Any:
        self.client(lease_id, now)
        spare, matched, table_id = self.try_table(lease_id, request)
        if table_id is None:
            self.require(request.num_blocks, request.num_blocks - matched, spare)
        return table_id, *self.run(self.tables[table_id].blocks), self.tables[table_id].cached

    def own_table(self, lease_id: int, table_id: int, now: float) -> ModelTable:
        self.client(lease_id, now)
        if table_id not in self.tables:
            raise Refused(Reason.TABLE_NOT_FOUND)
        if self.tables[table_id].lease != lease_id:
            raise Refused(Reason.TABLE_NOT_HELD)
        return self.tables[table_id]

    def extend_table(self, lease_id: int, table_id: int, count: int, now: float) -> Any:
        table = self.own_table(lease_id, table_id, now)
        self.require(len(table.blocks) + count, count, self.available)
        ids = self.grant(count, (lease_id, table_id))
        table.blocks += ids
        return self.run(ids)

    # -- worker commands

    def worker(self, lease_id: int, now: float) -> ModelLease:
        lease = self.leases.get(lease_id)
        if lease is None or not lease.worker:
            raise Refused(Reason.LEASE_LOST)
        self.lose_late(lease_id, now)
        if lease.state is not LeaseState.LIVE:
            raise Refused(Reason.LEASE_LOST)
        return lease

    def lose(self, lease_id: int) -> None:
        self.leases[lease_id].state = LeaseState.LOST
        self.starving.pop(lease_id, None)
        self.counts["lost"] += 1

    def lose_late(self, lease_id: int, now: float) -> None:
        lease = self.leases[lease_id]
        if lease.state is not LeaseState.LOST and now >= lease.deadline:
            self.lose(lease_id)

    def attach(self, lock: str, now: float, reclaim: tuple[int, int] | None) -> Any:
        if reclaim is not None and reclaim[0] == 7 and reclaim[1] in self.leases:
            lease = self.leases[reclaim[1]]
            if lease.worker and lease.lock == lock:
                self.lose_late(reclaim[1], now)
                if lease.state is not LeaseState.LOST:
                    lease.state, lease.deadline, lease.replaying = LeaseState.LIVE, now + TIMEOUT, True
                    return reclaim[1], True
        return self.new_lease(ModelLease(True, TIMEOUT, now + TIMEOUT, lock)), False

    def step(self, lease_id: int, step: Step, now: float) -> Any:
        lease = self.worker(lease_id, now)
        lease.deadline = now + lease.ttl
        if lease.replaying and step.step_id <= lease.last_step:
            recent = list(lease.answers)[-MAX_REPLAYED_STEPS:]
            if step.step_id not in recent:
                raise Refused(Reason.PROTOCOL_VIOLATION)
            return lease.answers[step.step_id]
        if step.step_id != lease.last_step + 1 or not self.lawful(lease_id, step):
            raise Refused(Reason.PROTOCOL_VIOLATION)
        lease.last_step, lease.replaying = step.step_id, False
        self.apply(lease_id, step)
        answers = [self.answer_create(lease_id, create) for create in step.creates]
        answers += [self.answer_extend(lease_id, extend) for extend in step.extends]
        answers += [self.answer_reserve(lease_id, reserve) for reserve in step.reserves]
        lease.answers[step.step_id] = answers
        return answers

    def apply(self, lease_id: int, step: Step) -> bool:
        for commit in step.commits:
            self.commit(self.tables[commit.table_id], commit.token_ids)
        done = self.operates(lease_id, step)
        own = [one for one, table in self.tables.items() if table.lease == lease_id]
        return done and all(extend.table_id in own for extend in step.extends)

    def lawful(self, lease_id: int, step: Step) -> bool:
        """Tried on a copy: what an operation needs, another one before it may have made."""
        tried = step.operations or step.releases or step.frees or step.extends
        return self.commits_are_lawful(lease_id, step) and (not tried or self.trial().apply(lease_id, step))

    def trial(self) -> Model:
        """A copy to try operations on."""
        other = Model(self.total)
        other.free, other.cached, other.index = [*self.free], [*self.cached], dict(self.index)
        other.blocks = {
            one: dataclasses.replace(block, holders=[*block.holders], tokens=[*block.tokens])
            for one, block in self.blocks.items()
        }
        other.tables = {
            one: dataclasses.replace(table, blocks=[*table.blocks], tokens=[*table.tokens])
            for one, table in self.tables.items()
        }
        other.leases = {
            one: dataclasses.replace(lease, reserve=[*lease.reserve], ids=[*lease.ids])
            for one, lease in self.leases.items()
        }
        other.kept = dict(self.kept)
        other.order = {one: [*blocks] for one, blocks in self.order.items()}
        other.next_block, other.next_id = self.next_block, self.next_id
        return other

    def commits_are_lawful(self, lease_id: int, step: Step) -> bool:
        own = {one: table for one, table in self.tables.items() if table.lease == lease_id}
        written: Counter[int] = Counter()
        for commit in step.commits:
            written[commit.table_id] += len(commit.token_ids)
        return (
            all(one in own for one in written)
            and all(len(own[one].tokens) + count <= len(own[one].blocks) * SIZE for one, count in written.items())
            and all(self.is_alone(own[one], count) for one, count in written.items())
            and not any(extend.num_blocks < 1 for extend in step.extends)
            and not any(max(reserve.num_blocks, reserve.num_tables) < 1 for reserve in step.reserves)
        )

    def is_alone(self, table: ModelTable, count: int) -> bool:
        """Whether nobody else has a block that the next tokens of a table are written to."""
        end = len(table.tokens) + count
        written = table.blocks[len(table.tokens) // SIZE : -(-end // SIZE)] if count else []
        return all(len(self.blocks[one].holders) == 1 for one in written)

    def answer_create(self, lease_id: int, request: TableRequest) -> Any:
        spare, matched, table_id = self.try_table(lease_id, request)
        if table_id is None:
            return self.refuse(lease_id, request.ref, request.num_blocks, matched, spare)
        table = self.tables[table_id]
        return "grant", request.ref, table_id, table.cached, *self.run(table.blocks), 0

    def answer_extend(self, lease_id: int, request: ExtendRequest) -> Any:
        table = self.tables[request.table_id]
        if request.num_blocks > self.available or len(table.blocks) + request.num_blocks > self.total:
            return self.refuse(lease_id, request.ref, len(table.blocks) + request.num_blocks, 0, self.available)
        ids = self.grant(request.num_blocks, (lease_id, request.table_id))
        table.blocks += ids
        return "grant", request.ref, request.table_id, 0, *self.run(ids), 0

    def answer_reserve(self, lease_id: int, request: ReserveRequest) -> Any:
        lease = self.leases[lease_id]
        in_all = len(lease.reserve) + request.num_blocks
        if request.num_blocks > self.available or in_all > self.total:
            return self.refuse(lease_id, request.ref, in_all, 0, self.available)
        blocks = self.grant(request.num_blocks, (lease_id, 0))
        lease.reserve += blocks
        self.order[lease_id] += blocks
        ids = list(range(self.next_id, self.next_id + request.num_tables))
        self.next_id += request.num_tables
        lease.ids += ids
        return "grant", request.ref, ids[0] if ids else 0, 0, *self.run(blocks), len(ids)

    def refuse(self, lease_id: int, ref: int, in_all: int, matched: int, spare: int) -> Any:
        self.counts["refused"] += 1
        if in_all <= self.total:
            least = min(spare, self.starving.get(lease_id, (0, spare))[1])
            self.starving[lease_id] = (self.counts["returned"], least)
        return "refusal", ref, in_all > self.total, matched + spare

    def news(self) -> list[tuple[int, int]]:
        told = [
            (lease, self.available)
            for lease, (returned, spare) in self.starving.items()
            if self.counts["returned"] > returned
            and self.available > spare
            and self.leases[lease].state is LeaseState.LIVE
        ]
        for lease, _ in told:
            del self.starving[lease]
        return told

    def process_gone(self, lease_id: int) -> None:
        lease = self.leases.get(lease_id)
        if lease is not None and lease.worker and lease.state is not LeaseState.LIVE:
            self.counts["lost"] += lease.state is LeaseState.DETACHED
            self.end(lease_id)

    def tick(self, now: float) -> list[tuple[int, LeaseState]]:
        over = [(until, one) for one, (_, _, until) in self.kept.items() if until <= now]
        for _, one in sorted(over, key=itemgetter(0)):  # of one prefix the last block first, as it was pinned
            self.keep(one, None)
        late = [
            one for one, lease in self.leases.items() if now >= lease.deadline and lease.state is not LeaseState.LOST
        ]
        for one in late:
            (self.lose if self.leases[one].worker else self.expire)(one)
        return [(one, LeaseState.LOST if one in self.leases else LeaseState.LIVE) for one in late]


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
)
seconds = st.sampled_from([0.0, 0.5, 0.5, 1.0, 1.0, 6.0])


class PoolMachine(RuleBasedStateMachine):
    """Every command of the pool, on few enough blocks that they are always short."""

    @initialize(total=st.sampled_from([3, 5, 6, 7, 9]))
    def start(self, total: int) -> None:
        self.pool = Pool(7, SIZE, 1 << 30, total)
        self.pool.declare(GEOMETRY)
        self.model = Model(total)
        self.now = 0.0
        self.version, self.before = self.pool.version, self.seen()
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

    # -- what to name in a command: mostly something that is there

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

    # -- time and leases

    @rule(by=seconds)
    def time_passes(self, by: float) -> None:
        self.now += by
        self.capacity_news()

    @rule(by=seconds)
    def tick(self, by: float) -> None:
        self.now += by
        late = [(lease.lease_id, lease.state) for lease in self.pool.tick(self.now)]
        assert late == self.model.tick(self.now)

    @rule(ttl=st.sampled_from([0.5, 5.0, 30.0]))
    def create_client_lease(self, ttl: float) -> None:
        self.new_client(ttl)

    def new_client(self, ttl: float) -> int:
        granted = max(ttl, 1.0)
        expected = self.model.new_lease(ModelLease(False, granted, self.now + granted))
        lease = self.pool.create_lease("client", ttl, self.now)
        assert (lease.lease_id, lease.ttl_s, lease.deadline) == (expected, granted, self.now + granted)
        return expected

    def renew_client_lease(self, data: st.DataObject) -> None:
        lease = self.client(data)

        def expected() -> float:
            found = self.model.client(lease, self.now)
            found.deadline = self.now + found.ttl
            return found.deadline

        self.agree(lambda: self.pool.renew_lease(lease, self.now).deadline, expected)

    def release_client_lease(self, data: st.DataObject) -> None:
        lease = self.client(data)

        def expected() -> None:
            if lease in self.model.leases:
                if self.model.leases[lease].worker:
                    raise Refused(Reason.LEASE_IS_WORKERS)
                self.model.end(lease)

        self.agree(lambda: self.pool.release_lease(lease, self.now), expected)

    @rule(data=st.data(), name=st.sampled_from(["heartbeat", "renew_client_lease"]))
    def lease_is_renewed(self, name: str, data: st.DataObject) -> None:
        getattr(self, name)(data)

    @rule(data=st.data(), name=st.sampled_from(["release_client_lease", "detach", "fail_lease", "stream_broken"]))
    def lease_ends(self, name: str, data: st.DataObject) -> None:
        getattr(self, name)(data)

    def attach_worker(self, lock: str, reclaim: tuple[int, int] | None) -> int:
        attached = self.pool.attach("worker", lock, TIMEOUT, self.now, reclaim)
        expected = self.model.attach(lock, self.now, reclaim)
        assert (attached.lease.lease_id, attached.reclaimed) == expected
        return attached.lease.lease_id

    @rule(lock=st.sampled_from(["one", "two", "three"]), epoch=st.sampled_from([7, 7, 7, 8]), data=st.data())
    def attach(self, lock: str, epoch: int, data: st.DataObject) -> None:
        lease = data.draw(st.none() | st.sampled_from([*self.model.leases, self.model.next_id]))
        if lease is not None and lease in self.model.leases and data.draw(st.integers(0, 4)):
            lock = self.model.leases[lease].lock or lock
        self.attach_worker(lock, None if lease is None else (epoch, lease))

    def heartbeat(self, data: st.DataObject) -> None:
        lease = self.worker(data)

        def expected() -> None:
            self.model.worker(lease, self.now).deadline = self.now + TIMEOUT

        self.agree(lambda: self.pool.heartbeat(lease, self.now), expected)

    def stream_broken(self, data: st.DataObject) -> None:
        lease = self.worker(data)
        self.pool.stream_broken(lease)
        known = self.model.leases.get(lease)
        if known is not None and known.worker and known.state is LeaseState.LIVE:
            known.state = LeaseState.DETACHED

    def detach(self, data: st.DataObject) -> None:
        lease = self.worker(data)

        def expected() -> None:
            self.model.worker(lease, self.now)
            self.model.end(lease)

        self.agree(lambda: self.pool.detach(lease, self.now), expected)

    def fail_lease(self, data: st.DataObject) -> None:
        lease = self.worker(data)
        self.pool.fail_lease(lease)
        known = self.model.leases.get(lease)
        if known is not None and known.worker and known.state is not LeaseState.LOST:
            self.model.lose(lease)

    @rule(data=st.data())
    def process_gone(self, data: st.DataObject) -> None:
        waiting = {one: lease.lock for one, lease in self.model.leases.items() if lease.worker}
        waiting = {one: lock for one, lock in waiting.items() if self.model.leases[one].state is not LeaseState.LIVE}
        assert dict(self.pool.waiting_for_process()) == waiting
        lease = data.draw(st.sampled_from(list(waiting))) if waiting else self.worker(data)
        self.pool.process_gone(lease, self.now)
        self.model.process_gone(lease)
        self.capacity_news()

    # -- client commands

    @rule(count=st.integers(1, 5), data=st.data())
    def allocate(self, count: int, data: st.DataObject) -> None:
        lease = self.client(data)

        def actual() -> Any:
            run = self.pool.allocate_blocks(lease, count, self.now)
            return list(run.block_ids), list(run.entries)

        self.agree(actual, lambda: self.model.allocate(lease, count, self.now))

    @rule(data=st.data())
    def free_blocks(self, data: st.DataObject) -> None:
        lease = self.client(data)
        own = [one for one in self.model.order.get(lease, []) if data.draw(st.booleans())]
        ids = own or data.draw(self.blocks())
        self.agree(
            lambda: self.pool.free_blocks(lease, ids, self.now),
            lambda: self.model.free_blocks(lease, ids, self.now),
        )

    @rule(data=st.data())
    def share_blocks(self, data: st.DataObject) -> None:
        lease, ids = self.client(data), data.draw(self.blocks())
        self.agree(lambda: self.pool.share_blocks(lease, ids, self.now), lambda: self.model.share(lease, ids, self.now))

    @rule(request=requests, data=st.data())
    def create_table(self, request: TableRequest, data: st.DataObject) -> None:
        lease = self.client(data)

        def actual() -> Any:
            table = self.pool.create_table(lease, request, self.now)
            return table.table_id, list(table.blocks.block_ids), list(table.blocks.entries), table.cached_tokens

        self.agree(actual, lambda: self.model.create_table(lease, request, self.now))

    @rule(count=st.integers(1, 3), data=st.data())
    def extend_table(self, count: int, data: st.DataObject) -> None:
        lease = self.client(data)
        table = data.draw(self.tables(lease))

        def actual() -> Any:
            run = self.pool.extend_table(lease, table, count, self.now)
            return list(run.block_ids), list(run.entries)

        self.agree(actual, lambda: self.model.extend_table(lease, table, count, self.now))

    @rule(data=st.data())
    def release_table(self, data: st.DataObject) -> None:
        lease = self.client(data)
        table = data.draw(self.tables(lease))

        def expected() -> None:
            self.model.own_table(lease, table, self.now)
            self.model.drop_table(table)

        self.agree(lambda: self.pool.release_table(lease, table, self.now), expected)

    # -- pins

    @rule(
        tokens=streams,
        salt=st.sampled_from([b"", b"", b"salt"]),
        priority=st.sampled_from([-1, 0, 1, 2]),
        pinned=st.booleans(),
        ttl=st.sampled_from([1.0, 3.0, 10.0]),
    )
    def pin(self, tokens: list[int], salt: bytes, priority: int, pinned: bool, ttl: float) -> None:
        request = PinRequest(tokens, ttl, salt, priority, pinned)

        def actual() -> Any:
            kept = self.pool.prefixes.pin(request, self.now)
            assert kept.until == self.now + ttl
            return kept.num_tokens, kept.num_blocks

        self.agree(actual, lambda: self.model.pin(tokens, salt, (priority, pinned, self.now + ttl)))

    @rule(tokens=streams)
    def unpin(self, tokens: list[int]) -> None:
        def actual() -> Any:
            kept = self.pool.prefixes.unpin(tokens, b"", self.now)
            return kept.num_tokens, kept.num_blocks

        self.agree(actual, lambda: self.model.pin(tokens, b"", None))

    # -- steps

    def send(self, lease: int, step: Step) -> None:
        def actual() -> Any:
            return self.plain(self.pool.step(lease, step, self.now))

        if self.agree(actual, lambda: self.model.step(lease, step, self.now)) is Reason.PROTOCOL_VIOLATION:
            self.pool.fail_lease(lease)
            self.model.lose(lease)

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
            )
            for one in outcome.grants
        ]
        for one in outcome.refusals:
            answers.append(("refusal", one.ref, one.reason is RefusalReason.REQUEST_TOO_LARGE, one.available_blocks))
        return sorted(answers, key=lambda answer: answer[1])

    def next_step(self, lease: int) -> int:
        known = self.model.leases.get(lease)
        return known.last_step + 1 if known else 1

    def some_commits(self, data: st.DataObject, lease: int) -> list[Commit]:
        commits = []
        for one in self.own_tables(lease)[-3:]:
            table = self.model.tables[one]
            room = len(table.blocks) * SIZE - len(table.tokens)
            if room and data.draw(st.integers(0, 3)):
                tail = data.draw(tails)[:room]
                if self.model.is_alone(table, len(tail)) or not data.draw(st.integers(0, 4)):
                    commits.append(Commit(one, tail))
        return commits

    # -- operations

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
        needed = count <= len(table.tokens) and model.must_copy(table, count)
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
        if not model.commits_are_lawful(lease, Step(1, commits)):
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
            by_copy = model.must_copy(model.tables[one], length)
            if known.reserve or not by_copy:
                cut = Truncate(one, length, known.reserve[0] if by_copy else 0)
                self.send(lease, Step(self.next_step(lease), operations=[cut]))

    @rule(blocks=st.integers(0, 3), ids=st.integers(0, 2), data=st.data())
    def worker_reserves(self, blocks: int, ids: int, data: st.DataObject) -> None:
        lease = self.worker(data)
        self.send(lease, Step(self.next_step(lease), reserves=[ReserveRequest(blocks, ids, 5)]))

    @rule(count=st.integers(1, 4), fill=st.booleans(), frees=st.booleans(), data=st.data())
    def worker_operates(self, count: int, fill: bool, frees: bool, data: st.DataObject) -> None:
        """Operations that build on each other: each is drawn for the tables as those before it leave them."""
        lease = self.worker(data)
        known = self.model.leases.get(lease)
        if fill and known is not None and known.worker and known.state is LeaseState.LIVE and len(known.reserve) < 2:
            self.send(lease, Step(self.next_step(lease), reserves=[ReserveRequest(2, 2, 5)]))
        commits = self.some_commits(data, lease)
        trial = self.model.trial()
        if not trial.commits_are_lawful(lease, Step(1, commits)):
            commits = []
        for commit in commits:
            trial.commit(trial.tables[commit.table_id], commit.token_ids)
        operations = []
        for _ in range(count):
            operations.append(self.some_operation(data, lease, trial))
            if lease not in trial.leases or not trial.can(lease, operations[-1]):
                break
            trial.operate(lease, operations[-1])
        left = trial.leases[lease].reserve[:1] if frees and lease in trial.leases else []
        self.send(lease, Step(self.next_step(lease), commits, operations=operations, frees=left))

    @rule(data=st.data())
    def client_forks(self, data: st.DataObject) -> None:
        lease = self.client(data)
        table = data.draw(self.tables(lease))

        def actual() -> Any:
            view = self.pool.sharing.fork_table(lease, table, self.now)
            return view.table_id, list(view.blocks.block_ids), list(view.blocks.entries), view.cached_tokens

        self.agree(actual, lambda: self.model.client_forks(lease, table, self.now))

    @rule(data=st.data())
    def client_truncates(self, data: st.DataObject) -> None:
        lease = self.client(data)
        with_tokens = [one for one in self.own_tables(lease) if self.model.tables[one].tokens]
        table = data.draw(st.sampled_from(with_tokens) if with_tokens else self.tables(lease))
        known = self.model.tables.get(table)
        count = data.draw(st.integers(0, len(known.tokens) + 1 if known else 1))

        def actual() -> Any:
            view, copies = self.pool.sharing.truncate_table(lease, table, count, self.now)
            plain = [(one.source, one.target) for one in copies]
            return list(view.blocks.block_ids), list(view.blocks.entries), view.cached_tokens, plain

        self.agree(actual, lambda: self.model.client_truncates(lease, table, count, self.now))

    @rule(data=st.data())
    def client_copies(self, data: st.DataObject) -> None:
        lease, ids = self.client(data), data.draw(self.blocks())

        def actual() -> Any:
            run, copies = self.pool.sharing.copy_blocks(lease, ids, self.now)
            return list(run.block_ids), list(run.entries), [(one.source, one.target) for one in copies]

        self.agree(actual, lambda: self.model.client_copies(lease, ids, self.now))

    @rule(requested=st.lists(requests, min_size=1, max_size=2), data=st.data())
    def worker_creates(self, requested: list[TableRequest], data: st.DataObject) -> None:
        lease = self.worker(data)
        creates = [dataclasses.replace(request, ref=ref) for ref, request in enumerate(requested)]
        self.send(lease, Step(self.next_step(lease), creates=creates))

    @rule(prompt=streams, more=tails, salt=st.sampled_from([b"", b"", b"salt"]), keep=st.booleans(), data=st.data())
    def worker_serves(self, prompt: list[int], more: list[int], salt: bytes, keep: bool, data: st.DataObject) -> None:
        """A request from admission to its end, or nearly."""
        lease, tokens = self.worker(data), prompt + more
        request = TableRequest(prompt, -(-len(tokens) // SIZE), salt)
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
        if known is None or not known.worker:
            return
        self.pool.stream_broken(lease)
        known.state = LeaseState.DETACHED if known.state is LeaseState.LIVE else known.state
        self.attach_worker(known.lock, (7, lease))
        if known.state is LeaseState.LIVE:
            self.send(lease, Step(known.last_step + 1 - back))

    @rule()
    def capacity_news(self) -> None:
        assert self.pool.take_capacity_news() == self.model.news()

    # -- after each command

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
            for one in pool.blocks_after(0, 1000, None, self.now)
        }
        tables = {}
        for listed in pool.tables_after(0, 1000, self.now):
            one = pool.table(listed.table_id, self.now)
            tables[one.table_id] = (one.lease_id, list(one.blocks.block_ids), list(one.token_ids), one.cached_tokens)
        counts = (
            counters.allocated_blocks,
            counters.freed_blocks,
            counters.evicted_blocks,
            counters.prefix_hit_tokens,
            counters.refused_requests,
            counters.lost_leases,
        )
        usage = pool.usage()
        return blocks, tables, (usage.free, usage.held, usage.cached, usage.quarantined, usage.pinned), counts

    def wanted(self) -> Any:
        model = self.model
        blocks = {
            one: (
                model.run([one])[1][0],
                self.state_of(block),
                sorted((*holder, count) for holder, count in Counter(block.holders).items()),
                len(block.holders),
                block.prefix is not None,
                len(block.tokens),
                model.kept.get(one, (0, False))[:2],
            )
            for one, block in model.blocks.items()
        }
        tables = {one: (table.lease, table.blocks, table.tokens, table.cached) for one, table in model.tables.items()}
        names = ("allocated", "freed", "evicted", "hits", "refused", "lost")
        states = Counter(state for _, state, *_ in blocks.values())
        pinned = sum(map(model.is_pinned, model.cached))
        usage = (len(model.free), states[B.HELD], states[B.CACHED], states[B.QUARANTINED], pinned)
        return blocks, tables, usage, tuple(model.counts[name] for name in names)

    def state_of(self, block: ModelBlock) -> B:
        if not block.holders:
            return B.CACHED
        lost = self.model.leases[block.holders[0][0]].state is LeaseState.LOST
        return B.QUARANTINED if lost and block.prefix is None else B.HELD

    def compare_leases(self) -> None:
        for one, lease in self.model.leases.items():
            view = self.pool.lease(one)
            assert (view.state, view.deadline, view.is_worker) == (lease.state, lease.deadline, lease.worker)
        alive = [lease for lease in self.model.leases.values() if lease.state is not LeaseState.LOST]
        assert self.pool.num_leases == len(alive)
        assert self.pool.next_deadline() == min((lease.deadline for lease in alive), default=None)

    def compare_digests(self) -> None:
        """Equal exactly where salt and all tokens up to the block's end are."""
        pairs = {(self.pool.block(one, self.now).digest, block.prefix) for one, block in self.model.blocks.items()}
        assert len(pairs) == len({digest for digest, _ in pairs}) == len({prefix for _, prefix in pairs})


SUITE = settings(
    max_examples=500,
    stateful_step_count=30,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
HUNT = settings(
    SUITE, max_examples=1000, stateful_step_count=40, phases=[Phase.generate], derandomize=True, print_blob=False
)


def test_500_random_command_sequences_keep_the_invariant_and_agree_with_the_model() -> None:
    run_state_machine_as_test(PoolMachine, settings=SUITE)


# -- bugs, each planted into one method, that the sequences above must find


def frees_a_block_twice(patch: pytest.MonkeyPatch) -> None:
    """Counts without asking who holds, and a release that drops the table's first block once more."""

    def drop_reference(self: Blocks, frame: int, holder: int) -> bool:
        self.holders[frame] = self.holders[frame][1:]
        return not self.holders[frame]

    def release(self: Draft, table_id: int) -> None:
        frames = self.table(table_id).frames
        original(self, table_id)
        if frames and self._num_holders(frames[0]):
            self._drop(frames[0], table_id)

    original = Draft._release
    patch.setattr(Blocks, "drop_reference", drop_reference)
    patch.setattr(Draft, "_release", release)


def frees_a_unit_twice(patch: pytest.MonkeyPatch) -> None:
    """The free queue gets a frame that is in it already."""

    def vacate(self: BlockStore, frame: int) -> None:
        self.blocks.vacate(frame)
        self.allocator.give_back(frame)
        self.allocator.give_back(frame)

    patch.setattr(BlockStore, "_vacate", vacate)


def leaks_a_share(patch: pytest.MonkeyPatch) -> None:
    """A released table keeps its references to the blocks that it had matched."""

    def release(self: Draft, table_id: int) -> None:
        draft = self.table(table_id)
        del draft.frames[: draft.cached_tokens // SIZE]
        original(self, table_id)

    original = Draft._release
    patch.setattr(Draft, "_release", release)


def forgets_a_share(patch: pytest.MonkeyPatch) -> None:
    """A second holder is not counted, so the block goes when the first one releases it."""

    def hold(self: BlockStore, frames: Sequence[int], holders: tuple[int, ...], now: float) -> None:
        original(self, [frame for frame in frames if not self.blocks.holders[frame]], holders, now)

    original = BlockStore.hold
    patch.setattr(BlockStore, "hold", hold)


def evicts_the_newest(patch: pytest.MonkeyPatch) -> None:
    """The cached queue is taken from its wrong end."""

    def grant(self: BlockStore, count: int, holders: tuple[int, ...], now: float) -> list[int]:
        for _ in range(count - self.allocator.num_free):
            newest = list(self.cached)[-1]
            self.cached.remove(newest)
            self._evict(newest)
        return original(self, count, holders, now)

    original = BlockStore.grant
    patch.setattr(BlockStore, "grant", grant)


def evicts_what_it_matched(patch: pytest.MonkeyPatch) -> None:
    """Matched blocks that are cached count as room for the fresh ones."""

    def plan(self: PoolState, request: TableRequest, packed: bytes) -> Plan:
        made = original(self, request, packed)
        made.spare = self.cut_store().available
        return made

    original = PoolState.plan
    patch.setattr(PoolState, "plan", plan)


def releases_heads_first(patch: pytest.MonkeyPatch) -> None:
    """Prefixes are eaten from their beginning."""

    def release(self: Draft, table_id: int) -> None:
        self.table(table_id).frames.reverse()
        original(self, table_id)

    original = Draft._release
    patch.setattr(Draft, "_release", release)


def matches_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """A prompt of whole blocks is found whole, and nothing is left to compute."""

    def match(self: PrefixIndex, packed: bytes, salt: bytes) -> list[int]:
        return original(self, packed + bytes(4), salt)

    original = PrefixIndex.match
    patch.setattr(PrefixIndex, "match", match)


def gives_away_what_a_lost_worker_can_write(patch: pytest.MonkeyPatch) -> None:
    """A late lease is ended without waiting for its process."""

    def lose(self: WorkerLeases, lease: Lease, why: str) -> None:
        original(self, lease, why)
        for table in list(lease.tables.values()):
            self._state.release_table(table, 0.0)

    original = WorkerLeases.lose
    patch.setattr(WorkerLeases, "lose", lose)


def forks_without_counting(patch: pytest.MonkeyPatch) -> None:
    """A fork has the blocks, but no reference to the last of them."""

    def fork(self: Draft, operation: Fork) -> None:
        original(self, operation)
        if self._holds:
            del self._holds[-1]

    original = Draft._fork
    patch.setattr(Draft, "_fork", fork)


def truncates_in_place(patch: pytest.MonkeyPatch) -> None:
    """Whoever shares the block, or finds it in the index, loses its end."""
    patch.setattr(Draft, "must_copy", lambda self, table_id, num_tokens: False)


def drops_what_was_never_written(patch: pytest.MonkeyPatch) -> None:
    """Truncation takes the blocks granted ahead with it."""

    def truncate(self: Draft, cut: Truncate) -> None:
        draft = self.table(cut.table_id)
        original(self, cut)
        for frame in reversed(draft.frames[-(-cut.num_tokens // SIZE) :]):
            self._drop(frame, cut.table_id)
            draft.frames.remove(frame)

    original = Draft._truncate
    patch.setattr(Draft, "_truncate", truncate)


def uses_a_reserved_block_twice(patch: pytest.MonkeyPatch) -> None:
    """A block that was taken stays in the reserve."""

    def apply(self: Draft, now: float) -> None:
        self._used_frames.clear()
        original(self, now)

    original = Draft.apply
    patch.setattr(Draft, "apply", apply)


def lets_a_shared_block_be_written(patch: pytest.MonkeyPatch) -> None:
    """Commits are believed whoever else has the block."""

    def plan_commit(self: Stepper, lease: Lease, commit: Commit, written: dict[int, int]) -> tuple[Table, bytes]:
        table = self._own(lease, commit.table_id)
        written[table.table_id] = written.get(table.table_id, table.num_tokens) + len(commit.token_ids)
        return table, pack_tokens(commit.token_ids)

    patch.setattr(Stepper, "_plan_commit", plan_commit)


def gives_a_lost_reserve_away(patch: pytest.MonkeyPatch) -> None:
    """The reserve of a lost worker is free before its process is gone."""

    def lose(self: WorkerLeases, lease: Lease, why: str) -> None:
        original(self, lease, why)
        for frame in list(lease.references):
            self._state.cut_store().release(frame, lease.lease_id, 0.0)
            del lease.references[frame]

    original = WorkerLeases.lose
    patch.setattr(WorkerLeases, "lose", lose)


SLOW = pytest.mark.full
"""Marks the bugs that may take half a minute to find."""

BUGS = [
    forks_without_counting,
    truncates_in_place,
    drops_what_was_never_written,
    uses_a_reserved_block_twice,
    lets_a_shared_block_be_written,
    gives_a_lost_reserve_away,
    frees_a_block_twice,
    frees_a_unit_twice,
    pytest.param(leaks_a_share, marks=SLOW),
    forgets_a_share,
    evicts_the_newest,
    pytest.param(evicts_what_it_matched, marks=SLOW),
    releases_heads_first,
    matches_the_last_token,
    gives_away_what_a_lost_worker_can_write,
]


def test_the_hunt_finds_nothing_in_the_pool_as_it_is() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(HUNT, max_examples=20))


@pytest.mark.parametrize("plant", BUGS)
def test_random_command_sequences_find_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((InvariantError, AssertionError)):
        run_state_machine_as_test(PoolMachine, settings=HUNT)


@pytest.mark.parametrize("plant", [leaks_a_share, forgets_a_share, frees_a_block_twice])
def test_check_alone_finds_a_wrong_reference_count(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the model's help, in a sequence that shares a block and releases it on one side."""

    def play() -> None:
        pool = Pool(7, SIZE, 1 << 30, 8)
        pool.declare(GEOMETRY)
        worker = pool.attach("worker", "lock", TIMEOUT, 0.0).lease.lease_id
        prompt = [1] * (2 * SIZE)
        first, *_ = pool.step(worker, Step(1, creates=[TableRequest(prompt, 3)]), 0.0).grants
        pool.step(worker, Step(2, commits=[Commit(first.table_id, prompt)]), 0.0)
        second, *_ = pool.step(worker, Step(3, creates=[TableRequest([*prompt, 1], 3)]), 0.0).grants
        assert second.cached_tokens == len(prompt)
        pool.check()
        pool.step(worker, Step(4, releases=[second.table_id]), 0.0)
        pool.check()

    play()
    plant(monkeypatch)
    with pytest.raises(InvariantError):
        play()
