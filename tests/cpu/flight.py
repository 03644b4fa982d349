"""Steps that a device runs late, and events of memd that come late: what a worker's tables must stand."""

from __future__ import annotations

import random
from collections import deque
from typing import Protocol

from inferd.core.acknowledgements import Acknowledgements
from inferd.core.ports import PoolEvent, PoolInfo, Step
from tests.cpu.memory_pool import MemoryPool

Read = tuple[int, "list[int]", "list[int]"]
"""A table that a step reads: its id, its entries at the launch, and which rows its positions have."""


class Memory(Protocol):
    def check(self, entries: list[int], chain: list[int]) -> None: ...


class Flight:
    """Reads that were launched and not collected yet: the memory is looked at when a step lands, and not before."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._steps: deque[list[Read]] = deque()
        self.acknowledgements = Acknowledgements()
        self.landed = 0

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, reads: list[Read]) -> None:
        self._steps.append(reads)
        self.acknowledgements.launched()

    def land(self) -> None:
        for _, entries, chain in self._steps.popleft():
            self._memory.check(entries, chain)
        self.acknowledgements.collected()
        self.landed += 1

    def land_those_of(self, table_id: int) -> None:
        """No step that reads a table is in flight when it is released or truncated."""
        while any(reader == table_id for step in self._steps for reader, _, _ in step):
            self.land()


class LatePool:
    """A KvPool whose events are heard late, in order; whoever waits hears all of them."""

    def __init__(self, pool: MemoryPool, seed: int) -> None:
        self.pool, self._random = pool, random.Random(seed)
        self._events: deque[PoolEvent] = deque()
        self._waited = False

    @property
    def info(self) -> PoolInfo:
        return self.pool.info

    @property
    def fenced(self) -> bool:
        return self.pool.fenced

    def submit(self, step: Step) -> None:
        self.pool.submit(step)

    def poll(self) -> list[PoolEvent]:
        self._events += self.pool.poll()
        count = len(self._events) if self._waited else self._random.choice([0, 0, 1, 3, 9])
        self._waited = False
        return [self._events.popleft() for _ in range(count) if self._events]

    def wait(self, timeout_s: float) -> bool:
        self._waited = True
        return True
