"""Rules: prefixes that are kept."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from memd.core.values import Commit, PinRequest, Step, TableRequest
from tests.cpu.pool_machine import PoolMachine, streams
from tests.cpu.pool_model_values import SIZE


class PinRules(PoolMachine):
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

        self.agree(actual, lambda: self.model.pins.pin(tokens, salt, (priority, pinned, self.now + ttl)))

    @rule(tokens=streams)
    def unpin(self, tokens: list[int]) -> None:
        def actual() -> Any:
            found = self.pool.prefixes.unpin(tokens, b"", self.now)
            return found.num_tokens, found.num_blocks, found.was_kept

        self.agree(actual, lambda: self.model.pins.unpin(tokens, b""))

    @rule(
        lengths=st.permutations([1, 2, 3]),
        priorities=st.lists(st.sampled_from([-1, 0, 3]), min_size=3, max_size=3),
        pinned=st.sampled_from([0, 0, 1, 2, 3]),
        undone=st.integers(0, 3),
        data=st.data(),
    )
    def pins_overlap(
        self, lengths: list[int], priorities: list[int], pinned: int, undone: int, data: st.DataObject
    ) -> None:
        """Prefixes of one another are kept, each in its own way, and one of them no more."""
        lease, tokens = self.worker(data), [0] * (3 * SIZE)
        self.send(lease, Step(self.next_step(lease), creates=[TableRequest(tokens, 3)]))
        table_id = self.model.next_id - 1
        table = self.model.tables.get(table_id)
        if table is not None and table.lease == lease and len(table.blocks) == 3 and len(table.tokens) == table.cached:
            self.send(lease, Step(self.next_step(lease), [Commit(table_id, tokens[table.cached :])], [table_id]))
        for blocks, priority in zip(lengths, priorities, strict=True):
            self.pin(tokens[: blocks * SIZE], b"", priority, blocks == pinned, float((blocks * 7 + priority) % 5 + 1))
        self.unpin(tokens[: undone * SIZE])

    @rule(left=st.integers(1, 2), data=st.data())
    def end_of_a_kept_prefix_is_lost(self, left: int, data: st.DataObject) -> None:
        """All blocks but one or two are taken at once and given back; what is left of the prefix is kept."""
        lease, table_id, tokens = self.worker(data), self.model.next_id, [1] * (3 * SIZE)
        self.send(lease, Step(self.next_step(lease), creates=[TableRequest(tokens, 3, no_match=True)]))
        if table_id not in self.own_tables(lease):
            return
        self.send(lease, Step(self.next_step(lease), [Commit(table_id, tokens)], [table_id]))
        self.pin(tokens, b"", 3, False, 10.0)  # as the rule above takes it
        self.take_and_give_back(lease, self.model.available - left)
        self.take_and_give_back(lease, self.model.available - 1)

    def take_and_give_back(self, lease: int, count: int) -> None:
        table_id = self.model.next_id
        if count > 0:
            self.send(lease, Step(self.next_step(lease), creates=[TableRequest((), count)]))
        if table_id in self.own_tables(lease):
            self.send(lease, Step(self.next_step(lease), releases=[table_id]))
