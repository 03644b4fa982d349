"""Sharing for clients, one unary command each: fork a table, truncate it, copy blocks.

memd copies the bytes itself, since no client maps the pool: each command returns the copies that its caller has to
carry out, in order, before anything else happens to the pool. What is copied from cannot be written meanwhile: it is
sealed, or a client's; what is copied to belongs to the client alone. First among them is what was evicted to the host
tier to make room: it lies where the client's copies go.
"""

from __future__ import annotations

from collections.abc import Sequence

from memd.core import errors, views
from memd.core.clients import ClientLeases
from memd.core.draft import Draft
from memd.core.operations import Fork, Truncate
from memd.core.pending import Move
from memd.core.state import PoolState
from memd.core.store import BlockStore
from memd.core.values import BlockCopy, BlockRun, TableView
from pagepool.errors import invalid_field

MAX_COPY_BYTES = 32 << 20
"""Bytes that one command may ask to copy: what keeps workers waiting for less than the time of a step."""


class Sharing:
    """The commands, under client leases."""

    def __init__(self, state: PoolState, clients: ClientLeases) -> None:
        self._state = state
        self._clients = clients

    @property
    def max_copied_blocks(self) -> int:
        """Blocks of one copy_blocks command."""
        layout = self._state.layout
        return max(MAX_COPY_BYTES // layout.block_bytes, 1) if layout else 1

    def fork_table(self, lease_id: int, table_id: int, now: float) -> TableView:
        """A new table that shares all blocks of a table of the lease."""
        table = self._clients.table(lease_id, table_id, now)
        lease = self._state.leases[lease_id]
        self._clients.require_table(lease)
        new_id = self._state.new_id()
        lease.reserved_ids.add(new_id)
        draft = Draft(self._state, lease, {})
        draft.do(Fork(table.table_id, new_id))
        draft.apply(now)
        self._state.version += 1
        return views.table_view(self._state, self._state.tables[new_id], now)

    def truncate_table(
        self, lease_id: int, table_id: int, num_tokens: int, now: float
    ) -> tuple[TableView, list[BlockCopy]]:
        """A table of the lease without its committed tokens from `num_tokens` on, by copy inside a shared block."""
        table = self._clients.table(lease_id, table_id, now)
        lease, store = self._state.leases[lease_id], self._state.cut_store()
        if not 0 <= num_tokens <= table.num_tokens:
            limit = f"from 0 to the table's {table.num_tokens} committed tokens"
            raise invalid_field("num_tokens", num_tokens, limit, "read GetBlockTable")
        draft, block_id = Draft(self._state, lease, {}), 0
        if draft.must_copy(table_id, num_tokens):
            self._require_native(store, table.frames[num_tokens // self._state.block_size], num_tokens)
            self._clients.require(store, 1, 1, self._clients.spare())
            (frame,) = store.grant(1, (lease_id,), now)
            lease.references[frame] = 1
            block_id = store.blocks.ids[frame]
        draft.do(Truncate(table_id, num_tokens, block_id))
        draft.apply(now)
        self._state.version += 1
        return views.table_view(self._state, table, now), self._copies(draft.moves)

    def copy_blocks(self, lease_id: int, block_ids: Sequence[int], now: float) -> tuple[BlockRun, list[BlockCopy]]:
        """New blocks of the lease with what these blocks hold."""
        lease = self._clients.find(lease_id, now)
        count, most = len(block_ids), self.max_copied_blocks
        if count > most:
            limit = f"at most {most} in one call, {MAX_COPY_BYTES >> 20} MiB of blocks"
            raise invalid_field("block_ids", f"{count} ids", limit, "copy the rest in further calls")
        frames, store = self._clients.frames(block_ids), self._state.cut_store()
        for frame in frames:
            self._clients.require_readable(lease, frame)
        sources = list(dict.fromkeys(frames))
        num_units = sum(map(store.units.is_unit, frames))
        fresh = count - num_units + store.units.frames_for(num_units)
        spare = max(self._clients.spare() - store.num_evictable(sources), 0)
        self._clients.require(store, fresh, fresh, spare)
        targets = self._grant(store, lease_id, frames, now)
        lease.references.update(dict.fromkeys(targets, 1))
        moves = [
            Move(source, target, store.blocks.num_tokens[source])
            for source, target in zip(frames, targets, strict=True)
        ]
        for move in moves:
            store.blocks.copy(move.source, move.target, move.num_tokens)
        self._state.version += 1
        return store.run(targets), self._copies(moves)

    def _grant(self, store: BlockStore, lease_id: int, sources: Sequence[int], now: float) -> list[int]:
        """A place of the same kind for a copy of each of these blocks, none of which is evicted for it."""
        holders, unique = (lease_id,), list(dict.fromkeys(sources))
        whole = sum(not store.units.is_unit(place) for place in sources)
        if whole == len(sources):
            return store.grant_beside(whole, holders, unique, now)
        store.hold(unique, holders, now)
        frames = iter(store.grant(whole, holders, now))
        targets = [store.grant_unit(holders, now) if store.units.is_unit(place) else next(frames) for place in sources]
        store.release_all(reversed(unique), lease_id, now)
        return targets

    def _require_native(self, store: BlockStore, place: int, num_tokens: int) -> None:
        if store.units.is_unit(place):
            raise errors.block_compressed(store.blocks.ids[place], num_tokens, self._state.block_size)

    def _copies(self, moves: Sequence[Move]) -> list[BlockCopy]:
        store = self._state.cut_store()
        entry, hurried = store.entry, store.take_hurried()
        pairs = [*hurried, *((move.source, move.target) for move in moves)]
        return [BlockCopy(entry(source), entry(target)) for source, target in pairs if source != target]
