"""A model whose steps run late: what a device with a queue looks like to an engine, with nothing known too soon."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inferd.core.ports import StepInput
from inferd.logprobs import Scores
from inferd.recoding import Unlaunched
from inferd.sampler import Row
from inferd.surroundings import Model, Pending, Recoding, Scoring


class Deferred:
    """A model of depth 1 as one of another depth: each step is computed when its tokens are asked for, and no sooner.

    Checks what the protocol asks of the engine: no more than `depth` steps in flight, collected in order, and ids that
    stand for tokens of the step just before only where those are not known yet.
    """

    def __init__(self, model: Model, depth: int) -> None:
        assert model.depth == 1
        self.model, self.depth = model, depth
        self.in_flight: deque[DeferredStep] = deque()
        self.fail_launch: Exception | None = None
        self.launched: list[StepInput] = []
        self.recoding: deque[DeferredRecoding] = deque()
        self.fail_recode: Exception | None = None

    def launch(self, step: StepInput, rows: Sequence[Row]) -> DeferredStep:
        assert len(self.in_flight) < self.depth
        if self.fail_launch is not None:
            error, self.fail_launch = self.fail_launch, None
            raise error
        before = self.in_flight[-1] if self.in_flight else None
        unknown = [-1 - token for token in step.token_ids if token < 0]
        assert before or not unknown, "the step before is over, and its tokens known"
        assert len(set(unknown)) == len(unknown)
        assert not before or all(row < len(before.step.logit_rows) for row in unknown)
        assert len(rows) == len(step.logit_rows)
        self.in_flight.append(DeferredStep(self, step, rows, before))
        self.launched.append(step)
        return self.in_flight[-1]

    def recode(self, sources: Sequence[int], targets: Sequence[int]) -> DeferredRecoding:
        if self.fail_recode is not None:
            error, self.fail_recode = self.fail_recode, None
            raise error
        self.recoding.append(DeferredRecoding(self, sources, targets, list(self.in_flight)))
        return self.recoding[-1]

    def recode_before(self, step: DeferredStep) -> None:
        """What was launched before a step is over before it."""
        while self.recoding and step not in self.recoding[0].behind:
            self.recoding[0].run()


@dataclass(eq=False)
class DeferredRecoding:
    """A Recoding that runs behind the steps that were in flight at its launch, and before those launched later.

    `done` only once it was waited for, or a later step has run: a device says by itself when it is, this one never.
    """

    owner: Deferred
    sources: Sequence[int]
    targets: Sequence[int]
    behind: list[DeferredStep]
    computed: Recoding | None = None

    def done(self) -> bool:
        return self.computed is not None

    def errors(self) -> list[float]:
        while not self.done():
            assert not any(step in self.owner.in_flight for step in self.behind), "it would wait for a step"
            self.owner.recoding[0].run()
        assert self.computed
        return self.computed.errors()

    def run(self) -> None:
        assert self.owner.recoding.popleft() is self
        try:
            self.computed = self.owner.model.recode(self.sources, self.targets)
        except ValueError as error:
            self.computed = Unlaunched(error)


@dataclass(eq=False)
class DeferredStep:
    """A Pending. A token that its step did not sample, because it failed or its logits were not finite, is 0."""

    owner: Deferred
    step: StepInput
    rows: Sequence[Row]
    before: DeferredStep | None
    sampled: Sequence[int] = ()
    computed: Pending | None = None

    @property
    def forward_s(self) -> float:
        assert self.computed, "not known yet"
        return self.computed.forward_s

    def tokens(self) -> list[int]:
        assert self.owner.in_flight[0] is self, "collected out of order"
        self.owner.recode_before(self)
        self.owner.in_flight.popleft()
        ids = [token if token >= 0 else self._resolved(-1 - token) for token in self.step.token_ids]
        self.before = None
        self.computed = self.owner.model.launch(replace(self.step, token_ids=ids), self.rows)
        self.sampled = self.computed.tokens()
        return list(self.sampled)

    def scores(self) -> Scores | None:
        assert isinstance(self.computed, Scoring), "not known yet"
        return self.computed.scores()

    def _resolved(self, row: int) -> int:
        assert self.before
        return max(0, self.before.sampled[row]) if self.before.sampled else 0
