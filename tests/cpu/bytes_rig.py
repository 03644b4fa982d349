"""Memory that says what lies in it, and workers that read and write it as their tables say."""

from __future__ import annotations

from collections.abc import Sequence

from memd.core.lease import Remap
from memd.core.pool import Pool
from memd.core.values import Grant
from pagekernels.layout import Format, unpack_entry
from tests.cpu.compression_rig import B, Worker

Kv = tuple[int, bool]
"""What the KV of a token stands for: all tokens up to it, and whether any lossy block was read for it."""


class Memory:
    """Units of all slabs. A block of the native format has its KV in each of its units."""

    def __init__(self) -> None:
        self.units: dict[tuple[int, int], list[Kv | None]] = {}

    def read(self, entry: int) -> list[Kv | None]:
        """A block's KV; nonsense if another block was written over a part of it."""
        form, slab, unit = unpack_entry(entry)
        whole = [self.units.get((slab, unit + at), [None] * B) for at in range(1 if form is Format.FP8_E4M3 else 2)]
        return [one if all(part[at] == one for part in whole) else None for at, one in enumerate(whole[0])]

    def write(self, entry: int, kv: Sequence[Kv | None], first: int = 0) -> None:
        """Put KV into a block, from a token position on."""
        form, slab, unit = unpack_entry(entry)
        for at in range(1 if form is Format.FP8_E4M3 else 2):
            part = self.units.setdefault((slab, unit + at), [None] * B)
            part[first : first + len(kv)] = kv

    def copy(self, source: int, target: int) -> None:
        """Copy, compress or decompress a block."""
        kv, lossy = self.read(source), unpack_entry(target)[0] is Format.FP8_E4M3
        self.write(target, [None if one is None else (one[0], one[1] or lossy) for one in kv])


class Computer(Worker):
    """A worker with the tables as it knows them: their tokens, and ids and entries of their blocks."""

    def __init__(self, pool: Pool, name: str, memory: Memory) -> None:
        self.memory, self.views, self.words = memory, dict[int, list[list[int]]](), dict[int, list[int]]()
        self.heard, self.inbox, self.sources = 0, list[Remap](), dict[int, int]()
        super().__init__(pool, name)

    def listen_to_remaps(self) -> None:
        """Take up all that was told, but acknowledge nothing."""
        for news in self.inbox:
            for view in self.views.values():
                for block in view:
                    if block[0] == news.old_block_id:
                        block[:] = news.block_id, news.entry
            self.heard = max(self.heard, news.sequence)
        self.inbox.clear()

    def granted(self, grant: Grant, words: list[int]) -> None:
        """A table is there, with so many of its tokens."""
        self.listen_to_remaps()
        self.views[grant.table_id] = [list(pair) for pair in zip(*columns(grant), strict=True)]
        self.words[grant.table_id] = words[: grant.cached_tokens]
        if grant.copy_source is not None:
            self.sources[grant.table_id] = grant.copy_source

    def attend(self, table_id: int) -> bool:
        """Read all that a table has; whether any of it is lossy."""
        lossy, words = False, self.words[table_id]
        wanted = meanings(words)
        for index, (block_id, entry) in enumerate(self.views[table_id]):
            want = wanted[index * B : (index + 1) * B]
            kv = self.memory.read(entry)[: len(want)]
            found = [one and one[0] for one in kv]
            assert found == want, f"block {block_id} at {unpack_entry(entry)} of table {table_id}"
            lossy |= any(one is not None and one[1] for one in kv)
        return lossy

    def copy_part(self, table_id: int) -> None:
        """Copy the part of a block that its Grant has told of, if that has not been done."""
        if (source := self.sources.pop(table_id, None)) is not None:
            self.memory.copy(source, self.views[table_id][len(self.words[table_id]) // B][1])

    def compute(self, table_id: int, more: Sequence[int]) -> None:
        """Write the KV of more tokens behind those of a table."""
        words, view = self.words[table_id], self.views[table_id]
        self.copy_part(table_id)
        lossy = self.attend(table_id)
        for token in more:
            words.append(token)
            index, at = divmod(len(words) - 1, B)
            self.memory.write(view[index][1], [(meanings(words)[-1], lossy)], at)


def columns(grant: Grant) -> tuple[Sequence[int], Sequence[int]]:
    """Ids and entries of what was granted."""
    return grant.blocks.block_ids, grant.blocks.entries


def meanings(words: Sequence[int]) -> list[int]:
    """What the KV of each of these tokens stands for."""
    found, before = [], 0
    for word in words:
        before = hash((before, word))
        found.append(before)
    return found
