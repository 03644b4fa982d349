"""Where a sequence stands on its way through the engine, and where it may go from there. Pure."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.WAITING, Phase.DECODE, Phase.FINISHED}),
    Phase.DECODE: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}
"""The phases that may follow each."""
