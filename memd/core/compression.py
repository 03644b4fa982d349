"""Blocks that are stored in FP8 from now on, or no more, and stay what they were for whoever has them.

A command names the blocks; each gets a place of the other format, and a worker that computes is told to fill it
(Recode). When it has, the block moves there, if its errors are within the bound and nothing has happened to it that
speaks against it. Until then nothing is different for anybody. What a block leaves behind, its old place, has a new id,
and is quarantined like that of a merged block until no worker reads it any more (Remaps). So ids stay what they were,
and tables, leases and pins know nothing of it.

Sources and targets are held by the worker's lease. If it is lost, its Recodes come to nothing; the targets, which its
process may still write, stay quarantined until that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memd.core import errors
from memd.core.clients import ClientLeases
from memd.core.evicting import take_over
from memd.core.lease import Lease
from memd.core.recodes import Outcome, Recode, Recoded, RecodeNews
from memd.core.remaps import Remaps
from memd.core.state import PoolState
from memd.core.store import BlockStore
from memd.core.values import LeaseState
from pagepool.errors import PagepoolError, invalid_field

MAX_COMPRESSED_BYTES = 32 << 20
"""Bytes of blocks that one command may ask to compress: a worker does nothing else meanwhile."""

MAX_ERRORS = (0.12, 0.06)
"""The guard: over this, in K or in V, in the worst layer and KV head, a block stays as it is.

Gaussian values have 0.026. SmolLM2's worst heads have 0.08 to 0.1 in K and 0.04 in V, and read a text as well; keys
with outliers that make attention more than twice as wrong have more (docs/performance.md, "What FP8 blocks cost").
"""


class Compression:
    """The commands, what workers are told of them, and what they answer."""

    def __init__(self, state: PoolState, clients: ClientLeases, remaps: Remaps, *, is_on: bool) -> None:
        self.max_errors = MAX_ERRORS
        self._state = state
        self._clients = clients
        self._remaps = remaps
        self._is_on = is_on
        self._executors_with_news: set[int] = set()

    @property
    def max_blocks(self) -> int:
        """Blocks of one command."""
        layout = self._state.layout
        return max(MAX_COMPRESSED_BYTES // layout.block_bytes, 1) if layout else 1

    # -- commands

    def compress(self, lease_id: int, block_ids: Sequence[int], now: float) -> tuple[list[Outcome], list[Recode]]:
        """Have these sealed blocks stored as FP8 blocks, but for those that are.

        What those are, and the Recodes that tell of the others when they are over: each block is in one.
        """
        self._clients.find(lease_id, now)
        return self._begin(block_ids, now, to_units=True)

    def decompress(self, lease_id: int, block_ids: Sequence[int], now: float) -> tuple[list[Outcome], list[Recode]]:
        """Have those of these blocks that are FP8 blocks stored in the native format. They do not become exact."""
        self._clients.find(lease_id, now)
        return self._begin(block_ids, now, to_units=False)

    def _begin(self, block_ids: Sequence[int], now: float, *, to_units: bool) -> tuple[list[Outcome], list[Recode]]:
        if not self._is_on:
            raise errors.fp8_off()
        places, store = self._clients.frames(block_ids), self._state.cut_store()
        if len(block_ids) > self.max_blocks:
            limit = f"at most {self.max_blocks} in one call, {MAX_COMPRESSED_BYTES >> 20} MiB of blocks"
            raise invalid_field("block_ids", f"{len(block_ids)} ids", limit, "name the rest in further calls")
        there, under_way, sources = list[Outcome](), dict[tuple[int, int], Recode](), list[int]()
        for place in dict.fromkeys(places):
            if store.units.is_unit(place) is to_units:
                there.append(self._outcome(store, place))
            elif (recode := self._state.recoding.get(place)) is not None and not self._is_tier_move(recode):
                under_way[recode.lease_id, recode.sequence] = recode
            else:
                sources.append(place)
        for place in sources:
            if (reason := self.why_fixed(store, place, to_units=to_units)) is not None:
                raise reason
        jobs = list(under_way.values())
        return there, [*jobs, self._begin_one(store, sources, now, to_units=to_units)] if sources else jobs

    def _is_tier_move(self, recode: Recode) -> bool:
        """Whether memd itself moves the blocks: they keep their format, and nobody is told when it is over."""
        return self._state.mover is not None and recode.lease_id == self._state.mover.lease_id

    def _begin_one(self, store: BlockStore, sources: Sequence[int], now: float, *, to_units: bool) -> Recode:
        lease = self.executor(store, sources)
        self._require_room(store, sources, to_units=to_units)
        return self.begin(store, sources, now, to_units=to_units, lease=lease)

    def begin(self, store: BlockStore, sources: Sequence[int], now: float, *, to_units: bool, lease: Lease) -> Recode:
        """Tell a worker to store these movable blocks in the other format. There must be room for them."""
        holders, targets = (lease.lease_id,), list[int]()
        store.hold(sources, holders, now)
        for _ in sources if to_units else ():
            targets.append(store.grant_unit(holders, now))
        if not to_units:
            targets = store.grant(len(sources), holders, now)
        if not lease.recodes:
            lease.recode_deadline = now + self._remaps.ack_timeout_s
        lease.last_recode += 1
        recode = Recode(lease.last_recode, lease.lease_id, list(sources), targets, to_units)
        lease.recodes.append(recode)
        self._state.recoding.update(dict.fromkeys(sources, recode))
        self._executors_with_news.add(lease.lease_id)
        self._state.version += 1
        return recode

    def why_fixed(self, store: BlockStore, place: int, *, to_units: bool) -> PagepoolError | None:
        """Why a block cannot be stored elsewhere now; None if it can."""
        blocks, state = store.blocks, self._state
        if not blocks.prefixes[place]:
            return errors.block_unfinished(blocks.ids[place])
        if state.readers[place] or place in state.recoding:
            return errors.block_moving(blocks.ids[place])
        return self._why_wanted(store, place, to_units=to_units)

    def _why_wanted(self, store: BlockStore, place: int, *, to_units: bool) -> PagepoolError | None:
        blocks, state = store.blocks, self._state
        for holder in blocks.references(place):
            table = state.tables.get(holder)
            if table is None:
                continue
            lease = state.leases[table.lease_id]
            if lease.is_worker and not lease.takes_remaps:
                return errors.block_fixed(blocks.ids[place], lease.holder)
            if table.exact and to_units:
                return errors.block_wanted_exact(blocks.ids[place], table.table_id)
        return None

    def idle_executors(self) -> list[Lease]:
        """Workers that could recode something and have nothing to."""
        return [lease for lease in self._able() if not lease.recodes]

    def _able(self) -> list[Lease]:
        return [one for one in self._state.leases.values() if one.takes_recodes and one.state is LeaseState.LIVE]

    def executor(self, store: BlockStore, sources: Sequence[int]) -> Lease:
        """The worker to do it: on whose stream the blocks are used, for kernels of another process slow it down.

        NO_WORKER if there is none.
        """
        state, able = self._state, self._able()
        if not able:
            raise errors.no_worker()
        using: Counter[int] = Counter()
        for place in sources:
            using.update(state.tables[one].lease_id for one in store.blocks.references(place) if one in state.tables)
        return max(able, key=lambda lease: (using[lease.lease_id], -len(lease.recodes)))

    def _require_room(self, store: BlockStore, sources: Sequence[int], *, to_units: bool) -> None:
        """POOL_EXHAUSTED unless there are places for these blocks, which are not evicted for it."""
        frames = len(sources)
        if to_units:
            frames = store.units.frames_for(frames)
        spare = max(self._clients.spare() - store.num_evictable(sources), 0)
        self._clients.require_spare(store, frames, spare)

    # -- workers

    def listen(self, lease_id: int, now: float, *, takes_recodes: bool) -> None:
        """The worker of a live lease takes Recodes, or none, on a new stream.

        It is told again what it has not answered, and has the full time for it. One that took none while it had some
        to do is told none any more: what it may still write is never answered.
        """
        lease = self._state.leases[lease_id]
        takes_recodes = takes_recodes and not any(one.is_over for one in lease.recodes)
        lease.takes_recodes, lease.last_recode_told = takes_recodes, 0
        if not takes_recodes:
            self._state.abandon_recodes(lease, f"worker {lease.holder!r} takes no Recodes any more", now)
        elif lease.recodes:
            self._executors_with_news.add(lease_id)
        self._wait_for(lease, now)

    def leases_with_news(self) -> list[int]:
        """Leases whose workers have to be told something."""
        return sorted(self._executors_with_news)

    def take_news(self, lease_id: int) -> list[RecodeNews]:
        """What to tell the worker of a lease that is among those with news, in order; each once per stream."""
        self._executors_with_news.discard(lease_id)
        lease, store = self._state.leases.get(lease_id), self._state.store
        if lease is None or store is None or not lease.takes_recodes or lease.state is not LeaseState.LIVE:
            return []
        entry, told = store.entry, lease.last_recode_told
        lease.last_recode_told = lease.last_recode
        return [
            RecodeNews(one.sequence, list(map(entry, one.sources)), list(map(entry, one.targets)))
            for one in lease.recodes
            if one.sequence > told
        ]

    def take_finished(self) -> list[Recode]:
        """The Recodes that are over, each once."""
        finished, self._state.finished_recodes = self._state.finished_recodes, []
        return finished

    def require_answers(self, lease: Lease, recodings: Sequence[Recoded]) -> None:
        """PROTOCOL_VIOLATION unless these are the answers to the lease's first Recodes."""
        for recoded, recode in zip(recodings, [*lease.recodes, *[None] * len(recodings)], strict=False):
            if recode is None or recode.sequence != recoded.sequence or recode.sequence > lease.last_recode_told:
                what = f"Recode {recoded.sequence} is answered, but is not the first that waits"
                raise errors.protocol_violation(lease.lease_id, what, "answer each that was told, once, in their order")
            wanted = 2 * len(recode.sources) if recode.to_units and not recoded.failed else 0
            if len(recoded.errors) != wanted:
                what = f"Recode {recoded.sequence} is answered with {len(recoded.errors)} errors, but needs {wanted}"
                raise errors.protocol_violation(lease.lease_id, what, "give two for each block that was compressed")

    def settle(self, lease: Lease, recodings: Sequence[Recoded], now: float) -> None:
        """Carry out what a worker's answers, which were looked at by `require_answers`, make possible."""
        store = self._state.cut_store()
        for recoded in recodings:
            recode = lease.recodes.popleft()
            if recoded.failed:
                recode.failure = f"worker {lease.holder!r} could not do it: see its log"
            for number, (source, target) in enumerate(zip(recode.sources, recode.targets, strict=True)):
                del self._state.recoding[source]
                if not recoded.failed:
                    found = recoded.errors[2 * number : 2 * number + 2]
                    recode.outcomes.append(self._settle_block(store, recode, (source, target), found, now))
                store.release(target, lease.lease_id, now)
                store.release(source, lease.lease_id, now)
            recode.is_over = True
            self._state.finished_recodes.append(recode)
        self._wait_for(lease, now)
        self._state.version += 1

    def _wait_for(self, lease: Lease, now: float) -> None:
        waiting = any(not recode.is_over for recode in lease.recodes)
        lease.recode_deadline = now + self._remaps.ack_timeout_s if waiting else float("inf")

    def _settle_block(
        self, store: BlockStore, recode: Recode, places: tuple[int, int], found: Sequence[float], now: float
    ) -> Outcome:
        (source, target), counters = places, self._state.counters
        fits = all(error <= most for error, most in zip(found, self.max_errors, strict=False))  # a NaN does not
        if recode.to_units:
            store.blocks.note_errors(source, (found[0], found[1]))
            counters.blocks_over_error += not fits
        if not fits or self.why_fixed(store, source, to_units=recode.to_units) is not None:
            return self._outcome(store, source)
        self.move(store, (source, target), now, lossy=True)
        if recode.to_units:
            counters.compressed_blocks += 1
        else:
            counters.decompressed_blocks += 1
        return self._outcome(store, target)

    def _outcome(self, store: BlockStore, place: int) -> Outcome:
        blocks = store.blocks
        return Outcome(blocks.ids[place], store.format_of(place), store.entry(place), blocks.errors(place))

    def move(self, store: BlockStore, places: tuple[int, int], now: float, *, lossy: bool) -> None:
        """The movable block in the first place is in the second, and perhaps lossy, from now on.

        What stays in the first is another block, which nobody asked for.
        """
        (source, target), blocks = places, store.blocks
        take_over(store, source, target)
        blocks.note_lossy(target, lossy=lossy)
        for holder, count in dict(blocks.references(source)).items():
            self._remaps.follow(holder, (source, target), count, now)
