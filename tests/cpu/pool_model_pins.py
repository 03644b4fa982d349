"""The model's pins: each a prefix and what was said of it; a block is kept as all that cover it say together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagepool.errors import Reason
from tests.cpu.pool_model_values import SIZE, TREE_SHARE, Refused

if TYPE_CHECKING:
    from tests.cpu.pool_model import Model

Retention = tuple[int, bool, float]
"""Priority, whether it is pinned, until when."""


@dataclass
class Pin:
    last: int  # block of the prefix
    retention: Retention

    @property
    def until(self) -> float:
        return self.retention[2]


class Pins:
    """Prefixes that are kept, by salt and the tokens of their whole blocks."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.pins: dict[tuple[bytes, tuple[int, ...]], Pin] = {}
        self.before: dict[int, int] = {}  # by block: the one before it in the last pin that covered it, or 0

    def find(self, tokens: Sequence[int], salt: bytes) -> tuple[list[int], tuple[bytes, tuple[int, ...]]]:
        found = self.model.prefix(tokens, salt, len(tokens) + 1)
        return found, (salt, tuple(tokens[: min(len(tokens) // SIZE, self.model.total) * SIZE]))

    def pin(self, tokens: Sequence[int], salt: bytes, retention: Retention) -> Any:
        found, key = self.find(tokens, salt)
        if not found:
            raise Refused(Reason.PREFIX_NOT_FOUND)
        pinned = {one for one, (_, is_pinned, _) in self.model.kept.items() if is_pinned}
        if retention[1] and len(pinned | set(found)) > self.model.total // 2:
            raise Refused(Reason.PIN_LIMIT)
        covered = {one for pin in self.pins.values() for one in self.path(pin.last)}
        if len(covered) + len(found) > TREE_SHARE * self.model.total:
            self.forget_evicted()
        old = self.end(key)
        self.before.update(zip(found, [0, *found], strict=False))
        self.pins[key] = Pin(found[-1], retention)
        self.settle([*old, *found])
        return len(found) * SIZE, len(found)

    def unpin(self, tokens: Sequence[int], salt: bytes) -> Any:
        found, key = self.find(tokens, salt)
        was_kept = key in self.pins
        if not (found or was_kept):
            raise Refused(Reason.PREFIX_NOT_FOUND)
        self.settle(self.end(key))  # also where nothing is found: what follows an evicted block may be there
        return len(found) * SIZE, len(found), was_kept

    def tick(self, now: float) -> None:
        over = [(pin.until, key) for key, pin in self.pins.items() if pin.until <= now]
        self.settle([one for _, key in sorted(over, key=lambda each: each[0]) for one in self.end(key)])

    def forget_evicted(self) -> None:
        """Pins end with the last block of theirs that is there, or altogether."""
        for key, pin in list(self.pins.items()):
            pin.last = self.nearest(pin.last)
            if not pin.last:
                del self.pins[key]
        there = self.model.blocks
        self.before = {one: self.nearest(before) for one, before in self.before.items() if one in there}

    def nearest(self, one: int) -> int:
        while one and one not in self.model.blocks:
            one = self.before[one]
        return one

    def end(self, key: tuple[bytes, tuple[int, ...]]) -> list[int]:
        """The blocks that a pin covered."""
        pin = self.pins.pop(key, None)
        return self.path(pin.last) if pin else []

    def path(self, one: int) -> list[int]:
        return [one, *self.path(self.before[one])] if one else []

    def settle(self, blocks: Iterable[int]) -> None:
        """Pins of these blocks have come or gone: the last ones of a prefix are used first."""
        there = [one for one in dict.fromkeys(blocks) if one in self.model.blocks]
        for one in sorted(there, key=self.index, reverse=True):
            self.model.keep(one, self.strongest(one))

    def index(self, one: int) -> int:
        prefix = self.model.blocks[one].prefix
        return len(prefix[1]) if prefix else 0

    def strongest(self, one: int) -> Retention | None:
        said = [pin.retention for pin in self.pins.values() if one in self.path(pin.last)]
        if not said:
            return None
        return max(each[0] for each in said), any(each[1] for each in said), max(each[2] for each in said)
