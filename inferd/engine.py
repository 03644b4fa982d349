"""The engine's loop: what the front asks, what the pool grants, what the model computes, once around per step.

    messages of the front -> events of the pool -> one step message to memd -> forward -> sample -> tokens to the front

Nothing in it waits for memd: answers are events of a later turn. It rests only where there is nothing to compute, on
one signal that both the front's messages and the pool's events set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import structlog

from inferd.channel import Message
from inferd.core.messages import Cancel, Counters, Ending, Failed, Finished, Shutdown, Submit, Tokens
from inferd.core.ports import Capacity, Draining, Grant, Lost, Refusal
from inferd.core.scheduler import Limits, Plan, Scheduler
from inferd.core.sequence import Phase, Sequence
from inferd.engine_state import StateReporter
from inferd.sampler import Row
from inferd.surroundings import Attachment, Model, Surroundings
from pagepool.errors import Code, PagepoolError, Reason

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
REST_S = 60.0

log = structlog.get_logger(__name__)


class Engine:
    """Serves requests until it is told to stop. For one thread.

    PagepoolError leaves `run` if memd refuses this worker for good (another geometry, other weights).
    """

    def __init__(self, surroundings: Surroundings, limits: Limits, eos_token_ids: Iterable[int]) -> None:
        self._around = surroundings
        self._scheduler = Scheduler(limits)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, Sequence] = {}
        self._attachment: Attachment | None = None
        self._warm = False
        self._attach_at, self._retry_s = 0.0, FIRST_RETRY_S
        self._detach_at: float | None = None
        self._stop_at: float | None = None
        self._counters = Counters()
        self._reporter = StateReporter(surroundings.send)

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
        self._tell(self._attachment)
        if self._stop_at is not None and (not self._scheduler.running or began >= self._stop_at):
            return self._stop()
        if self._detach_at is not None and (not self._scheduler.running or began >= self._detach_at):
            self._lose("memd is stopping", began)
            return 0.0
        plan = self._scheduler.plan(began)
        if plan is not None:
            self._step(plan, self._attachment.model, began)
        rest_s = self._report()
        return 0.0 if plan is not None else rest_s

    # -- messages of the front

    def _take(self, message: Message | None, now: float) -> None:
        match message:
            case Submit():
                self._submit(message, now)
            case Cancel(request):
                if sequence := self._sequences.get(request):
                    self._finish(sequence, Ending.CANCELLED)
            case Shutdown(grace_s):
                self._shut_down(now + grace_s)
            case None:
                self._shut_down(now)
            case _:
                raise TypeError(f"{type(message).__name__} is no message for an engine that runs")

    def _submit(self, submit: Submit, now: float) -> None:
        try:
            if self._stop_at is not None:
                raise _draining()
            if self._attachment is None and self._warm:
                raise _pool_lost("the worker is not attached to memd")
            sequence = Sequence(submit, now)
            self._scheduler.add(sequence)
        except PagepoolError as error:
            self._around.send(failed(submit.request, error))
        else:
            self._sequences[submit.request] = sequence

    def _shut_down(self, at: float) -> None:
        self._stop_at = at
        self._scheduler.admitting = False
        for sequence in list(self._scheduler.waiting):
            self._fail(sequence, _draining())

    def _stop(self) -> float | None:
        """The last turn."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, _draining())
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
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
                    cached = self._counters.cached_tokens + event.cached_tokens
                    self._counters = replace(self._counters, cached_tokens=cached)
                case Refusal():
                    if sequence := self._scheduler.refused(event):
                        self._fail(sequence, self._scheduler.too_large(sequence, event.total_blocks))
                case Capacity():
                    self._scheduler.freed()
                case Draining(grace_s):
                    self._detach_at = now + grace_s
                    self._scheduler.admitting = False
                case Lost(message):
                    self._lose(message, now)
                    return

    def _tell(self, attachment: Attachment) -> None:
        if step := self._scheduler.take_step():
            attachment.pool.submit(step)
            self._counters = replace(self._counters, memd_steps=self._counters.memd_steps + 1)

    def _lose(self, why: str, now: float) -> None:
        assert self._attachment is not None
        log.warning("pool lost", why=why, epoch=self._attachment.pool.info.epoch)
        for sequence in self._scheduler.lose():
            self._forget(sequence, failed(sequence.request, _pool_lost(why)))
        # Nobody knows when memd comes back, so those that wait are told too, instead of being kept for ever.
        for sequence in list(self._scheduler.waiting):
            self._fail(sequence, _pool_lost(why))
        self._attachment.close()
        self._attachment = self._detach_at = None
        self._attach_at = now
        self._note()
        self._reporter.enter("attaching", now, why)

    # -- the model

    def _step(self, plan: Plan, model: Model, began: float) -> None:
        clock = self._around.clock
        try:
            pending = model.launch(plan.input, [Row(each.submit.sampling, len(each.tokens)) for each in plan.sampled])
            tokens = pending.tokens()
            prefilled = sum(count for sequence, count in plan.chunks if sequence.phase is Phase.PREFILL)
            self._scheduler.computed(plan)
        except Exception as error:
            log.exception("step failed", requests=[sequence.request for sequence, _ in plan.chunks])
            for sequence, _ in plan.chunks:
                self._fail(sequence, _engine_failed(f"{type(error).__name__} in a step of the engine"))
            return
        delivered = self._deliver(plan, tokens, clock())
        self._counters = replace(
            self._counters,
            steps=self._counters.steps + 1,
            prefill_tokens=self._counters.prefill_tokens + prefilled,
            generated_tokens=self._counters.generated_tokens + delivered,
            forward_s=self._counters.forward_s + pending.forward_s,
            step_s=self._counters.step_s + clock() - began,
        )

    def _deliver(self, plan: Plan, tokens: list[int], now: float) -> int:
        """Hand the tokens over, end what they end; how many tokens went out."""
        items: list[tuple[int, list[int]]] = []
        ended: list[tuple[Sequence, Ending, int | None]] = []
        for sequence, token in zip(plan.sampled, tokens, strict=True):
            if token < 0:
                self._fail(sequence, _engine_failed("the model's logits are not finite"))
                continue
            ending = sequence.accept(token, now, self._eos_token_ids)
            taken = ending in (None, Ending.MAX_TOKENS)
            if taken:
                items.append((sequence.request, [token]))
            if ending is not None:
                ended.append((sequence, ending, None if taken else token))
        if items:
            self._around.send(Tokens(items))
        for sequence, ending, stop_token_id in ended:
            self._finish(sequence, ending, stop_token_id)
        return len(items)

    # -- the ends of requests

    def _finish(self, sequence: Sequence, ending: Ending, stop_token_id: int | None = None) -> None:
        self._scheduler.finish(sequence)
        used = sequence.used(self._around.clock())
        self._forget(sequence, Finished(sequence.request, ending, used, stop_token_id))

    def _fail(self, sequence: Sequence, error: PagepoolError) -> None:
        self._scheduler.finish(sequence)
        self._forget(sequence, failed(sequence.request, error))

    def _forget(self, sequence: Sequence, last_words: Message) -> None:
        del self._sequences[sequence.request]
        self._around.send(last_words)

    # -- the engine's state

    def _report(self) -> float:
        self._note()
        due_s = self._reporter.send_if_due(self._around.clock())
        deadlines = [at - self._around.clock() for at in (self._stop_at, self._detach_at) if at is not None]
        return max(0.0, min([REST_S if due_s is None else due_s, *deadlines]))

    def _note(self) -> None:
        unary = self._attachment.unary_calls() if self._attachment else self._counters.memd_unary_calls
        self._counters = replace(self._counters, memd_unary_calls=unary)
        self._reporter.note(len(self._scheduler.waiting), len(self._scheduler.running), self._counters)


def failed(request: int, error: PagepoolError) -> Failed:
    """The message that carries an error; request 0 is the engine itself."""
    return Failed(request, str(error.reason), error.message, error.field, error.retry_after_s, error.metadata)


def _pool_lost(why: str) -> PagepoolError:
    message = f"the pool is lost, and the KV of all requests with it: {why}; retry"
    return PagepoolError(Reason.POOL_LOST, message, retry_after_s=1.0, why=why)


def _draining() -> PagepoolError:
    message = "the worker is stopping; try another one, or this one later"
    return PagepoolError(Reason.DRAINING, message, retry_after_s=1.0)


def _engine_failed(what: str) -> PagepoolError:
    return PagepoolError(Reason.ENGINE_FAILED, f"{what}; retry elsewhere and look into the worker's log", what=what)
