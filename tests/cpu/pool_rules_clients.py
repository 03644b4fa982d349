"""Rules: commands of clients."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from memd.core.values import (
    TableRequest,
)
from tests.cpu.pool_machine import PoolMachine, requests


class ClientRules(PoolMachine):
    @rule(count=st.integers(1, 5), data=st.data())
    def allocate(self, count: int, data: st.DataObject) -> None:
        lease = self.client(data)

        def actual() -> Any:
            run = self.pool.allocate_blocks(lease, count, self.now)
            return list(run.block_ids), list(run.entries)

        self.agree(actual, lambda: self.model.clients.allocate(lease, count, self.now))

    @rule(data=st.data())
    def free_blocks(self, data: st.DataObject) -> None:
        lease = self.client(data)
        own = [one for one in self.model.order.get(lease, []) if data.draw(st.booleans())]
        ids = own or data.draw(self.blocks())
        self.agree(
            lambda: self.pool.free_blocks(lease, ids, self.now),
            lambda: self.model.clients.free_blocks(lease, ids, self.now),
        )

    @rule(data=st.data())
    def share_blocks(self, data: st.DataObject) -> None:
        lease, ids = self.client(data), data.draw(self.blocks())
        self.agree(
            lambda: self.pool.share_blocks(lease, ids, self.now), lambda: self.model.clients.share(lease, ids, self.now)
        )

    @rule(request=requests, data=st.data())
    def create_table(self, request: TableRequest, data: st.DataObject) -> None:
        lease, request = self.client(data), dataclasses.replace(request, partial=False, headroom=0)

        def actual() -> Any:
            table = self.pool.create_table(lease, request, self.now)
            return table.table_id, list(table.blocks.block_ids), list(table.blocks.entries), table.cached_tokens

        self.agree(actual, lambda: self.model.clients.create_table(lease, request, self.now))

    @rule(count=st.integers(1, 3), data=st.data())
    def extend_table(self, count: int, data: st.DataObject) -> None:
        lease = self.client(data)
        table = data.draw(self.tables(lease))

        def actual() -> Any:
            run = self.pool.extend_table(lease, table, count, self.now)
            return list(run.block_ids), list(run.entries)

        self.agree(actual, lambda: self.model.clients.extend_table(lease, table, count, self.now))

    @rule(data=st.data())
    def release_table(self, data: st.DataObject) -> None:
        lease = self.client(data)
        table = data.draw(self.tables(lease))

        def expected() -> None:
            self.model.clients.own_table(lease, table, self.now)
            self.model.drop_table(table)

        self.agree(lambda: self.pool.release_table(lease, table, self.now), expected)

    @rule(data=st.data())
    def client_forks(self, data: st.DataObject) -> None:
        lease = self.client(data)
        table = data.draw(self.tables(lease))

        def actual() -> Any:
            view = self.pool.sharing.fork_table(lease, table, self.now)
            return view.table_id, list(view.blocks.block_ids), list(view.blocks.entries), view.cached_tokens

        self.agree(actual, lambda: self.model.clients.client_forks(lease, table, self.now))

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

        self.agree(actual, lambda: self.model.clients.client_truncates(lease, table, count, self.now))

    @rule(data=st.data())
    def client_copies(self, data: st.DataObject) -> None:
        lease, ids = self.client(data), data.draw(self.blocks())

        def actual() -> Any:
            run, copies = self.pool.sharing.copy_blocks(lease, ids, self.now)
            return list(run.block_ids), list(run.entries), [(one.source, one.target) for one in copies]

        self.agree(actual, lambda: self.model.clients.client_copies(lease, ids, self.now))
