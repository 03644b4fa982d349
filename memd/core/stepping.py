"""Steps: a worker's batches of commits, releases and requests for blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from memd.core import errors
from memd.core.admission import Admission
from memd.core.block import TOKEN_BYTES, Blocks
from memd.core.compression import Compression
from memd.core.draft import Draft
from memd.core.lease import Lease
from memd.core.operations import Release
from memd.core.remaps import Remaps
from memd.core.state import PoolState, pack_words
from memd.core.table import Table
from memd.core.values import (
    BlockRun,
    Commit,
    Grant,
    Step,
    StepOutcome,
    TableRequest,
)
from pagepool.limits import (
    MAX_COMMIT_BLOCKS,
    MAX_SALT_BYTES,
    MAX_STEP_REQUESTS,
    OPERATION_REFERENCES,
    PRIORITY_RANGE,
    is_priority,
    num_blocks_written,
)

MAX_RESERVED_IDS = 65_536
"""Table ids that a lease may have in reserve."""


@dataclass(slots=True)
class StepPlan:
    """A step that can be applied as a whole: its token ids packed, its operations drafted if there are any."""

    commits: list[tuple[Table, bytes]] = field(default_factory=list)
    draft: Draft | None = None
    creates: list[tuple[TableRequest, bytes]] = field(default_factory=list)


class Stepper:
    """Checks a step as a whole, then applies it: whatever breaks the protocol is found before anything has changed."""

    def __init__(self, state: PoolState, admission: Admission, remaps: Remaps, compression: Compression) -> None:
        self._state = state
        self._admission = admission
        self._remaps = remaps
        self._compression = compression

    def apply(self, lease: Lease, step: Step, now: float) -> StepOutcome:
        """The answer to a step of a live lease."""
        if lease.replaying and step.step_id <= lease.last_step:
            return self._replay(lease, step.step_id)
        if step.step_id != lease.last_step + 1:
            what = f"step_id is {step.step_id}, but must be {lease.last_step + 1}"
            raise errors.protocol_violation(lease.lease_id, what, "number steps by one, from 1, over all streams")
        plan = self._plan(lease, step)
        lease.last_step, lease.replaying = step.step_id, False
        twins: list[tuple[int, int]] = []
        for table, packed in plan.commits:
            twins += self._commit(table, packed, now)
            if lease.copy_sources:
                self._state.copied(lease, table.table_id, now)
        if plan.draft is not None:
            plan.draft.apply(now)
        self._remaps.merge(twins, now)
        self._remaps.acknowledge(lease, step.acknowledged, now)
        if step.recodings:
            self._compression.settle(lease, step.recodings, now)
        outcome = StepOutcome(step.step_id, *self._admission.answer(lease, step, plan.creates, now))
        lease.answers.append(outcome)
        lease.stepped = now
        self._state.counters.attach_steps += 1
        return outcome

    def _replay(self, lease: Lease, step_id: int) -> StepOutcome:
        outcome = lease.answers.find(step_id)
        if outcome is not None:
            if outcome.refusals:  # news that there are blocks may have been written before it could be understood
                self._state.promises.wake(lease.lease_id)
            return replace(outcome, grants=[self._as_of_now(lease, grant) for grant in outcome.grants])
        what = f"step {step_id} is repeated, but only the last {len(lease.answers)} answers are kept"
        raise errors.protocol_violation(lease.lease_id, what, "attach anew, with fewer unanswered steps")

    def _as_of_now(self, lease: Lease, grant: Grant) -> Grant:
        """A grant that its worker may not have seen yet, nor Remaps of its blocks."""
        ids, entries = list(grant.blocks.block_ids), list(grant.blocks.entries)
        for remap in (unread.remap for unread in lease.remaps):
            if remap.old_block_id in ids:
                at = ids.index(remap.old_block_id)
                ids[at], entries[at] = remap.block_id, remap.entry
        return replace(grant, blocks=BlockRun(ids, entries))

    def _plan(self, lease: Lease, step: Step) -> StepPlan:
        plan, written = StepPlan(), dict[int, int]()
        requests = len(step.creates) + len(step.extends) + len(step.reserves)
        if requests > MAX_STEP_REQUESTS:
            what = f"creates, extends and reserves are {requests}, but may be {MAX_STEP_REQUESTS} in a step"
            raise errors.protocol_violation(lease.lease_id, what, "ask for the rest in further steps")
        num_written = 0
        for commit in step.commits:
            plan.commits.append(self._plan_commit(lease, commit, written))
            num_written += self._num_written(commit, written)
            if num_written > MAX_COMMIT_BLOCKS:
                what = f"commits write to {num_written} blocks, but may write to {MAX_COMMIT_BLOCKS} in a step"
                raise errors.protocol_violation(lease.lease_id, what, "commit the rest in further steps")
        if step.operations or step.releases or step.frees:
            plan.draft = self._draft(step, Draft(self._state, lease, written, OPERATION_REFERENCES * num_written))
        for create in step.creates:
            self._check_create(lease, create)
            plan.creates.append((create, create.packed or pack_words(lease.lease_id, create.token_ids)))
        self._check_requests(lease, step, plan.draft)
        self._compression.require_answers(lease, step.recodings)
        if step.acknowledged > lease.last_remap:
            what = f"acknowledged is {step.acknowledged}, but the last Remap is {lease.last_remap}"
            raise errors.protocol_violation(lease.lease_id, what, "acknowledge only what memd has told")
        return plan

    def _check_create(self, lease: Lease, request: TableRequest) -> None:
        if not is_priority(request.priority):
            what = f"priority is {request.priority}, but must be {PRIORITY_RANGE}"
            raise errors.protocol_violation(lease.lease_id, what, "refuse such a request")
        if len(request.salt) > MAX_SALT_BYTES:
            what = f"salt is {len(request.salt)} bytes long, but may have {MAX_SALT_BYTES}"
            raise errors.protocol_violation(lease.lease_id, what, "hash a longer one")
        if not (math.isfinite(request.arrival) and request.arrival >= 0):
            what = f"arrival is {request.arrival}, but must be finite and not negative"
            raise errors.protocol_violation(lease.lease_id, what, "give seconds of CLOCK_MONOTONIC, or 0 for now")
        if request.resume_table_id and (request.packed or request.token_ids):
            what = f"table {request.resume_table_id} is resumed with token ids, but has its own"
            raise errors.protocol_violation(lease.lease_id, what, "leave them out")

    def _plan_commit(self, lease: Lease, commit: Commit, written: dict[int, int]) -> tuple[Table, bytes]:
        """Notes in `written` how long the table is afterwards."""
        table, count, size = self._running(lease, commit.table_id), len(commit.token_ids), self._state.block_size
        first = written.get(table.table_id, table.num_tokens)
        written[table.table_id] = first + count
        room = len(table.frames) * size - first
        if count > room:
            what = f"{count} tokens are committed to table {table.table_id}, which has room for {room}"
            raise errors.protocol_violation(lease.lease_id, what, "extend the table before its blocks are written")
        holders = self._state.cut_store().blocks.holders
        for index in range(first // size, -(-(first + count) // size)) if count else ():
            if len(holders[table.frames[index]]) > 1:
                what = f"tokens are committed to block {index} of table {table.table_id}, which another table has too"
                raise errors.protocol_violation(lease.lease_id, what, "replace a shared block before it is written")
        return table, pack_words(lease.lease_id, commit.token_ids)

    def _num_written(self, commit: Commit, written: dict[int, int]) -> int:
        """Blocks that a commit writes to; `written` has its table's length afterwards."""
        count = len(commit.token_ids)
        if count == 1:  # what a decode step commits to every table
            return 1
        return num_blocks_written(written[commit.table_id], count, self._state.block_size)

    def _draft(self, step: Step, draft: Draft) -> Draft:
        for operation in step.operations:
            draft.do(operation)
        for table_id in step.releases:
            draft.do(Release(table_id))
        for block_id in step.frees:
            draft.free(block_id)
        return draft

    def _check_requests(self, lease: Lease, step: Step, draft: Draft | None) -> None:
        self._require_some(lease, (extend.num_blocks for extend in step.extends), "extend only by what is needed")
        growing = [extend.table_id for extend in step.extends]
        growing += [reserve.for_table_id for reserve in step.reserves if reserve.for_table_id]
        for table_id in growing:
            if draft is None:
                self._running(lease, table_id)
            else:
                draft.running(table_id)
        resumed = self._resumed(lease, step, draft)
        sizes = (max(reserve.num_blocks, reserve.num_tables) for reserve in step.reserves)
        self._require_some(lease, sizes, "ask for blocks, table ids, or both")
        if step.creates:
            (draft or Draft(self._state, lease, {})).require_tables(len(step.creates) - len(resumed))
        used = 0 if draft is None else draft.num_used_ids
        ids = len(lease.reserved_ids) - used + sum(reserve.num_tables for reserve in step.reserves)
        if ids > MAX_RESERVED_IDS:
            what = f"num_tables comes to {ids} unused table ids, but a lease has at most {MAX_RESERVED_IDS}"
            raise errors.protocol_violation(lease.lease_id, what, "use those that were granted")

    def _resumed(self, lease: Lease, step: Step, draft: Draft | None) -> set[int]:
        """The suspended tables that a step asks blocks for."""
        resumed = set[int]()
        for table_id in (create.resume_table_id for create in step.creates if create.resume_table_id):
            kept = draft.table(table_id).kept_bytes if draft is not None else self._own(lease, table_id).kept
            if kept is None or table_id in resumed:
                what = f"table {table_id} is resumed, but not suspended"
                raise errors.protocol_violation(lease.lease_id, what, "resume a suspended table, once")
            resumed.add(table_id)
        return resumed

    def _require_some(self, lease: Lease, counts: Iterable[int], remedy: str) -> None:
        for count in counts:
            if count < 1:
                what = f"num_blocks is {count}, but must be at least 1"
                raise errors.protocol_violation(lease.lease_id, what, remedy)

    def _own(self, lease: Lease, table_id: int) -> Table:
        table = lease.tables.get(table_id)
        if table is None:
            what = f"table {table_id} is not held by this lease"
            raise errors.protocol_violation(lease.lease_id, what, "name only tables that were granted and not released")
        return table

    def _running(self, lease: Lease, table_id: int) -> Table:
        table = lease.tables.get(table_id) or self._own(lease, table_id)
        if table.kept is not None:
            what = f"table {table_id} is suspended"
            raise errors.protocol_violation(lease.lease_id, what, "resume it first, or release it")
        return table

    def _commit(self, table: Table, packed: bytes, now: float) -> list[tuple[int, int]]:
        """(frame, index in the table) of the blocks that it has sealed and that the index has an equal one of."""
        store, size, frames = self._state.cut_store(), self._state.block_size, table.frames
        table.touched, twins = now, []
        start, lossy = 0, None  # seldom asked for
        while start < len(packed):
            index, filled = divmod(table.num_tokens, size)
            piece = packed[start : start + (size - filled) * TOKEN_BYTES]
            start += len(piece)
            table.num_tokens += len(piece) // TOKEN_BYTES
            if store.blocks.write(frames[index], piece, now):
                if lossy is None:
                    lossy = self._is_lossy(table, store.blocks, index)
                if store.seal(frames[index], frames[index - 1] if index else None, table.salt, lossy=lossy):
                    twins.append((frames[index], index))
                self._state.promises.sealed(table.table_id, store.blocks.digests[frames[index]])
                lossy = lossy or bool(store.blocks.lossy[frames[index]])
        return twins

    def _is_lossy(self, table: Table, blocks: Blocks, index: int) -> bool:
        """Whether the block at an index of a table is computed from one that is not exact."""
        before = table.frames[:index] if blocks.num_lossy else ()
        return table.lossy or any(map(blocks.lossy.__getitem__, before))
