"""What an engine has done since its start, counted."""

from __future__ import annotations

from dataclasses import replace

from inferd.core.messages import Counters
from inferd.core.scheduler import Scheduler
from inferd.flight import Landed


class Tally:
    """The engine's counters. Not thread-safe."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._step_ended = 0.0

    def step(self, step: Landed, generated: int, now: float) -> None:
        """A step was over just now, and handed over so many tokens."""
        counters = self.counters
        # Steps overlap, their times shall not: a step lasts from the end of the one before.
        step_s, self._step_ended = now - max(step.began, self._step_ended), now
        self.counters = replace(
            counters,
            steps=counters.steps + 1,
            prefill_tokens=counters.prefill_tokens + step.plan.prefill_tokens,
            generated_tokens=counters.generated_tokens + generated,
            forward_s=counters.forward_s + step.forward_s,
            step_s=counters.step_s + step_s,
        )

    def add(self, *, memd_steps: int = 0, recomputed_tokens: int = 0) -> None:
        """More of these."""
        counters = self.counters
        self.counters = replace(
            counters,
            memd_steps=counters.memd_steps + memd_steps,
            recomputed_tokens=counters.recomputed_tokens + recomputed_tokens,
        )

    def note(self, scheduler: Scheduler, unary_calls: int | None) -> None:
        """What others count; None while there is nobody to ask."""
        counters = self.counters
        self.counters = replace(
            counters,
            memd_unary_calls=counters.memd_unary_calls if unary_calls is None else unary_calls,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.num_preemptions,
            starved_steps=scheduler.num_starved_steps,
            prefix_waits=scheduler.prefix_waits.num_waited,
            prefix_waits_overdue=scheduler.prefix_waits.num_overdue,
        )
