"""Moving a block under its readers: tables have another block in its place at once, its frame is given away later.

Who computes with a table cannot be stopped, so a worker is told by a Remap, and the old block is quarantined until each
worker whose tables had it has said that no step in flight reads it any more, or can let nothing out any more: it has
ended, or is fenced. Clients' tables are read by nobody. Only sealed blocks move, so none is written under way.

What a worker did before it heard of a Remap arrives after it. Why everything it says still comes to the same tables:

* Operations name tables, indices, and blocks of the reserve, which are not sealed and never move. A sealed block keeps
  its index in a table for as long as it is there, so memd applies each operation to the new block where the worker
  applied it to the old one; both have the same tokens after the same prefix, and the same KV.
* Commits write behind the sealed blocks. Truncate needs a copy where the new end lies in a sealed block, which both
  sides find by the committed length, or in an unsealed one that is shared, which does not move.
* CopyOnWrite and Truncate copy from the old block in the worker's memory. It is quarantined for as long as that may
  run: a worker acknowledges only when the copies that it was about to launch are over too.
* Fork: memd copies the new block into a table that the worker forked with the old one, and has no Remap for it. So a
  Remap is about the block: the worker replaces it in all of its tables, whichever is named.
* A table that was released, truncated or suspended, and perhaps filled anew, has another block at that index, or none:
  the worker replaces only a block with the old id. Ids are never used twice, so a Remap may also come twice.
* Steps of one message: blocks are merged after its operations, which were drafted on the tables of before.
* A stream that breaks: what is not acknowledged is told again on the next one, and a Grant that is repeated has the
  blocks of now.
"""

from __future__ import annotations

from collections.abc import Iterable

from memd.core.lease import Lease, Remap, Unread
from memd.core.state import PoolState
from memd.core.values import LeaseState

ACK_TIMEOUT_S = 30.0


class Remaps:
    """Moves blocks, and keeps what workers may still read.

    `ack_timeout_s`: a worker that has not acknowledged a Remap so long after it was told is late, and ended by a tick.
    """

    def __init__(self, state: PoolState) -> None:
        self.ack_timeout_s = ACK_TIMEOUT_S
        self._state = state
        self._listeners_with_news: set[int] = set()

    # -- workers

    def listen(self, lease_id: int, now: float) -> None:
        """The worker of a live lease listens, on a new stream: blocks of its tables may move from now on.

        It is told again what it has not acknowledged, and has the full time for it.
        """
        lease = self._state.leases[lease_id]
        lease.takes_remaps = True
        lease.last_told = 0
        self._wait_for(lease, now)
        if lease.remaps:
            self._listeners_with_news.add(lease_id)

    def leases_with_news(self) -> list[int]:
        """Leases whose workers have to be told something."""
        return sorted(self._listeners_with_news)

    def take_news(self, lease_id: int) -> list[Remap]:
        """What to tell the worker of a lease that is among those with news, in order; each once per stream."""
        self._listeners_with_news.discard(lease_id)
        lease = self._state.leases.get(lease_id)
        if lease is None:
            return []
        news = [unread.remap for unread in lease.remaps if unread.remap.sequence > lease.last_told]
        lease.last_told = lease.last_remap
        return news

    def acknowledge(self, lease: Lease, sequence: int, now: float) -> None:
        """No step in flight of a worker reads what the Remaps up to this one replaced; 0 if it has nothing to say."""
        if not lease.remaps or lease.remaps[0].remap.sequence > sequence:
            return
        while lease.remaps and lease.remaps[0].remap.sequence <= sequence:
            self._state.stop_reading(lease, lease.remaps.popleft().frame, now)
        self._wait_for(lease, now)

    def unfenced(self) -> list[tuple[int, str]]:
        """(lease id, lock file) of the lost workers that could still let out what they read."""
        leases = self._state.leases.values()
        return [(one.lease_id, one.lock_file) for one in leases if one.state is LeaseState.LOST and not one.is_fenced]

    def fenced(self, lease_id: int, now: float) -> None:
        """The fence of a lost lease is up: nothing that its worker reads from now on leaves it.

        So what it only read is given away without it. What it could write stays quarantined until its process is gone.
        """
        lease = self._state.leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.LOST:
            return
        lease.is_fenced = True
        while lease.remaps:
            self._state.stop_reading(lease, lease.remaps.popleft().frame, now)
        self._state.version += 1

    # -- moves

    def merge(self, sealed: Iterable[tuple[int, int]], now: float) -> None:
        """Give up each of these just sealed (frame, index in its tables) for an equal block in the index.

        Of two equal blocks the exact one stays, then the one on the device. Then the one in the index stays, which
        others may be matching.
        """
        store = self._state.cut_store()
        blocks, frames, is_host = store.blocks, store.index.frames, store.units.is_host
        for frame, index in sealed:
            twin = frames.get(blocks.digests[frame], frame)
            # Operations of the same step may have released it, and what the index has then is itself or nothing.
            if twin == frame or blocks.prefixes[twin] != blocks.prefixes[frame]:
                continue
            worse = (blocks.lossy[twin], is_host(twin)) > (blocks.lossy[frame], is_host(frame))
            stays, goes = (frame, twin) if worse else (twin, frame)
            if goes in store.cached.kept:
                continue
            if not blocks.holders[goes]:
                store.supersede(goes, stays)
            elif self.move(goes, stays, index, now):
                self._state.counters.merged_blocks += 1

    def move(self, source: int, target: int, index: int, now: float) -> bool:
        """From now on all tables have the block in frame `target` where they had the one in `source`.

        Both are sealed, with the same tokens after the same prefix, the bytes are there, `source` is no kept prefix,
        and `index` is their place in a table. Direct references stay. False, and nothing is done, if a table is of a
        worker that does not listen.
        """
        state, store = self._state, self._state.cut_store()
        blocks = store.blocks
        tables = [state.tables[holder] for holder in blocks.holders[source] if holder in state.tables]
        leases = [state.leases[table.lease_id] for table in tables]
        if any(lease.is_worker and not lease.takes_remaps for lease in leases):
            return False
        if store.index.frames.get(blocks.digests[source]) == source:
            store.index.add(target)
        old_id, new_id, entry = blocks.ids[source], blocks.ids[target], store.entry(target)
        for table, lease in zip(tables, leases, strict=True):
            store.hold([target], (table.table_id,), now)
            table.frames[index] = target
            table.lossy |= blocks.lossy[source] > blocks.lossy[target]
            if lease.is_worker and not lease.is_fenced:
                remap = Remap(lease.last_remap + 1, table.table_id, index, old_id, new_id, entry)
                self._tell(lease, Unread(remap, source, old_id), now)
            store.release(source, table.table_id, now)
        return True

    def follow(self, holder: int, places: tuple[int, int], count: int, now: float) -> None:
        """A block has moved from one place to another: so do these references of a holder, but a worker's own.

        What a worker is still to copy, or may still read since its tables moved on, it has at the old place. Its tables
        must take remaps.
        """
        (source, target), state, store = places, self._state, self._state.cut_store()
        table = state.tables.get(holder)
        lease = state.leases[holder if table is None else table.lease_id]
        if count < 1 or (table is None and lease.is_worker):
            return
        store.hold_counted({target: count}, holder, now)
        if table is None:
            lease.references[target] = lease.references.pop(source)
        else:
            index = table.frames.index(source)
            table.frames[index] = target
            if lease.is_worker and not lease.is_fenced:
                block_id, left = store.blocks.ids[target], store.blocks.ids[source]
                remap = Remap(lease.last_remap + 1, holder, index, block_id, block_id, store.entry(target))
                self._tell(lease, Unread(remap, source, left), now)
        store.release_counted({source: count}, holder, now)

    def _tell(self, lease: Lease, unread: Unread, now: float) -> None:
        lease.last_remap = unread.remap.sequence
        lease.remaps.append(unread)
        self._state.start_reading(lease, unread.frame, now)
        self._state.counters.remaps += 1
        self._listeners_with_news.add(lease.lease_id)
        if len(lease.remaps) == 1:
            self._wait_for(lease, now)

    def _wait_for(self, lease: Lease, now: float) -> None:
        lease.ack_deadline = now + self.ack_timeout_s if lease.remaps else float("inf")
