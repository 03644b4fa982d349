"""Steps: a worker's batches of commits, releases and requests for blocks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from memd.core import errors
from memd.core.block import TOKEN_BYTES
from memd.core.lease import Lease
from memd.core.state import MAX_SALT_BYTES, PoolState, pack_tokens
from memd.core.table import Table
from memd.core.values import ExtendRequest, Grant, Refusal, RefusalReason, Step, StepOutcome, TableRequest
from memd.core.workers import WorkerLeases


@dataclass(slots=True)
class StepPlan:
    """A step that can be applied as a whole: its tables looked up, its token ids packed."""

    commits: list[tuple[Table, bytes]] = field(default_factory=list)
    releases: list[Table] = field(default_factory=list)
    creates: list[tuple[TableRequest, bytes]] = field(default_factory=list)
    extends: list[tuple[ExtendRequest, Table]] = field(default_factory=list)


class Stepper:
    """Checks a step as a whole, then applies it: whatever breaks the protocol is found before anything has changed."""

    def __init__(self, state: PoolState, workers: WorkerLeases) -> None:
        self._state = state
        self._workers = workers

    def apply(self, lease: Lease, step: Step, now: float) -> StepOutcome:
        """The answer to a step of a live lease."""
        if lease.replaying and step.step_id <= lease.last_step:
            return self._replay(lease, step.step_id)
        if step.step_id != lease.last_step + 1:
            what = f"step_id is {step.step_id}, but must be {lease.last_step + 1}"
            raise errors.protocol_violation(lease.lease_id, what, "number steps by one, from 1, over all streams")
        plan = self._plan(lease, step)
        lease.last_step, lease.replaying = step.step_id, False
        for table, packed in plan.commits:
            self._commit(table, packed, now)
        for table in plan.releases:
            self._state.release_table(table, now)
        outcome = StepOutcome(step.step_id, *self._answer(lease, plan, now))
        lease.answers.append(outcome)
        self._state.counters.attach_steps += 1
        return outcome

    def _replay(self, lease: Lease, step_id: int) -> StepOutcome:
        for outcome in lease.answers:
            if outcome.step_id == step_id:
                return outcome
        what = f"step {step_id} is repeated, but only the last {len(lease.answers)} answers are kept"
        raise errors.protocol_violation(lease.lease_id, what, "attach anew, with fewer unanswered steps")

    def _plan(self, lease: Lease, step: Step) -> StepPlan:
        plan, released = StepPlan(), set[int]()
        room: dict[int, int] = {}
        for commit in step.commits:
            table = self._own(lease, released, commit.table_id)
            left = room.get(commit.table_id, len(table.frames) * self._state.block_size - table.num_tokens)
            room[commit.table_id] = left - len(commit.token_ids)
            if room[commit.table_id] < 0:
                what = (
                    f"{len(commit.token_ids)} tokens are committed to table {table.table_id}, which has room for {left}"
                )
                raise errors.protocol_violation(lease.lease_id, what, "extend the table before its blocks are written")
            plan.commits.append((table, self._pack(lease, commit.token_ids)))
        for table_id in step.releases:
            plan.releases.append(self._own(lease, released, table_id))
            released.add(table_id)
        for create in step.creates:
            if len(create.salt) > MAX_SALT_BYTES:
                what = f"salt is {len(create.salt)} bytes long, but may have {MAX_SALT_BYTES}"
                raise errors.protocol_violation(lease.lease_id, what, "hash a longer one")
            plan.creates.append((create, self._pack(lease, create.token_ids)))
        for extend in step.extends:
            if extend.num_blocks < 1:
                what = f"num_blocks is {extend.num_blocks}, but must be at least 1"
                raise errors.protocol_violation(lease.lease_id, what, "extend only by what is needed")
            plan.extends.append((extend, self._own(lease, released, extend.table_id)))
        return plan

    def _own(self, lease: Lease, released: set[int], table_id: int) -> Table:
        table = lease.tables.get(table_id)
        if table is None or table_id in released:
            what = f"table {table_id} is not held by this lease, or released by this step"
            raise errors.protocol_violation(lease.lease_id, what, "name only tables that were granted and not released")
        return table

    def _pack(self, lease: Lease, token_ids: Sequence[int]) -> bytes:
        try:
            return pack_tokens(token_ids)
        except struct.error as error:
            what = f"a token id is not an unsigned 32-bit integer ({error})"
            raise errors.protocol_violation(lease.lease_id, what, "give the model's token ids") from error

    def _commit(self, table: Table, packed: bytes, now: float) -> None:
        store, size, frames = self._state.cut_store(), self._state.block_size, table.frames
        table.touched = now
        while packed:
            index, filled = divmod(table.num_tokens, size)
            room = (size - filled) * TOKEN_BYTES
            piece, packed = packed[:room], packed[room:]
            table.num_tokens += len(piece) // TOKEN_BYTES
            if store.blocks.write(frames[index], piece, now):
                store.seal(frames[index], frames[index - 1] if index else None, table.salt)

    def _answer(self, lease: Lease, plan: StepPlan, now: float) -> tuple[list[Grant], list[Refusal]]:
        answers = [self._create(lease, create, packed, now) for create, packed in plan.creates]
        answers += [self._extend(lease, extend, table, now) for extend, table in plan.extends]
        grants = [answer for answer in answers if isinstance(answer, Grant)]
        return grants, [answer for answer in answers if isinstance(answer, Refusal)]

    def _create(self, lease: Lease, request: TableRequest, packed: bytes, now: float) -> Grant | Refusal:
        store = self._state.cut_store()
        plan = self._state.plan(request, packed)
        if request.num_blocks > store.num_blocks or plan.fresh > plan.spare:
            return self._refuse(lease, request.ref, request.num_blocks, len(plan.matched), plan.spare)
        table = self._state.create_table(lease, request, plan, now)
        return Grant(request.ref, table.table_id, table.cached_tokens, store.run(table.frames))

    def _extend(self, lease: Lease, request: ExtendRequest, table: Table, now: float) -> Grant | Refusal:
        store = self._state.cut_store()
        in_all = len(table.frames) + request.num_blocks
        if in_all > store.num_blocks or request.num_blocks > store.available:
            return self._refuse(lease, request.ref, in_all, 0, store.available)
        frames = self._state.extend_table(table, request.num_blocks, now)
        return Grant(request.ref, table.table_id, 0, store.run(frames))

    def _refuse(self, lease: Lease, ref: int, in_all: int, matched: int, spare: int) -> Refusal:
        total = self._state.cut_store().num_blocks
        self._state.counters.refused_requests += 1
        if in_all > total:
            return Refusal(ref, RefusalReason.REQUEST_TOO_LARGE, matched + spare, total)
        self._workers.starve(lease, spare)
        return Refusal(ref, RefusalReason.POOL_EXHAUSTED, matched + spare, total)
