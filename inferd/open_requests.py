"""The requests that are open in an engine, and how each of them ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from inferd.channel import Message
from inferd.core.beam import Hypotheses
from inferd.core.messages import Ending, Finished
from inferd.core.pace import QueuePace
from inferd.core.plan import Plan
from inferd.core.scheduler import Scheduler
from inferd.core.searching import Search
from inferd.core.sequence import Phase, Sequence
from inferd.delivery import Delivery
from inferd.failures import engine_failed, failed
from inferd.tally import Tally
from pagepool.errors import PagepoolError


class OpenRequests:
    """Sequences by the numbers under which the front knows them. Not thread-safe.

    Each ends once: the scheduler lets it go, and the front hears its last words. With a sequence that is others' stem
    those end too, for they have not begun.
    """

    def __init__(
        self, scheduler: Scheduler, tally: Tally, send: Callable[[Message], None], clock: Callable[[], float]
    ) -> None:
        self.pace = QueuePace()
        """How fast requests leave."""
        self._scheduler, self._tally, self._send, self._clock = scheduler, tally, send, clock
        self._open: dict[int, Sequence] = {}

    def add(self, sequences: Iterable[Sequence]) -> None:
        """The sequences of a new request."""
        self._open.update((sequence.request, sequence) for sequence in sequences)

    def cancel(self, request: int) -> None:
        """The front wants no more of one; it may have ended already."""
        if (sequence := self._open.get(request)) is not None:
            self._finish(sequence, Ending.CANCELLED)

    def fail(self, sequence: Sequence, error: PagepoolError) -> None:
        """It ends in an error."""
        for each in (*sequence.branches, sequence):
            self._scheduler.finish(each)
            self.forget(each, failed(each.request, error))

    def fail_all(self, error: PagepoolError) -> None:
        """Every one ends in an error."""
        for sequence in list(self._open.values()):
            if sequence.phase is not Phase.FINISHED:  # with its stem
                self.fail(sequence, error)

    def step_failed(self, plan: Plan, error: Exception) -> None:
        """A step's requests end with what they have in the next one; the others of that need nothing of this one."""
        for sequence in [each.owner for each, _ in plan.chunks]:
            if sequence.phase is not Phase.FINISHED:
                self.fail(sequence, engine_failed(f"{type(error).__name__} in a step of the engine"))

    def hand_over(self, delivery: Delivery) -> int:
        """Send a step's tokens, end what they end, have searches go on; how many tokens were generated."""
        for message in delivery.messages:
            self._send(message)
        for sequence in delivery.broken:
            self.fail(sequence, engine_failed("the model's logits are not finite"))
        for end in delivery.ended:
            self._finish(end.sequence, end.ending, end.stop_token_id, end.stop_logprob)
        return delivery.generated + sum(map(self._search, delivery.searches))

    def forget(self, sequence: Sequence, last_words: Message) -> None:
        """The scheduler has let it go: it ends with this message."""
        if sequence.num_recomputed:
            self._tally.add(recomputed_tokens=sequence.num_recomputed)
        del self._open[sequence.request]
        self.pace.left(self._clock())
        self._send(last_words)

    def _finish(
        self, sequence: Sequence, ending: Ending, stop_token_id: int | None = None, stop_logprob: float | None = None
    ) -> None:
        for each in (*sequence.branches, sequence):
            self._scheduler.finish(each)
            used = each.used(self._clock())
            self.forget(each, Finished(each.request, ending, used, stop_token_id, stop_logprob))

    def _search(self, search: Search) -> int:
        """Have a search choose its next beams, or end it; how many tokens it generated."""
        before, owner = search.rules.generated, search.owner
        if search.advance(self._clock()):
            best = search.rules.best()
            self._send(Hypotheses(owner.request, best))
            self._finish(owner, best[0].ending, best[0].stop_token_id)
        return search.rules.generated - before
