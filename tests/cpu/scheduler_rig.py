"""A scheduler over memd's core in process, without an engine and a model: each turn is a step, and a token is a 7."""

from __future__ import annotations

import threading
from typing import Any

from inferd.core.groups import sequences_of
from inferd.core.limits import Limits
from inferd.core.messages import Submit
from inferd.core.plan import Plan
from inferd.core.ports import Capacity, Grant, PoolEvent, Refusal, Victim
from inferd.core.scheduler import Scheduler
from inferd.core.sequence import Phase, Sequence
from memd.core.pool import Pool
from tests.cpu.memory_pool import MemoryPool


class SchedulerRig:
    """One worker of a pool."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        self.session = MemoryPool(pool, threading.Event())
        self.scheduler = Scheduler(limits)
        self.scheduler.attach(self.session.info)
        self.now = 1.0

    def submit(self, request: int, prompt: list[int], most: int, **options: Any) -> Sequence:
        self.now += 1e-3
        first = sequences_of(Submit(request, prompt, most, **options), self.now, [])[0]
        self.scheduler.add(first)
        return first

    def tell(self) -> None:
        """Memd's answers and news are heard, and memd is told and asked what there is."""
        self.now += 0.01
        for event in self.session.poll():
            self._hear(event)
        for step in self.scheduler.take_steps(self.now):
            self.session.submit(step)

    def turn(self) -> Plan | None:
        """What was computed, if anything; else what is to be done in time comes nearer."""
        self.tell()
        plan = self.scheduler.plan(self.now)
        if plan is None:
            self.now += 0.2
            return None
        ended = [one for one in plan.sampled if one.accept(7, self.now, frozenset()) is not None]
        self.scheduler.collected(plan)
        for sequence in ended:
            self.scheduler.finish(sequence)
        return plan

    def turn_until(self, *sequences: Sequence, most: int = 2000) -> int:
        """After how many turns these have finished."""
        for count in range(most):
            if all(sequence.phase is Phase.FINISHED for sequence in sequences):
                return count
            self.turn()
        raise AssertionError(f"not finished after {most} turns")

    def _hear(self, event: PoolEvent) -> None:
        match event:
            case Grant():
                self.scheduler.granted(event)
            case Refusal():
                assert self.scheduler.refused(event) is None
            case Capacity():
                self.scheduler.freed()
            case Victim(table_id):
                self.scheduler.victim(table_id)
            case _:
                raise TypeError(type(event).__name__)
