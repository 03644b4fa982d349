"""A worker's block tables and its reserve: forked, written, truncated and released without waiting for memd.

What memd granted ahead is used here, and memd hears of it in the next step message: it repeats every operation on its
own tables, in the same order, so both agree at any time on who has which block. Pure.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from inferd.core.block_table import BlockTable
from inferd.core.ports import BlockCopy, Grant, Step, TableRequest
from inferd.core.step_words import StepWords
from pagepool.pool_values import CopyOnWrite, Fork, Release, Remap, ReserveRequest, Suspend, Take, Truncate


class ReserveShortError(Exception):
    """The reserve has too few blocks or table ids. Nothing was changed: ask for more, and try again."""


class BlockTables:
    """The tables of one lease, by id. Not thread-safe.

    A block is written only by a table that nobody shares it with: `prepare` replaces what others have too, and returns
    the copies that the caller must launch, on the stream that writes, before the append that it prepares. It must say
    when they are over, by `copied`: memd hears of nothing that was done after them before. Whatever raises
    ReserveShortError or ValueError has changed nothing.

    What memd hears of a block that nobody has any more, it may grant to somebody else at once. So no table is released,
    suspended or truncated while a step of it is in flight. For copies from its blocks see inferd.core.step_words.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._tables: dict[int, BlockTable] = {}
        self._holders: Counter[int] = Counter()  # tables that have a block, by its id
        self._blocks: list[tuple[int, int]] = []  # the reserve: (block id, entry)
        self._ids: list[int] = []
        self._asked: dict[int, tuple[int, int]] = {}
        self._words = StepWords(block_size)

    def __getitem__(self, table_id: int) -> BlockTable:
        return self._tables[table_id]

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def block_size(self) -> int:
        """Token positions in a block."""
        return self._size

    @property
    def spare_blocks(self) -> int:
        """Blocks in the reserve."""
        return len(self._blocks)

    @property
    def spare_ids(self) -> int:
        """Table ids in the reserve."""
        return len(self._ids)

    @property
    def awaits_reserve(self) -> bool:
        """Whether memd has been asked for more and has not answered."""
        return bool(self._asked)

    def has_asked(self, ref: int) -> bool:
        """Whether this is the number of a request for the reserve that has not been answered."""
        return ref in self._asked

    def room(self, table_id: int) -> int:
        """Positions that the table has blocks for and that are not prepared yet."""
        return len(self._tables[table_id].block_ids) * self._size - self._tables[table_id].num_prepared

    def shares_next(self, table: BlockTable) -> bool:
        """Whether others have the block that the table writes next: it is then replaced first."""
        return self.room(table.table_id) > 0 and self._is_shared(table, table.num_prepared // self._size)

    def create(self, request: TableRequest) -> None:
        """Ask for a table."""
        self._words.create(request)

    def created(self, grant: Grant) -> BlockTable:
        """A table was granted."""
        cached, room = grant.cached_tokens, len(grant.block_ids) * self._size
        table = BlockTable(
            grant.table_id, list(grant.block_ids), array("I", grant.entries), cached, cached, cached, room
        )
        table.block_size = self._size
        if grant.copy_source is not None:
            table.copy, table.num_writable = BlockCopy(grant.copy_source, table.entries[cached // self._size]), 0
        self._tables[table.table_id] = table
        self._holders.update(table.block_ids)
        return table

    def ask(self, ref: int, num_blocks: int, num_tables: int, for_table_id: int = 0) -> None:
        """Have memd bring the reserve up to so many blocks and table ids, those counted that were asked for before.

        `for_table_id` is a table that cannot go on without them, for whose sake others may have to yield.
        """
        blocks = num_blocks - len(self._blocks) - sum(asked for asked, _ in self._asked.values())
        ids = num_tables - len(self._ids) - sum(asked for _, asked in self._asked.values())
        if blocks > 0 or ids > 0:
            self._asked[ref] = max(blocks, 0), max(ids, 0)
            self._words.reserve(ReserveRequest(ref, *self._asked[ref], for_table_id))

    def granted(self, grant: Grant) -> None:
        """More for the reserve."""
        del self._asked[grant.ref]
        self._blocks += zip(grant.block_ids, grant.entries, strict=True)
        self._ids += range(grant.table_id, grant.table_id + grant.num_tables)

    def refused(self, ref: int) -> None:
        """Nothing for the reserve: it may be asked for again."""
        del self._asked[ref]

    def give_back(self, num_blocks: int) -> None:
        """Give up to so many blocks of the reserve back to the pool."""
        for _ in range(min(num_blocks, len(self._blocks))):
            self._words.free(self._blocks.pop()[0])

    def remap(self, news: Remap) -> None:
        """A block is in another place, in whatever tables still have it. Steps in flight go on with the old entries."""
        for table in chain(filter(None, [self._tables.get(news.table_id)]), self._tables.values()):
            if news.old_block_id not in self._holders:  # else in forks that memd had not heard of, or will name next
                break
            if table.block_ids[news.index : news.index + 1] == [news.old_block_id]:
                self._put(table, news.index, news.block_id, news.entry)

    def fork(self, table_id: int) -> int:
        """The id of a new table that shares all blocks of this one. ValueError while tokens of it are being written."""
        source = self._tables[table_id]
        if source.num_prepared > source.num_tokens or source.copy is not None:
            count = source.num_prepared - source.num_tokens
            what = f"{count} tokens are being written to" if count else "a block is still to be copied into"
            raise ValueError(f"{what} table {table_id}: commit to it before the fork")
        if not self._ids:
            raise ReserveShortError("no table id is in reserve")
        new_id = self._ids.pop(0)
        source.num_writable = 0
        self._tables[new_id] = replace(source, table_id=new_id, block_ids=list(source.block_ids))
        self._holders.update(source.block_ids)
        self._words.operate(Fork(table_id, new_id), len(source.block_ids))
        self._words.limit(table_id, -1)
        self._words.limit(new_id, -1)
        return new_id

    def prepare(self, table_id: int, num_tokens: int) -> list[BlockCopy]:
        """Make the table's next so many positions writable; the copies to be made before they are written."""
        table = self._tables[table_id]
        end = table.num_prepared + num_tokens
        if end <= table.num_writable:
            table.num_prepared = end
            return []
        first, stop = table.num_prepared // self._size, -(-end // self._size)
        shared = [index for index in range(first, min(stop, len(table.block_ids))) if self._is_shared(table, index)]
        missing = max(stop - len(table.block_ids), 0)
        if not num_tokens:
            return []
        self._require(len(shared) + missing)
        copies: list[BlockCopy] = []
        for index in shared:
            reads = index == first and table.num_prepared % self._size > 0  # no other has tokens before those written
            copies += [self._replace(table, index)] * reads
            self._words.operate(CopyOnWrite(table_id, index, (table.block_ids[index],)), unshares=True, copies=reads)
        if table.copy is not None:  # into a block that no other table has
            copies, table.copy = [table.copy], None
            self._words.copy()
        if missing:
            self._take(table, missing)
        table.num_prepared = end
        shared_after = any(self._is_shared(table, index) for index in range(stop, len(table.block_ids)))
        table.num_writable = end if shared_after else len(table.block_ids) * self._size
        return copies

    def copied(self, count: int) -> None:
        """The next so many of the copies that were returned, in that order, are over on the device."""
        self._words.copied(count)

    def take_ahead(self, table_id: int) -> bool:
        """Add a block of the reserve to a table, for the tokens after those prepared; False if there is none."""
        if not self._blocks:
            return False
        self._take(self._tables[table_id], 1)
        return True

    def retract(self, table_id: int, length: int) -> None:
        """Positions from `length` on will not be committed, and may be written anew; the table keeps its blocks."""
        table = self._tables[table_id]
        if not table.num_tokens <= length <= table.num_prepared:
            limit = f"{table.num_tokens} to {table.num_prepared}"
            raise ValueError(f"table {table_id} is retracted to {length}, but its positions being written are {limit}")
        table.num_prepared = length

    def commit(self, table_id: int, token_ids: Sequence[int]) -> None:
        """The KV of these tokens has been written, at the first positions that were prepared and not committed yet."""
        table = self._tables[table_id]
        if table.num_tokens + len(token_ids) > table.num_prepared:
            room = table.num_prepared - table.num_tokens
            raise ValueError(f"{len(token_ids)} tokens are committed to table {table_id}, but {room} were prepared")
        table.num_tokens += len(token_ids)
        self._words.commit(table_id, token_ids, table.num_tokens)

    def truncate(self, table_id: int, num_tokens: int) -> list[BlockCopy]:
        """Drop the tokens from a length on, those being written too; copies as `prepare` returns them, at most one."""
        table = self._tables[table_id]
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(f"table {table_id} is truncated to {num_tokens} tokens, but has {table.num_tokens}")
        index, rest = divmod(num_tokens, self._size)
        sealed = (index + 1) * self._size <= table.num_tokens
        by_copy = rest > 0 and num_tokens < table.num_tokens and (sealed or self._is_shared(table, index))
        self._require(by_copy)
        copies = [self._replace(table, index)] if by_copy else []
        operation = Truncate(table_id, num_tokens, table.block_ids[index] if by_copy else 0)
        kept, written = index + bool(rest), -(-table.num_tokens // self._size)
        self._words.operate(operation, max(written - kept, 0), unshares=True, copies=by_copy)
        self._drop(table, kept, written)
        table.num_tokens = table.num_prepared = num_tokens
        table.num_writable = 0
        if num_tokens < table.cached_tokens:
            table.copy = table.copy if rest and index == table.cached_tokens // self._size else None
            table.cached_tokens = index * self._size
        return copies

    def suspend(self, table_id: int, token_ids: Sequence[int]) -> None:
        """Give all blocks of a table up; memd keeps its tokens, and after them these, until it gets blocks again."""
        num_blocks, shared = self._end(table_id)
        self._words.operate(Suspend(table_id, token_ids), num_blocks, unshares=shared)

    def release(self, table_id: int) -> None:
        """End a table."""
        num_blocks, shared = self._end(table_id)
        self._words.operate(Release(table_id), num_blocks, unshares=shared)

    def drop_suspended(self, table_id: int) -> None:
        """End a table that was suspended."""
        self._words.operate(Release(table_id))

    def take_steps(self) -> list[Step]:
        """What memd has to be told since the last call: mostly one step, none if there is nothing."""
        return self._words.take()

    def _end(self, table_id: int) -> tuple[int, bool]:
        """Forget a table; how many blocks it has, and whether others have some of them."""
        table = self._tables.pop(table_id)
        shared = any(self._holders[block_id] > 1 for block_id in table.block_ids)
        self._forget(table.block_ids)
        return len(table.block_ids), shared

    def _is_shared(self, table: BlockTable, index: int) -> bool:
        return self._holders[table.block_ids[index]] > 1

    def _require(self, num_blocks: int) -> None:
        if num_blocks > len(self._blocks):
            raise ReserveShortError(f"{num_blocks} blocks are needed, but {len(self._blocks)} are in reserve")

    def _replace(self, table: BlockTable, index: int) -> BlockCopy:
        block_id, entry = self._blocks.pop(0)
        copy = BlockCopy(table.entries[index], entry)
        self._put(table, index, block_id, entry)
        return copy

    def _put(self, table: BlockTable, index: int, block_id: int, entry: int) -> None:
        self._forget([table.block_ids[index]])
        self._holders[block_id] += 1
        table.block_ids[index] = block_id
        table.entries = array("I", table.entries)
        table.entries[index] = entry

    def _take(self, table: BlockTable, count: int) -> None:
        before = len(table.block_ids) * self._size
        if table.num_writable == before:
            table.num_writable += count * self._size
        taken, self._blocks = self._blocks[:count], self._blocks[count:]
        ids = [block_id for block_id, _ in taken]
        table.block_ids += ids
        table.entries = array("I", [*table.entries, *(entry for _, entry in taken)])
        self._holders.update(ids)
        self._words.operate(Take(table.table_id, ids))
        self._words.limit(table.table_id, before)

    def _drop(self, table: BlockTable, first: int, stop: int) -> None:
        """Blocks first to stop - 1 of a table are not its own any more."""
        if first < stop:
            self._forget(table.block_ids[first:stop])
            del table.block_ids[first:stop]
            table.entries = array("I", [*table.entries[:first], *table.entries[stop:]])

    def _forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._holders[block_id] -= 1
            if not self._holders[block_id]:
                del self._holders[block_id]
