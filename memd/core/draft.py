"""What a lease's operations on its tables come to, found out before anything is changed.

Operations depend on each other (a fork is written, truncated, forked again), so each is tried on drafts of the tables
it touches; only if all of them can be, `apply` makes the tables like their drafts. References are added first and
dropped last: nothing that an operation copies from or shares is gone before it is applied.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from memd.core import errors
from memd.core.block import TOKEN_BYTES
from memd.core.lease import MAX_KEPT_BYTES, Lease
from memd.core.operations import CopyOnWrite, Fork, Release, Suspend, TableOperation, Take, Truncate
from memd.core.state import PoolState, pack_words
from memd.core.table import Table
from pagepool.errors import PagepoolError


@dataclass(slots=True)
class TableDraft:
    """A table as it will be; `origin` is itself, or for a fork the table whose salt and priority it has."""

    origin: Table
    frames: list[int]
    num_tokens: int
    cached_tokens: int
    kept_bytes: int | None = None  # of a suspended one


@dataclass(frozen=True, slots=True)
class Move:
    """The first tokens of a block become those of another; the rest is dropped if both are one."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Keep:
    """What a table keeps when it is suspended: the committed tokens of these blocks as they are then, and more."""

    table_id: int
    frames: list[int]
    more: bytes


class Draft:
    """Operations of one lease, tried one by one. `written` has the tables' lengths with the commits that come before.

    Every refusal is a PROTOCOL_VIOLATION and leaves the pool as it is; the draft is to be dropped then.
    """

    def __init__(self, state: PoolState, lease: Lease, written: Mapping[int, int]) -> None:
        self._state, self._lease, self._written = state, lease, written
        self._store = state.cut_store()
        self._tables: dict[int, TableDraft] = {}
        self._released: set[int] = set()
        self._let_go: set[int] = set()  # tables that nothing will be copied into any more
        self._unpromised: set[int] = set()  # tables that will not seal what they have promised
        self._used_ids: set[int] = set()
        self._used_frames: set[int] = set()
        self._holds: list[tuple[int, int]] = []  # (frame, holder), as all that follow
        self._drops: list[tuple[int, int]] = []
        self._more_holders: Counter[int] = Counter()  # by frame, of the first so many of these two
        self._counted = (0, 0)
        self._changes: list[
            Move | Keep
        ] = []  # of tokens, in order: what is kept may be truncated by another table next

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

    @property
    def num_new_tables(self) -> int:
        """Tables that the lease has more now, less those that it has no more."""
        return len(self._used_ids) - len(self._released)

    @property
    def num_used_ids(self) -> int:
        """Table ids of the reserve that are used up."""
        return len(self._used_ids)

    def free(self, block_id: int) -> None:
        """Give a block of the reserve back."""
        frame = self._from_reserve(block_id)
        self._drop(frame, self._lease.lease_id)

    def table(self, table_id: int) -> TableDraft:
        """A table that the lease has at this point."""
        if table_id in self._tables:
            return self._tables[table_id]
        table = self._lease.tables.get(table_id)
        if table is None or table_id in self._released:
            what = f"table {table_id} is not held by this lease, or released by this step"
            raise self._violation(what, "name only tables that were granted and not released")
        length = self._written.get(table_id, table.num_tokens)
        kept = None if table.kept is None else len(table.kept)
        draft = TableDraft(table, list(table.frames), length, table.cached_tokens, kept)
        self._tables[table_id] = draft
        return draft

    def running(self, table_id: int) -> TableDraft:
        """A table that the lease has at this point, not suspended."""
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
        return sealed or self._num_holders(draft.frames[index]) > 1

    def apply(self, now: float) -> None:
        """Make it so. The commits in `written` have been applied by now."""
        kept = self._change_tokens()
        for table_id, draft in self._tables.items():
            self._make(table_id, draft, now)
            if table_id in kept:
                self._lease.tables[table_id].suspend(kept[table_id])
        for frame, holder in self._holds:
            self._store.hold([frame], (holder,), now)
        for frame, holder in self._drops:
            self._store.release(frame, holder, now)
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

    def _change_tokens(self) -> dict[int, bytes]:
        """Carry out the changes; what is kept of each table that is suspended."""
        kept: dict[int, bytes] = {}
        for change in self._changes:
            if isinstance(change, Move):
                self._store.blocks.copy(change.source, change.target, change.num_tokens)
            else:
                kept[change.table_id] = b"".join(map(self._store.blocks.packed_tokens, change.frames)) + change.more
        return kept

    def _make(self, table_id: int, draft: TableDraft, now: float) -> None:
        table = self._lease.tables.get(table_id)
        if table is None:
            origin = draft.origin
            table = Table(table_id, self._lease.lease_id, origin.salt, origin.priority, now, arrival=origin.arrival)
            self._state.tables[table_id] = self._lease.tables[table_id] = table
        table.frames = array("I", draft.frames)
        table.num_tokens, table.cached_tokens, table.touched = draft.num_tokens, draft.cached_tokens, now

    def _fork(self, fork: Fork) -> None:
        source = self.running(fork.table_id)
        if fork.new_table_id not in self._lease.reserved_ids or fork.new_table_id in self._used_ids:
            what = f"table id {fork.new_table_id} is not in the lease's reserve"
            raise self._violation(what, "fork only to ids that were granted and not used yet")
        self._used_ids.add(fork.new_table_id)
        frames = list(source.frames)
        self._holds += [(frame, fork.new_table_id) for frame in frames]
        self._tables[fork.new_table_id] = TableDraft(source.origin, frames, source.num_tokens, source.cached_tokens)

    def _copy_on_write(self, copy: CopyOnWrite) -> None:
        draft, first, count = self.running(copy.table_id), copy.first_index, len(copy.block_ids)
        if not count or first + count > len(draft.frames):
            what = f"{count} blocks of table {copy.table_id} are copied from index {first} on, of {len(draft.frames)}"
            raise self._violation(what, "copy blocks that there are, at least one")
        for index, block_id in reversed(list(enumerate(copy.block_ids, first))):  # a prefix is eaten from its end
            tokens = min(max(draft.num_tokens - index * self._state.block_size, 0), self._state.block_size)
            self._replace(copy.table_id, index, block_id, tokens)

    def _replace(self, table_id: int, index: int, block_id: int, num_tokens: int) -> None:
        draft, target = self.table(table_id), self._from_reserve(block_id)
        source = draft.frames[index]
        self._changes.append(Move(source, target, num_tokens))
        self._hold(target, table_id)
        self._drop(target, self._lease.lease_id)
        self._drop(source, table_id)
        draft.frames[index] = target

    def _take(self, take: Take) -> None:
        draft = self.running(take.table_id)
        if not take.block_ids:
            raise self._violation(f"no block is taken for table {take.table_id}", "take at least one")
        for block_id in take.block_ids:
            frame = self._from_reserve(block_id)
            self._hold(frame, take.table_id)
            self._drop(frame, self._lease.lease_id)
            draft.frames.append(frame)

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
        for frame in reversed(draft.frames[kept:written]):
            self._drop(frame, cut.table_id)
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
        self._drop_all(table_id, self.table(table_id).frames)
        del self._tables[table_id]
        self._released.add(table_id)

    def _suspend(self, suspend: Suspend) -> None:
        draft, more = self.running(suspend.table_id), pack_words(self._lease.lease_id, suspend.token_ids)
        draft.kept_bytes = draft.num_tokens * TOKEN_BYTES + len(more)
        in_all = sum(one.kept_bytes or 0 for one in self._tables.values())
        rest = (one for one in self._lease.tables.values() if one.table_id not in self._tables)
        in_all += sum(len(one.kept or b"") for one in rest if one.table_id not in self._released)
        if in_all > MAX_KEPT_BYTES:
            what = f"suspended tables keep {in_all // TOKEN_BYTES} tokens, but may keep {MAX_KEPT_BYTES // TOKEN_BYTES}"
            raise self._violation(what, "release a table instead, and compute its tokens anew")
        written = -(-draft.num_tokens // self._state.block_size)
        self._changes.append(Keep(suspend.table_id, draft.frames[:written], more))
        self._drop_all(suspend.table_id, draft.frames)
        draft.frames, draft.num_tokens, draft.cached_tokens = [], 0, 0

    def _drop_all(self, table_id: int, frames: Sequence[int]) -> None:
        """What a table has, and what was to be copied into it, if no commit of this step lets that go."""
        self._unpromised.add(table_id)
        self._drops += [(frame, table_id) for frame in reversed(frames)]
        source = self._lease.copy_sources.get(table_id)
        if source is not None and table_id not in self._written and table_id not in self._let_go:
            self._let_go.add(table_id)
            self._drop(source, self._lease.lease_id)

    def _from_reserve(self, block_id: int) -> int:
        frame = self._store.blocks.frame_of.get(block_id)
        if frame is None or frame not in self._lease.references or frame in self._used_frames:
            what = f"block {block_id} is not in the lease's reserve"
            raise self._violation(what, "use only blocks that were granted for it and not used yet")
        self._used_frames.add(frame)
        return frame

    def _num_holders(self, frame: int) -> int:
        holds, drops = self._counted  # most steps never ask, and a table may have thousands of blocks
        for one, _ in islice(self._holds, holds, None):
            self._more_holders[one] += 1
        for one, _ in islice(self._drops, drops, None):
            self._more_holders[one] -= 1
        self._counted = len(self._holds), len(self._drops)
        return len(self._store.blocks.holders[frame]) + self._more_holders[frame]

    def _hold(self, frame: int, holder: int) -> None:
        self._holds.append((frame, holder))

    def _drop(self, frame: int, holder: int) -> None:
        self._drops.append((frame, holder))

    def _violation(self, what: str, remedy: str) -> PagepoolError:
        return errors.protocol_violation(self._lease.lease_id, what, remedy)
