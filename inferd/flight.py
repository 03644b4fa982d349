"""Steps in flight: launched on the model and not yet collected.

With a depth of 2 the device has its next step when one ends, so that it need not wait for the engine:

    engine   launch 1 | launch 2 | wait for 1, deliver | launch 3 | wait for 2, deliver | launch 4 | ...
    device            [----- step 1 -----][----- step 2 -----][----- step 3 -----] ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from inferd.core.acknowledgements import Acknowledgements
from inferd.core.plan import Plan
from inferd.core.ports import Step
from inferd.logprobs import Scores
from inferd.sampler import Row
from inferd.surroundings import DeviceLostError, Model, Pending

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that is over, and that the engine began with at `began`.

    tokens has one for each of the step's logit rows, -1 where the logits were not finite; with an error it has none.
    scores is None where nothing was asked for beside tokens.
    """

    plan: Plan
    began: float
    tokens: list[int] = field(default_factory=list)
    forward_s: float = 0.0
    scores: Scores | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Unlaunched:
    """In the place of a step whose launch failed."""

    error: Exception
    forward_s: float = 0.0

    def tokens(self) -> list[int]:
        """Raise what the launch raised."""
        raise self.error


class Flight:
    """The steps in flight on a model, oldest first, and the Remaps that may be acknowledged. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Plan, float, Pending]] = deque()
        self._acknowledgements = Acknowledgements()

    def __len__(self) -> int:
        return len(self._steps)

    def full(self, depth: int) -> bool:
        """Whether the oldest step has to be collected before the next launch on a model of this depth.

        Nothing is launched behind a step whose launch failed: it might need that step's tokens.
        """
        failed = bool(self._steps) and isinstance(self._steps[-1][-1], Unlaunched)
        return failed or len(self._steps) >= depth

    def launch(self, model: Model, plan: Plan, began: float) -> None:
        """Launch a step that was just planned. What goes wrong shows when it is collected."""
        rows = [Row(sequence.submit.sampling, sequence.num_launched, sequence.extras) for sequence in plan.sampled]
        for guess in plan.drafts:
            how, first, extras = guess.sequence.submit.sampling, guess.sequence.num_launched, guess.sequence.extras
            rows += [Row(how, first + behind, extras) for behind in range(1, len(guess.token_ids) + 1)]
        try:
            pending: Pending = model.launch(plan.input, rows)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 (raised again where the step is collected)
            pending = Unlaunched(error)
        self._steps.append((plan, began, pending))
        self._acknowledgements.launched()

    def collect(self) -> Landed:
        """Wait for the oldest step. Raises only DeviceLostError."""
        plan, began, pending = self._steps.popleft()
        self._acknowledgements.collected()
        try:
            tokens = pending.tokens()
            return Landed(plan, began, tokens, pending.forward_s, _scores(pending))
        except DeviceLostError:
            raise
        except Exception as error:
            log.exception("step failed", requests=[sequence.request for sequence, _ in plan.chunks])
            return Landed(plan, began, error=error)

    def abandon(self) -> None:
        """Wait until no step runs any more, and drop what they say; the lease is over, and its Remaps with it."""
        while self._steps:
            self.collect()
        self._acknowledgements = Acknowledgements()

    def remapped(self, sequence: int) -> None:
        """A Remap has been applied; whatever was planned before it has been launched."""
        self._acknowledgements.heard(sequence)

    def acknowledged(self) -> list[Step]:
        """What to tell memd of the Remaps whose old blocks no step reads any more."""
        sequence = self._acknowledgements.take()
        return [Step(acknowledged=sequence)] if sequence else []


def _scores(pending: Pending) -> Scores | None:
    # Not isinstance of Scoring: that takes longer than all the rest of a small step.
    scores: Callable[[], Scores | None] | None = getattr(pending, "scores", None)
    return scores() if scores is not None else None
