"""The engine's loop: what the front asks, what the pool grants, what the model computes, once around per step.

    messages of the front -> events of the pool -> one step message to memd -> launch a step -> collect one -> deliver

As many steps are in flight as the model takes, and with more than one the step collected is not the one just launched:
see inferd.flight. Nothing waits for memd: answers are events of a later turn. The engine rests only where there is
nothing to compute, on one signal that both the front's messages and the pool's events set.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from inferd.channel import Message
from inferd.core.admission import CLAIM_EVERY_S
from inferd.core.groups import sequences_of
from inferd.core.limits import Limits
from inferd.core.messages import Cancel, Shutdown, Submit
from inferd.core.ports import Capacity, Draining, Grant, Lost, Refusal, Remap, Victim
from inferd.core.scheduler import Scheduler
from inferd.delivery import deliver
from inferd.engine_state import StateReporter
from inferd.failures import draining, failed, pool_lost
from inferd.flight import Flight
from inferd.open_requests import OpenRequests
from inferd.pool_news import hear
from inferd.prefix_log import PrefixWaitLog
from inferd.recoding import Recodings
from inferd.surroundings import Attachment, Model, Surroundings
from inferd.tally import Tally
from pagepool.errors import Code, PagepoolError, Reason

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
REST_S = 60.0
STOPPING = "memd is stopping"

log = structlog.get_logger(__name__)


class Engine:
    """Serves requests until it is told to stop. For one thread.

    What leaves `run`: PagepoolError if memd refuses this worker for good (another geometry, other weights), and
    DeviceLostError of the model.
    """

    def __init__(self, surroundings: Surroundings, limits: Limits, eos_token_ids: Iterable[int]) -> None:
        self._around = surroundings
        self._speculate_tokens = limits.speculate_tokens
        self._scheduler = Scheduler(limits)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._attachment: Attachment | None = None
        self._flight, self._recodings = Flight(), Recodings()
        self._warm = False
        self._attach_at, self._retry_s = 0.0, FIRST_RETRY_S
        self._detach_at: float | None = None
        self._stop_at: float | None = None
        self._tally = Tally()
        self._requests = OpenRequests(self._scheduler, self._tally, surroundings.send, surroundings.clock)
        self._reporter = StateReporter(surroundings.send)
        self._wait_log = PrefixWaitLog()

    def run(self) -> None:
        """Serve until Shutdown, or until the front is gone."""
        self._reporter.enter("attaching", self._around.clock())
        while (rest_s := self.turn()) is not None:
            if rest_s > 0:
                self._around.mailbox.rest(rest_s)

    def turn(self) -> float | None:
        """Once around the loop. Returns how many seconds to rest unless the signal is set; None: it has stopped."""
        began = self._around.clock()
        for message in self._around.mailbox.take():
            self._take(message, began)
        if self._attachment is None:
            return self._attach(began) if self._stop_at is None else self._stop()
        self._take_events(self._attachment, began)
        if self._attachment is None:
            return 0.0
        self._tell(self._attachment, began)
        if self._is_over(self._stop_at, began):
            return self._stop()
        if self._is_over(self._detach_at, began):
            self._lose(STOPPING, began)
            return 0.0
        busy = self._step(self._attachment.model, began)
        rest_s = self._report()
        return 0.0 if busy else rest_s

    # -- messages of the front

    def _take(self, message: Message | None, now: float) -> None:
        match message:
            case Submit():
                self._submit(message, now)
            case Cancel(request):
                self._requests.cancel(request)
            case Shutdown(grace_s):
                self._shut_down(now + grace_s)
            case None:
                self._shut_down(now)
            case _:
                raise TypeError(f"{type(message).__name__} is no message for an engine that runs")

    def _submit(self, submit: Submit, now: float) -> None:
        try:
            if self._stop_at is not None:
                raise draining()
            if self._detach_at is not None:
                raise pool_lost(STOPPING)
            if self._attachment is None and self._warm:
                raise pool_lost("the worker is not attached to memd")
            sequences = sequences_of(submit, now, self._eos_token_ids)
            for sequence in sequences:
                sequence.speculate(self._around.make_proposer, self._speculate_tokens)
            self._scheduler.add(sequences[0])
        except PagepoolError as error:
            if error.reason is Reason.QUEUE_FULL:
                error.retry_after_s = self._requests.pace.retry_after_s(now)
            self._around.send(failed(submit.request, error))
        else:
            self._requests.add(sequences)

    def _shut_down(self, at: float) -> None:
        self._stop_at = at
        self._turn_away(draining())

    def _turn_away(self, error: PagepoolError) -> None:
        """Those that have not begun end, for nothing of them is lost. The others go on, those that yield too."""
        for sequence in [each for each in self._scheduler.waiting if each.started_at is None]:
            self._requests.fail(sequence, error)

    def _is_over(self, at: float | None, now: float) -> bool:
        """Whether what is to be over at this time is: nobody runs or waits any more, or it is that late."""
        return at is not None and (now >= at or not (self._scheduler.running or self._scheduler.waiting))

    def _stop(self) -> float | None:
        """The last turn."""
        self._requests.fail_all(draining())
        if self._attachment is not None:
            self._detach(self._attachment)
        self._note()
        self._reporter.enter("stopped", self._around.clock())
        return None

    # -- the pool

    def _attach(self, now: float) -> float:
        if now < self._attach_at:
            return self._attach_at - now
        try:
            attachment = self._attached()
        except PagepoolError as error:
            if error.code is not Code.UNAVAILABLE:
                raise
            self._reporter.enter("attaching", now, error.message)
            rest_s, self._retry_s = self._retry_s, min(2 * self._retry_s, LAST_RETRY_S)
            self._attach_at = now + rest_s
            return rest_s
        self._attachment, self._retry_s = attachment, FIRST_RETRY_S
        self._scheduler.attach(attachment.pool.info)
        for unfit in self._scheduler.unfit():
            self._requests.fail(*unfit)
        self._reporter.enter("serving", self._around.clock(), info=attachment.pool.info)
        log.info("attached", epoch=attachment.pool.info.epoch, num_blocks=attachment.pool.info.num_blocks)
        return 0.0

    def _attached(self) -> Attachment:
        attachment = self._around.attach()
        try:
            if not self._warm:
                self._reporter.enter("warming_up", self._around.clock(), info=attachment.pool.info)
                attachment.warm_up()
                self._warm = True
        except BaseException:
            attachment.close()
            raise
        return attachment

    def _take_events(self, attachment: Attachment, now: float) -> None:
        for event in attachment.pool.poll():
            match event:
                case Grant():
                    self._scheduler.granted(event)
                case Refusal():
                    if refused := self._scheduler.refused(event):
                        self._requests.fail(*refused)
                case Capacity() | Victim() | Remap():
                    hear(event, self._scheduler, self._flight)
                case Draining(grace_s):
                    self._detach_at = now + grace_s
                    self._turn_away(pool_lost(STOPPING))
                case Lost(message):
                    self._lose(message, now)
                    return

    def _tell(self, attachment: Attachment, now: float) -> None:
        steps = [*self._flight.acknowledged(), *self._scheduler.take_steps(now)]
        for step in steps:
            attachment.pool.submit(step)
        if num_steps := len(steps) + self._recodings.serve(attachment):
            self._tally.add(memd_steps=num_steps)

    def _lose(self, why: str, now: float) -> None:
        assert self._attachment is not None
        log.warning("pool lost", why=why, epoch=self._attachment.pool.info.epoch)
        for sequence in self._scheduler.lose():
            self._requests.forget(sequence, failed(sequence.request, pool_lost(why)))
        # Nobody knows when memd comes back, so those that wait are told too, instead of being kept for ever.
        for sequence in list(self._scheduler.waiting):
            self._requests.fail(sequence, pool_lost(why))
        self._detach(self._attachment)
        self._attach_at = now
        self._note()
        self._reporter.enter("attaching", now, why)

    def _detach(self, attachment: Attachment) -> None:
        # What is in flight reads and writes the pool's memory, which must not go away under it.
        self._flight.abandon()
        self._recodings.abandon()
        attachment.close()
        self._attachment = self._detach_at = None

    # -- the model

    def _step(self, model: Model, began: float) -> bool:
        """Launch what there is to compute, and wait for the oldest step only if nothing may be launched before it.

        Where there is no step, wait for the oldest recoding. Whether there was anything to do.
        """
        plan = self._scheduler.plan(began)
        if plan is not None:
            self._flight.launch(model, plan, began)
        elif self._flight:
            self._collect()
        else:
            return self._recodings.wait()
        while self._flight.full(model.depth):
            self._collect()
        return True

    def _collect(self) -> None:
        """Wait for the oldest step and hand over what it says."""
        step = self._flight.collect()
        if self._attachment is not None and self._attachment.pool.fenced:  # what it has read may be another's by now
            self._lose("memd ended the lease while the worker was stopped, and gave blocks away", self._around.clock())
            return
        plan = step.plan
        if step.error is not None:
            self._scheduler.collected(plan, written=False)
            self._requests.step_failed(plan, step.error)
            return
        # What is sampled says which tokens of a draft are right, and so may be committed.
        delivery = deliver(step, self._around.clock(), self._eos_token_ids)
        self._scheduler.collected(plan)
        generated = self._requests.hand_over(delivery)
        self._tally.step(step, generated, self._around.clock())

    # -- the engine's state

    def _report(self) -> float:
        self._note()
        due_s = self._reporter.send_if_due(self._around.clock())
        deadlines = [at - self._around.clock() for at in self._deadlines() if at is not None]
        claim_s = CLAIM_EVERY_S if self._scheduler.claims else REST_S
        return max(0.0, min([REST_S if due_s is None else due_s, claim_s, *deadlines]))

    def _deadlines(self) -> tuple[float | None, ...]:
        return self._stop_at, self._detach_at, self._scheduler.asks_at

    def _note(self) -> None:
        self._tally.note(self._scheduler, self._attachment.unary_calls() if self._attachment else None)
        self._reporter.note(self._scheduler, self._tally.counters)
        self._wait_log.note(self._scheduler.prefix_waits, self._around.clock())
