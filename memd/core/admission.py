"""Requests for blocks: each is granted or refused alone, the more urgent first served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memd.core.apart import HeldApart
from memd.core.block import TOKEN_BYTES
from memd.core.lease import Lease
from memd.core.operations import ReserveRequest
from memd.core.state import Plan, PoolState
from memd.core.table import Table
from memd.core.values import ExtendRequest, Grant, Refusal, RefusalReason, Step, TableRequest
from memd.core.victims import Victims, rank_of
from memd.core.waiting import CLAIM_S, NOBODY, Asker, Waiting

Creates = Sequence[tuple[TableRequest, bytes]]
"""Requests for tables with their packed token ids."""


class Admission:
    """Answers the requests of steps. A refused one is remembered; one that waits claims blocks.

    For the most urgent of a step, of tables that grow and of those to begin, other tables have to yield.
    """

    def __init__(self, state: PoolState, waiting: Waiting, victims: Victims) -> None:
        self._state = state
        self._waiting = waiting
        self._victims = victims
        self._apart = HeldApart(state)

    def answer(self, lease: Lease, step: Step, creates: Creates, now: float) -> tuple[list[Grant], list[Refusal]]:
        """Grants and refusals of a step that has been checked and otherwise applied.

        What a table cannot go on without comes first, then each kind in the order of the request.
        """
        self._waiting.expire(now)
        self._apart.forget()
        urgent = [reserve for reserve in step.reserves if reserve.for_table_id]
        if urgent:
            self._waiting.drop_claim(lease.lease_id, grows=True)
        answers = [self._reserve(lease, reserve, now) for reserve in urgent]
        if urgent and (claim := self._waiting.claim_of(lease.lease_id, grows=True)) is not None:
            self._victims.for_growth(claim.asker, self._waiting.missing(claim), now)
        if creates:
            self._waiting.drop_claim(lease.lease_id, grows=False)
        answers += [self._create(lease, create, packed, now) for create, packed in creates]
        if creates and (claim := self._waiting.claim_of(lease.lease_id, grows=False)) is not None:
            self._victims.for_creation(claim.asker, self._waiting.missing(claim), claim.found, now)
        answers += [self._extend(lease, extend, now) for extend in step.extends]
        answers += [self._reserve(lease, reserve, now) for reserve in step.reserves if not reserve.for_table_id]
        grants = [answer for answer in answers if isinstance(answer, Grant)]
        return grants, [answer for answer in answers if isinstance(answer, Refusal)]

    def _create(self, lease: Lease, request: TableRequest, packed: bytes, now: float) -> Grant | Refusal:
        store, suspended = self._state.cut_store(), lease.tables.get(request.resume_table_id)
        if suspended is not None and suspended.kept is not None:
            request, packed = replace(request, salt=suspended.salt, exact=suspended.exact), suspended.kept
        asker = self._creator(lease, request, suspended, now)
        headroom = request.headroom if request.headroom and self._state.is_in_use() else 0
        plan = self._state.plan(request, packed, self._waiting.claimed_before(asker) + headroom)
        if request.wait_for_prefix and self._awaits(lease, request, plan, now):
            self._state.counters.prefix_pending_requests += 1
            available = len(plan.matched) + max(plan.spare, 0)
            return Refusal(request.ref, RefusalReason.PREFIX_PENDING, available, store.num_blocks)
        if request.num_blocks > store.most_blocks:
            return self._refuse(request.ref, asker, request.num_blocks, plan.spare, plan)
        if not plan.fits:
            refusal = self._refuse(request.ref, asker, request.num_blocks, plan.spare, plan, headroom=headroom)
            if plan.num_blocks <= refusal.total_blocks - refusal.pinned_blocks - refusal.held_blocks:
                self._waiting.claim(asker, plan.needed + headroom, now + CLAIM_S, plan.matched)
            return refusal  # without a claim it waits for those who pin and hold, and nobody waits for it
        if suspended is not None:
            self._state.resume_table(lease, suspended, plan, now)
        table = suspended or self._state.create_table(lease, request, plan, now)
        to_come = store.index.following(plan.matched, packed, request.salt, plan.below + plan.fresh)
        self._state.promises.make(table.table_id, to_come)
        source = store.entry(plan.source) if plan.run else None
        return Grant(request.ref, table.table_id, table.cached_tokens, store.run(table.frames), copy_source=source)

    def _awaits(self, lease: Lease, request: TableRequest, plan: Plan, now: float) -> bool:
        """Whether another table works on so much of what was not found that it is worth a wait; notes who waits."""
        size, promises = self._state.block_size, self._state.promises
        most = (len(plan.packed) // TOKEN_BYTES - 1) // size - len(plan.matched)  # the last token is never found
        if not promises or request.no_match or most * size < promises.min_tokens:
            return False
        digests = self._state.cut_store().index.following(plan.matched, plan.packed, request.salt, most)
        last, count = promises.longest(digests, lambda table_id: self._state.keeps_up(table_id, now))
        if not count or count * size < promises.min_tokens:
            return False
        promises.wait(lease.lease_id, last)
        return True

    def _creator(self, lease: Lease, request: TableRequest, suspended: Table | None, now: float) -> Asker:
        if suspended is not None:
            return Asker(lease.lease_id, suspended.table_id, rank_of(suspended), grows=False)
        rank = (-request.priority, request.arrival or now, self._state.last_id + 1)
        return Asker(lease.lease_id, 0, rank, grows=False)

    def _extend(self, lease: Lease, request: ExtendRequest, now: float) -> Grant | Refusal:
        store, table = self._state.cut_store(), lease.tables[request.table_id]
        asker = Asker(lease.lease_id, table.table_id, rank_of(table), grows=True)
        in_all, spare = len(table.frames) + request.num_blocks, self._waiting.spare_for(asker)
        if in_all > store.num_blocks or request.num_blocks > spare:
            return self._refuse(request.ref, asker, in_all, spare)
        frames = self._state.extend_table(table, request.num_blocks, now)
        return Grant(request.ref, table.table_id, 0, store.run(frames))

    def _reserve(self, lease: Lease, request: ReserveRequest, now: float) -> Grant | Refusal:
        store, table = self._state.cut_store(), lease.tables.get(request.for_table_id)
        rank = NOBODY if table is None else rank_of(table)
        asker = Asker(lease.lease_id, request.for_table_id, rank, grows=True)
        in_all, spare = len(lease.references) + request.num_blocks, self._waiting.spare_for(asker)
        if in_all > store.num_blocks or request.num_blocks > spare:
            if table is not None and in_all <= store.num_blocks:
                self._claim(lease, table, asker, request.num_blocks, now)
            return self._refuse(request.ref, asker, in_all, spare)
        frames = store.grant(request.num_blocks, (lease.lease_id,), now)
        lease.references.update(dict.fromkeys(frames, 1))
        ids = [self._state.new_id() for _ in range(request.num_tables)]
        lease.reserved_ids.update(ids)
        return Grant(request.ref, ids[0] if ids else 0, 0, store.run(frames), len(ids))

    def _claim(self, lease: Lease, table: Table, asker: Asker, num_blocks: int, now: float) -> None:
        """A table cannot go on. One that has to yield itself claims nothing."""
        if table.yielding_since is not None:
            return
        # A worker whose steps take long asks again late; its table is there all the time, and waits.
        pace = min(2 * (now - lease.stepped), lease.ttl_s)
        self._waiting.claim(asker, num_blocks, now + max(CLAIM_S, pace))

    def _refuse(
        self, ref: int, asker: Asker, in_all: int, spare: int, plan: Plan | None = None, *, headroom: int = 0
    ) -> Refusal:
        store, matched = self._state.cut_store(), plan.matched if plan else ()
        pinned, available = store.num_pinned_beside(matched), len(matched) + max(spare, 0)
        self._state.counters.refused_requests += 1
        total = store.most_blocks if in_all > store.num_blocks else store.num_blocks
        if in_all > total:
            return Refusal(ref, RefusalReason.REQUEST_TOO_LARGE, available, total, pinned)
        self._waiting.starve(asker, for_headroom=plan is not None and plan.fresh <= plan.spare + headroom)
        held = self._apart.cornering(plan) if plan and not plan.below else 0
        return Refusal(ref, RefusalReason.POOL_EXHAUSTED, available, total, pinned, held)
