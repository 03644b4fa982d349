"""What the naive model of the pool is made of, and the sizes that it and the pool are tried with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memd.core.geometry import Geometry
from memd.core.lease import Remap
from memd.core.values import LeaseState
from pagekernels.layout import Format, LayerShape
from pagepool.errors import Reason

SIZE = 8
TIMEOUT = 6.0
ACK_TIMEOUT = 4.0
TREE_SHARE = 1
UNITS = Format.BF16.itemsize
GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.BF16, False, 1, b"w" * 32, "model")


class Refused(Exception):  # noqa: N818
    """The model's prediction of an error."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class ModelBlock:
    frame: int
    holders: list[tuple[int, int]]  # (lease, table or 0), one entry per reference
    tokens: list[int] = field(default_factory=list)
    prefix: tuple[bytes, tuple[int, ...]] | None = None  # once sealed: salt, and all tokens up to its end
    identity: int = 0
    parent: int = 0


@dataclass
class ModelTable:
    lease: int
    salt: bytes
    blocks: list[int]
    tokens: list[int]  # of a suspended one, those that are kept for it
    cached: int
    priority: int = 0
    arrival: float = 0.0
    suspended: bool = False
    yielding: float | None = None  # since when
    yields: int = 0


@dataclass
class ModelLease:
    worker: bool
    ttl: float
    deadline: float
    lock: str = ""
    state: LeaseState = LeaseState.LIVE
    last_step: int = 0
    answers: dict[int, Any] = field(default_factory=dict)
    replaying: bool = False
    reserve: list[int] = field(default_factory=list)  # block ids
    ids: list[int] = field(default_factory=list)  # of tables to come
    stepped: float = 0.0
    listens: bool = False
    unread: list[Remap] = field(default_factory=list)  # not acknowledged
    news: list[Remap] = field(default_factory=list)  # of these, not told on this stream
    last_remap: int = 0
    ack_deadline: float = float("inf")
    fenced: bool = False

    @property
    def is_lost(self) -> bool:
        return self.state is LeaseState.LOST

    @property
    def due(self) -> float:
        return min(self.deadline, self.ack_deadline) if self.state is LeaseState.LIVE else self.deadline
