"""A naive model of the pool: contents where the pool knows digests, lists where it has columns and queues."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from memd.core.values import TableRequest
from pagekernels.layout import Format
from pagepool.errors import Reason
from tests.cpu.pool_model_clients import Clients
from tests.cpu.pool_model_operations import Operations
from tests.cpu.pool_model_pins import Pins, Retention
from tests.cpu.pool_model_prefixes import Prefixes
from tests.cpu.pool_model_remaps import Remaps
from tests.cpu.pool_model_values import SIZE, UNITS, ModelBlock, ModelLease, ModelTable, Refused
from tests.cpu.pool_model_waiting import Waiting, Who
from tests.cpu.pool_model_workers import Workers


class Model:
    """Blocks, tables and leases, and what every command does with them."""

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
        self.kept: dict[int, Retention] = {}  # by block
        self.pins = Pins(self)
        self.order: dict[int, list[int]] = {}  # by lease: blocks it holds directly, in the order it first took them
        self.operations, self.clients, self.workers = Operations(self), Clients(self), Workers(self)
        self.prefixes, self.waiting = Prefixes(self), Waiting(self)
        self.remaps = Remaps(self)

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

    def commit(self, table: ModelTable, tokens: Sequence[int]) -> list[int]:
        """The blocks that were sealed by it."""
        sealed = []
        for token in tokens:
            index = len(table.tokens) // SIZE
            table.tokens.append(token)
            self.blocks[table.blocks[index]].tokens.append(token)
            if len(table.tokens) % SIZE == 0:
                self.seal(table, index)
                sealed.append(table.blocks[index])
        return sealed

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
            del self.index[prefix]  # the index is in the order in which blocks became matchable
            self.index[prefix] = one
            if not self.blocks[first].holders:
                self.cached.remove(first)
                self.counts["evicted"] += 1
                self.drop(first)

    def with_own(self, request: TableRequest) -> TableRequest:
        """A resumed table has tokens and salt of its own."""
        again = self.tables.get(request.resume_table_id)
        return request if again is None else dataclasses.replace(request, token_ids=again.tokens, salt=again.salt)

    def found(self, request: TableRequest, who: Who | None) -> tuple[list[int], int]:
        """What matches, and how many fresh blocks there are beside it."""
        matched = self.match(request)
        spare = self.available - self.waiting.claimed(who) - sum(map(self.is_spare, matched))
        return matched, spare - (request.headroom if self.waiting.is_in_use() else 0)

    def try_table(self, lease: int, request: TableRequest, now: float, who: Who | None) -> int | None:
        """The id of the granted table."""
        again = self.tables.get(request.resume_table_id)
        matched, spare = self.found(request, who)
        fresh = max(request.num_blocks - len(matched), 0)
        need = fresh + sum(map(self.is_spare, matched))
        if request.num_blocks > self.total or (fresh > spare and need):
            return None
        table_id = request.resume_table_id or self.next_id
        self.next_id += not request.resume_table_id
        source, run = self.prefixes.part(request, matched, fresh, spare)
        for one in matched:
            self.hold(one, (lease, table_id))
        self.prefixes.hold(lease, table_id, source)
        if not request.no_match and again is None:
            self.counts["hits"] += len(matched) * SIZE + run
        blocks = matched + self.grant(fresh, (lease, table_id))
        tokens = list(request.token_ids[: len(matched) * SIZE + run])
        if run:
            self.blocks[blocks[len(matched)]].tokens = tokens[len(matched) * SIZE :]
        made = ModelTable(lease, request.salt, blocks, tokens, len(tokens), request.priority, request.arrival or now)
        if again is not None:
            made.priority, made.arrival, made.yields = again.priority, again.arrival, again.yields
        else:
            made.yields = request.num_yields
        self.tables[table_id] = made
        return table_id

    def drop_table(self, table_id: int) -> None:
        table = self.tables[table_id]
        for one in reversed(table.blocks):
            self.release(one, (table.lease, table_id))
        self.prefixes.copied(table_id)
        self.prefixes.drop(table_id)
        del self.tables[table_id]

    def end(self, lease_id: int) -> None:
        for table_id in [one for one, table in self.tables.items() if table.lease == lease_id]:
            self.drop_table(table_id)
        for one in reversed(self.order.pop(lease_id)):
            for _ in range(self.blocks[one].holders.count((lease_id, 0))):  # a worker holds what it reserved once
                self.release(one, (lease_id, 0))
        self.remaps.forget(lease_id, self.leases[lease_id].unread[::-1])
        del self.leases[lease_id]
        self.waiting.forget(lease_id)

    def keep(self, one: int, retention: Retention | None) -> None:
        self.kept.pop(one, None)
        if retention is not None:
            self.kept[one] = retention
        if one in self.cached:
            self.cached.remove(one)
            self.cached.append(one)

    def entry(self, one: int) -> int:
        return self.run([one])[1][0]

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
        other.kept, other.prefixes.sources = dict(self.kept), dict(self.prefixes.sources)
        other.order = {one: [*blocks] for one, blocks in self.order.items()}
        other.next_block, other.next_id = self.next_block, self.next_id
        return other
