"""The model's answer where only a part of a block matches: which block is copied, and until when it stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.core.beginnings import MIN_RUN
from memd.core.values import TableRequest
from tests.cpu.pool_model_values import SIZE

if TYPE_CHECKING:
    from tests.cpu.pool_model import Model


class Prefixes:
    """What workers have yet to copy; `sources` has the block by table."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sources: dict[int, int] = {}

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
