"""The model's answer where only a part of a block matches, and where a prefix is being computed by somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.core.beginnings import MIN_RUN
from memd.core.values import TableRequest
from tests.cpu.pool_model_values import SIZE

if TYPE_CHECKING:
    from tests.cpu.pool_model import Model

Prefix = tuple[bytes, tuple[int, ...]]


class Prefixes:
    """What workers have yet to copy, `sources` by table; what tables will seal, and which leases wait for it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sources: dict[int, int] = {}
        self.to_come: dict[int, list[Prefix]] = {}
        self.promised: dict[Prefix, list[int]] = {}
        self.waiting: dict[Prefix, set[int]] = {}
        self.woken: set[int] = set()

    def part(self, request: TableRequest, matched: list[int], fresh: int, spare: int) -> tuple[int, int]:
        """The block with most of the tokens after a match, the newest of several, and how many; (0, 0) if none may."""
        if not request.partial or request.no_match or not fresh:
            return 0, 0
        source, run = self.longest(request, matched)
        return (source, run) if source and fresh <= spare - self.model.is_spare(source) else (0, 0)

    def longest(self, request: TableRequest, matched: list[int]) -> tuple[int, int]:
        begin = len(matched) * SIZE
        wanted = request.token_ids[begin : min(begin + SIZE, max(len(request.token_ids) - 1, 0))]
        parent, best, most = self.model.blocks[matched[-1]].identity if matched else 0, 0, MIN_RUN - 1
        for one in reversed(self.model.index.values()):
            block = self.model.blocks[one]
            assert block.prefix is not None
            pairs = zip(block.tokens, wanted, strict=False)
            common = next((at for at, (own, other) in enumerate(pairs) if own != other), len(wanted))
            if block.parent == parent and block.prefix[0] == request.salt and common > most:
                best, most = one, common
        return (best, most) if best else (0, 0)

    def hold(self, lease: int, table_id: int, source: int) -> None:
        if source:
            self.model.hold(source, (lease, 0))
            self.sources[table_id] = source

    def copied(self, table_id: int) -> None:
        if table_id in self.sources:
            self.model.release(self.sources.pop(table_id), (self.model.tables[table_id].lease, 0))

    def entry(self, table_id: int) -> int | None:
        source = self.sources.get(table_id)
        return None if source is None else self.model.entry(source)

    def promise(self, table_id: int, request: TableRequest, matched: int, fresh: int) -> None:
        ends = range((matched + 1) * SIZE, min((matched + fresh) * SIZE, len(request.token_ids)) + 1, SIZE)
        to_come = [(request.salt, tuple(request.token_ids[:end])) for end in ends]
        if to_come:
            self.to_come[table_id] = to_come
        for prefix in to_come:
            self.promised.setdefault(prefix, []).append(table_id)

    def sealed(self, table_id: int, before: int) -> None:
        """After a commit to a table that had so many full blocks before."""
        table = self.model.tables[table_id]
        for end in range((before + 1) * SIZE, len(table.tokens) + 1, SIZE):
            to_come, prefix = self.to_come.get(table_id), (table.salt, tuple(table.tokens[:end]))
            if to_come and to_come[0] == prefix:
                to_come.pop(0)
                self.promised.pop(prefix, None)
                self.wake(prefix)
            else:
                self.drop(table_id)
            if not to_come:
                self.to_come.pop(table_id, None)

    def drop(self, table_id: int) -> None:
        for prefix in self.to_come.pop(table_id, ()):
            if table_id in self.promised.get(prefix, ()):
                self.promised[prefix].remove(table_id)
                if not self.promised[prefix]:
                    del self.promised[prefix]
                    self.wake(prefix)

    def wake(self, prefix: Prefix) -> None:
        self.woken |= self.waiting.pop(prefix, set())

    def awaits(self, lease: int, request: TableRequest, matched: int) -> bool:
        """Whether the next block is promised, which is enough here; the lease then waits for the last of them."""
        if not request.wait_for_prefix or request.no_match:
            return False
        last: Prefix | None = None
        for end in range((matched + 1) * SIZE, len(request.token_ids), SIZE):
            prefix = (request.salt, tuple(request.token_ids[:end]))
            if prefix not in self.promised:
                break
            last = prefix
        if last is not None:
            self.waiting.setdefault(last, set()).add(lease)
        return last is not None
