"""What a lease's operations on its tables come to, found out before anything is changed.

Operations depend on each other (a fork is written, truncated, forked again), so each is tried on drafts of the tables
it changes; only if all of them can be, `apply` makes the tables like their drafts. References are added first and
dropped last: nothing that an operation copies from or shares is gone before it is applied. What is only looked at stays
as it is, its time of last use too.

memd serves nobody else meanwhile, so what an operation costs is known, and held against a limit, before it is done.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from memd.core import errors
from memd.core.block import TOKEN_BYTES
from memd.core.lease import MAX_KEPT_BYTES, MAX_TABLES, Lease
from memd.core.operations import CopyOnWrite, Fork, Release, Suspend, TableOperation, Take, Truncate
from memd.core.pending import Keep, Move, PendingReferences, change_tokens
from memd.core.state import PoolState, pack_words
from memd.core.table import Table
from pagepool.errors import PagepoolError
from pagepool.limits import MAX_STEP_REFERENCES, OPERATION_REFERENCES


@dataclass(slots=True)
class TableDraft:
    """A table as it will be; `origin` is itself, or for a fork the table whose salt and priority it has.

    Until it is `changed`, the frames are the table's own, not to be written.
    """

    origin: Table
    frames: array[int]
    num_tokens: int
    cached_tokens: int
    kept_bytes: int | None = None  # of a suspended one
    changed: bool = False


class Draft:
    """Operations of one lease, tried one by one. `written` has the tables' lengths with the commits that come before.

    `cost` is what these come to.

    Every refusal is a PROTOCOL_VIOLATION and leaves the pool as it is; the draft is to be dropped then.
    """

    def __init__(self, state: PoolState, lease: Lease, written: Mapping[int, int], cost: int = 0) -> None:
        self._state, self._lease, self._written = state, lease, written
        self._store = state.cut_store()
        self._references = PendingReferences(self._store)
        self._cost = cost  # so far, in references
        self._kept_bytes = lease.kept_bytes
        self._tables: dict[int, TableDraft] = {}
        self._released: set[int] = set()
        self._let_go: set[int] = set()  # tables that nothing will be copied into any more
        self._unpromised: set[int] = set()  # tables that will not seal what they have promised
        self._used_ids: set[int] = set()
        self._used_frames: set[int] = set()
        # Of tokens, in order: what is kept may be truncated by another table next.
        self._changes: list[Move | Keep] = []

    @property
    def moves(self) -> list[Move]:
        """Bytes that have to be copied, or dropped, in order."""
        return [change for change in self._changes if isinstance(change, Move)]

    def do(self, operation: TableOperation) -> None:
        """Try one operation after those before."""
        match operation:
            case Fork():
                self._fork(operation)
            case CopyOnWrite():
                self._copy_on_write(operation)
            case Take():
                self._take(operation)
            case Truncate():
                self._truncate(operation)
            case Release():
                self._release(operation.table_id)
            case Suspend():
                self._suspend(operation)

    def require_tables(self, more: int) -> None:
        """The lease may have so many more tables than it has at this point."""
        tables = len(self._lease.tables) + len(self._used_ids) - len(self._released) + more
        if tables > MAX_TABLES:
            what = f"creates and forks come to {tables} tables, but a lease has at most {MAX_TABLES}"
            raise self._violation(what, "release some first")

    @property
    def num_used_ids(self) -> int:
        """Table ids of the reserve that are used up."""
        return len(self._used_ids)

    def free(self, block_id: int) -> None:
        """Give a block of the reserve back."""
        self._charge(0)
        self._references.drop((self._from_reserve(block_id),), self._lease.lease_id)

    def table(self, table_id: int) -> TableDraft:
        """A table that the lease has at this point, to be looked at."""
        if table_id in self._tables:
            return self._tables[table_id]
        table = self._lease.tables.get(table_id)
        if table is None or table_id in self._released:
            what = f"table {table_id} is not held by this lease, or released by this step"
            raise self._violation(what, "name only tables that were granted and not released")
        length = self._written.get(table_id, table.num_tokens)
        kept = None if table.kept is None else len(table.kept)
        draft = TableDraft(table, table.frames, length, table.cached_tokens, kept)
        self._tables[table_id] = draft
        return draft

    def running(self, table_id: int) -> TableDraft:
        """A table that the lease has at this point, not suspended, to be looked at."""
        draft = self.table(table_id)
        if draft.kept_bytes is not None:
            raise self._violation(f"table {table_id} is suspended", "resume it first, or release it")
        return draft

    def must_copy(self, table_id: int, num_tokens: int) -> bool:
        """Whether the table's block in which a new end after so many tokens lies is sealed, or another table's too."""
        draft = self.table(table_id)
        index, rest = divmod(num_tokens, self._state.block_size)
        if not rest or num_tokens == draft.num_tokens:
            return False
        sealed = (index + 1) * self._state.block_size <= draft.num_tokens
        return sealed or self._references.num_holders(draft.frames[index]) > 1

    def apply(self, now: float) -> None:
        """Make it so. The commits in `written` have been applied by now."""
        kept = change_tokens(self._store.blocks, self._changes)
        for table_id, draft in self._tables.items():
            if draft.changed:
                self._make(table_id, draft, now)
            if table_id in kept:
                self._lease.tables[table_id].suspend(kept[table_id])
        self._references.apply(now)
        for frame in self._used_frames:
            del self._lease.references[frame]
        self._lease.reserved_ids -= self._used_ids
        for table_id in self._let_go:
            del self._lease.copy_sources[table_id]
        for table_id in sorted(self._unpromised):
            self._state.promises.drop(table_id)
        for table_id in self._released:
            if self._lease.tables.pop(table_id, None) is not None:  # else forked and released in one go
                del self._state.tables[table_id]
        self._lease.kept_bytes = self._kept_bytes

    def _make(self, table_id: int, draft: TableDraft, now: float) -> None:
        table = self._lease.tables.get(table_id)
        if table is None:
            origin = draft.origin
            table = Table(table_id, self._lease.lease_id, origin.salt, origin.priority, now, arrival=origin.arrival)
            table.exact, table.lossy, table.yields = origin.exact, origin.lossy, origin.yields
            self._state.tables[table_id] = self._lease.tables[table_id] = table
        table.frames = draft.frames
        table.num_tokens, table.cached_tokens, table.touched = draft.num_tokens, draft.cached_tokens, now

    def _fork(self, fork: Fork) -> None:
        source = self.running(fork.table_id)
        if fork.new_table_id not in self._lease.reserved_ids or fork.new_table_id in self._used_ids:
            what = f"table id {fork.new_table_id} is not in the lease's reserve"
            raise self._violation(what, "fork only to ids that were granted and not used yet")
        self.require_tables(1)
        self._charge(len(source.frames))
        self._used_ids.add(fork.new_table_id)
        self._references.hold(source.frames[:], fork.new_table_id)
        made = TableDraft(source.origin, source.frames[:], source.num_tokens, source.cached_tokens, changed=True)
        self._tables[fork.new_table_id] = made

    def _copy_on_write(self, copy: CopyOnWrite) -> None:
        draft, first, count = self.running(copy.table_id), copy.first_index, len(copy.block_ids)
        if not count or first + count > len(draft.frames):
            what = f"{count} blocks of table {copy.table_id} are copied from index {first} on, of {len(draft.frames)}"
            raise self._violation(what, "copy blocks that there are, at least one")
        self._charge(0, count)
        for index, block_id in reversed(list(enumerate(copy.block_ids, first))):  # a prefix is eaten from its end
            tokens = min(max(draft.num_tokens - index * self._state.block_size, 0), self._state.block_size)
            self._replace(copy.table_id, index, block_id, tokens)

    def _replace(self, table_id: int, index: int, block_id: int, num_tokens: int) -> None:
        draft, target = self._changing(table_id), self._from_reserve(block_id)
        source = draft.frames[index]
        self._changes.append(Move(source, target, num_tokens))
        self._references.hold((target,), table_id)
        self._references.drop((target,), self._lease.lease_id)
        self._references.drop((source,), table_id)
        draft.frames[index] = target

    def _take(self, take: Take) -> None:
        self.running(take.table_id)
        if not take.block_ids:
            raise self._violation(f"no block is taken for table {take.table_id}", "take at least one")
        self._charge(0, len(take.block_ids))
        taken = [self._from_reserve(block_id) for block_id in take.block_ids]
        self._references.hold(taken, take.table_id)
        self._references.drop(taken, self._lease.lease_id)
        self._changing(take.table_id).frames.extend(taken)

    def _truncate(self, cut: Truncate) -> None:
        draft, size = self.running(cut.table_id), self._state.block_size
        if cut.num_tokens > draft.num_tokens:
            what = f"table {cut.table_id} is truncated to {cut.num_tokens} tokens, but has {draft.num_tokens}"
            raise self._violation(what, "drop only what is committed")
        by_copy = self.must_copy(cut.table_id, cut.num_tokens)
        if by_copy != bool(cut.block_id):
            need = "needs a block of the reserve for a copy" if by_copy else "needs no block for a copy"
            what = f"table {cut.table_id} is truncated to {cut.num_tokens} tokens, which {need}"
            raise self._violation(what, "give a block_id if the last block that stays is cut and sealed or shared")
        index, rest = divmod(cut.num_tokens, size)
        kept, written = index + bool(rest), -(-draft.num_tokens // size)
        self._charge(max(written - kept, 0), int(by_copy))
        self._changing(cut.table_id)
        self._references.drop(draft.frames[kept:written][::-1], cut.table_id)
        if by_copy:
            self._replace(cut.table_id, index, cut.block_id, rest)
        elif rest and cut.num_tokens < draft.num_tokens:
            self._changes.append(Move(draft.frames[index], draft.frames[index], rest))
        del draft.frames[kept:written]
        self._unpromised.add(cut.table_id)
        draft.num_tokens = cut.num_tokens
        if cut.num_tokens < draft.cached_tokens:
            draft.cached_tokens = index * size

    def _release(self, table_id: int) -> None:
        draft = self.table(table_id)
        self._charge(len(draft.frames))
        self._kept_bytes -= draft.kept_bytes or 0
        self._drop_all(table_id, draft.frames)
        del self._tables[table_id]
        self._released.add(table_id)

    def _suspend(self, suspend: Suspend) -> None:
        draft, more = self.running(suspend.table_id), pack_words(self._lease.lease_id, suspend.token_ids)
        in_all = self._kept_bytes + draft.num_tokens * TOKEN_BYTES + len(more)
        if in_all > MAX_KEPT_BYTES:
            what = f"suspended tables keep {in_all // TOKEN_BYTES} tokens, but may keep {MAX_KEPT_BYTES // TOKEN_BYTES}"
            raise self._violation(what, "release a table instead, and compute its tokens anew")
        self._charge(len(draft.frames))
        draft.changed, draft.kept_bytes, self._kept_bytes = True, in_all - self._kept_bytes, in_all
        written = -(-draft.num_tokens // self._state.block_size)
        self._changes.append(Keep(suspend.table_id, draft.frames[:written], more))
        self._drop_all(suspend.table_id, draft.frames)
        draft.frames, draft.num_tokens, draft.cached_tokens = array("I"), 0, 0

    def _drop_all(self, table_id: int, frames: array[int]) -> None:
        """What a table has, and what was to be copied into it, if no commit of this step lets that go."""
        self._unpromised.add(table_id)
        self._references.drop(frames[::-1], table_id)
        source = self._lease.copy_sources.get(table_id)
        if source is not None and table_id not in self._written and table_id not in self._let_go:
            self._let_go.add(table_id)
            self._references.drop((source,), self._lease.lease_id)

    def _from_reserve(self, block_id: int) -> int:
        frame = self._store.blocks.frame_of.get(block_id)
        if frame is None or frame not in self._lease.references or frame in self._used_frames:
            what = f"block {block_id} is not in the lease's reserve"
            raise self._violation(what, "use only blocks that were granted for it and not used yet")
        self._used_frames.add(frame)
        return frame

    def _changing(self, table_id: int) -> TableDraft:
        """A table that the lease has at this point, to be changed."""
        draft = self.table(table_id)
        if not draft.changed:
            draft.frames, draft.changed = draft.frames[:], True
        return draft

    def _charge(self, references: int, num_named: int = 0) -> None:
        """Before an operation is done: what it costs, with so many references and blocks of the reserve it names."""
        cost = references + OPERATION_REFERENCES * (1 + num_named)
        if self._cost and self._cost + cost > MAX_STEP_REFERENCES:  # a table of any length can be forked and released
            what = f"commits, operations, releases and frees come to {self._cost + cost} references, but may come to"
            raise self._violation(f"{what} {MAX_STEP_REFERENCES} in a step", "say the rest in further steps")
        self._cost += cost

    def _violation(self, what: str, remedy: str) -> PagepoolError:
        return errors.protocol_violation(self._lease.lease_id, what, remedy)
