"""A worker that plays random interleavings of fork, append, copy-on-write, truncate and release on real KV memory.

Each table has a history: its tokens, and with them the K and V of every position, made from the tokens up to it.
So a block that is shared, copied, matched or evicted wrongly shows as bytes that are not the table's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from inferd.core.block_tables import BlockCopy, BlockTables, ReserveShortError
from inferd.core.ports import Capacity, Grant, KvPool, Refusal, Step, TableRequest
from pagekernels.layout import PagedLayout, slot_mapping
from pagepool.pool_values import Remap
from tests.cpu.flight import Flight

CHAINS = 1 << 16
"""How many different rows there are for a position."""

RESERVE = 10
RESERVE_REF = 1 << 40


@dataclass
class History:
    """What a table should hold: tokens, and which rows each position has."""

    tokens: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)

    def grow(self, tokens: list[int]) -> None:
        for token in tokens:
            last = self.chain[-1] if self.chain else 1
            self.chain.append((last * 1_000_003 + token * 7919 + 12_345) % CHAINS)
        self.tokens += tokens

    def first(self, length: int) -> History:
        return History(self.tokens[:length], self.chain[:length])


class Kv:
    """The KV memory of one worker, by the kernels; rows of layer l at a position with chain c are `rows[l][c]`."""

    def __init__(self, ops: Any, layout: PagedLayout) -> None:
        self.ops, self.layout = ops, layout
        rng = np.random.default_rng(5)
        shapes = [(layer.num_kv_heads, layer.head_dim_k + layer.head_dim_v) for layer in layout.layers]
        self.rows = [rng.standard_normal((CHAINS, *shape)).astype(np.float32) for shape in shapes]

    def copy(self, copies: list[BlockCopy]) -> None:
        if copies:
            sources, targets = zip(*((each.source, each.target) for each in copies), strict=True)
            self.ops.copy_blocks(np.array(sources, np.uint32), np.array(targets, np.uint32))

    def append(self, entries: Any, first: int, chain: list[int]) -> None:
        slots = np.array(slot_mapping(entries, first, first + len(chain), self.layout.block_size), np.int64)
        for index, layer in enumerate(self.layout.layers):
            rows = self.rows[index][chain]
            k, v = rows[..., : layer.head_dim_k], rows[..., layer.head_dim_k :]
            self.ops.append(index, np.ascontiguousarray(k), np.ascontiguousarray(v), slots)

    def check(self, entries: Any, chain: list[int]) -> None:
        """Every layer's gathered K and V are the history's, bit for bit."""
        if not chain:
            return
        for index, layer in enumerate(self.layout.layers):
            heads, length = layer.num_kv_heads, len(chain)
            k = np.empty((heads, length, layer.head_dim_k), np.float32)
            v = np.empty((heads, length, layer.head_dim_v), np.float32)
            self.ops.gather(index, np.array(entries, np.uint32), length, k, v)
            wanted: npt.NDArray[np.float32] = self.rows[index][chain].swapaxes(0, 1)
            got = np.concatenate([k, v], axis=2)
            assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32)), f"layer {index}"


class Player:
    """One worker's tables and histories. `pool` answers at once or later; a grant is waited for only where there is
    nothing in reserve."""

    def __init__(self, pool: KvPool, kv: Kv, seed: int) -> None:
        self.pool, self.kv, self.random = pool, kv, random.Random(seed)
        self.size = pool.info.block_size
        self.tables = BlockTables(self.size)
        self.histories: dict[int, History] = {}
        self.known: list[History] = []  # of tables that are gone: prefixes that the pool may still have
        self.pending: dict[int, list[int]] = {}
        self.copied = self.forked = self.cut_by_copy = self.matched = self.moved = 0
        self.flight = Flight(kv)
        self.next_token: Callable[[History], int] = lambda history: self.random.randint(0, 2)
        self.on_check: Callable[[int, History], None] = lambda table_id, history: None
        self.alone = 0.0  # how often it looks for no prefix
        self._ref = 0

    def send(self) -> None:
        """Tell memd what was done, and top up the reserve."""
        self.tables.ask(RESERVE_REF + self._next_ref(), RESERVE, 4)
        self.submit()
        self.hear()

    def copy(self, copies: list[BlockCopy]) -> None:
        self.kv.copy(copies)
        self.tables.copied(len(copies))

    def submit(self) -> None:
        for step in [*self.tables.take_steps(), Step(acknowledged=self.flight.acknowledgements.take())]:
            if step:
                self.pool.submit(step)

    def hear(self) -> None:
        for event in self.pool.poll():
            if isinstance(event, Grant) and event.ref >= RESERVE_REF:
                self.tables.granted(event)
            elif isinstance(event, Grant):
                self._created(event)
            elif isinstance(event, Refusal) and event.ref >= RESERVE_REF:
                self.tables.refused(event.ref)
            elif isinstance(event, Refusal):
                self.pending.pop(event.ref)
            elif isinstance(event, Remap):
                self.tables.remap(event)
                self.flight.acknowledgements.heard(event.sequence)
                self.moved += 1
            else:
                assert isinstance(event, Capacity), event

    def play(self, num_operations: int) -> None:
        """One interleaving; afterwards the tables are gone."""
        for _ in range(num_operations):
            self._move()
            self.send()
            self.check()
        self.leave()

    def finish(self) -> None:
        """Give the reserve back."""
        while self.flight:
            self.flight.land()
        while self.tables.awaits_reserve:
            self.pool.wait(1.0)
            self.hear()
        self.tables.give_back(self.tables.spare_blocks)
        self.submit()

    def settle(self) -> None:
        while self.pending:
            self.pool.wait(1.0)
            self.hear()

    def check(self) -> None:
        for table_id, history in self.histories.items():
            table = self.tables[table_id]
            assert table.num_tokens == len(history.tokens)
            self.kv.check(table.entries, history.chain)
            self.on_check(table_id, history)

    def _next_ref(self) -> int:
        self._ref += 1
        return self._ref

    def _move(self) -> None:
        moves = [self._append, self._append, self._append, self._fork, self._fork, self._truncate, self._drop_one]
        move = self.random.choice(moves) if self.histories else self._create
        if len(self.histories) < 2 and self.random.random() < 0.3:
            move = self._create
        try:
            move()
        except ReserveShortError:
            self._make_room()

    def _make_room(self) -> None:
        if len(self.histories) > 2:
            self._drop_one()
        self.pool.wait(0.01)

    def _create(self) -> None:
        """A table by prefix: of one that there is or was, or of none."""
        of = [*self.known[-8:], *self.histories.values(), History([3])]
        prompt = [*self.random.choice(of).tokens, 0]
        ref = self._next_ref()
        blocks = -(-len(prompt) // self.size) + self.random.randint(0, 1)
        self.pending[ref] = prompt
        no_match = self.random.random() < self.alone
        self.pool.submit(Step(creates=[TableRequest(ref, prompt, blocks, no_match=no_match)]))
        self.settle()

    def _created(self, grant: Grant) -> None:
        table = self.tables.created(grant)
        history = History()
        history.grow(self.pending.pop(grant.ref)[: grant.cached_tokens])
        self.histories[table.table_id] = history
        self.matched += grant.cached_tokens > 0

    def _append(self) -> None:
        """Some tokens; of those written at first, some may be taken back and written anew (speculation)."""
        table_id = self._any()
        count = self.random.choice([1, 1, 2, 3, self.size, self.size + 3])
        if len(self.histories[table_id].tokens) + count > 5 * self.size:
            return
        tokens = self._next_tokens(table_id, count)
        self._write(table_id, tokens)
        if self.random.random() < 0.2:
            self.tables.retract(table_id, self.tables[table_id].num_tokens)
            tokens = self._next_tokens(table_id, self.random.randint(1, count))
            self._write(table_id, tokens)
        self.tables.commit(table_id, tokens)
        self.histories[table_id].grow(tokens)

    def _next_tokens(self, table_id: int, count: int) -> list[int]:
        history = self.histories[table_id].first(len(self.histories[table_id].tokens))
        for _ in range(count):
            history.grow([self.next_token(history)])
        return history.tokens[-count:]

    def _write(self, table_id: int, tokens: list[int]) -> None:
        copies = self.tables.prepare(table_id, len(tokens))
        self.copy(copies)
        self.copied += len(copies)
        first = self.tables[table_id].num_tokens
        after = self.histories[table_id].first(first)
        after.grow(tokens)
        self.kv.append(self.tables[table_id].entries, first, after.chain[first:])

    def _fork(self) -> None:
        if len(self.histories) < 8:
            table_id = self._any()
            history = self.histories[table_id]
            self.histories[self.tables.fork(table_id)] = history.first(len(history.tokens))
            self.forked += 1

    def _truncate(self) -> None:
        table_id = self._any()
        history = self.histories[table_id]
        length = self.random.randint(0, len(history.tokens))
        self.flight.land_those_of(table_id)
        copies = self.tables.truncate(table_id, length)
        self.copy(copies)
        self.cut_by_copy += len(copies)
        self.histories[table_id] = history.first(length)

    def _drop_one(self) -> None:
        self._release(self._any())

    def fly(self) -> None:
        """Launch a step that reads some tables, or land one."""
        if self.flight and (len(self.flight) >= 10 or self.random.random() < 0.25):
            self.flight.land()
        else:
            tables = [one for one in self.histories if self.random.random() < 0.6]
            self.flight.launch([(one, list(self.tables[one].entries), self._sealed(one)) for one in tables])

    def _sealed(self, table_id: int) -> list[int]:
        """The rows of a table's full blocks. What is behind them is replaced by no step but the one that writes to it:
        an engine forks no table with a step in flight."""
        chain = self.histories[table_id].chain
        return chain[: len(chain) // self.size * self.size]

    def leave(self) -> None:
        """Release all tables."""
        while self.tables or self.pending:
            self.settle()
            for table_id in list(self.histories):
                self._release(table_id)
            self.send()

    def _release(self, table_id: int) -> None:
        self.flight.land_those_of(table_id)
        self.tables.release(table_id)
        self.known.append(self.histories.pop(table_id))

    def _any(self) -> int:
        return self.random.choice(list(self.histories))
