"""What an engine is wired to: a model over a pool, and the way to the front. `inferd.engine_setup` wires it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from inferd.channel import Message
from inferd.core.messages import Shutdown
from inferd.core.ngram import NgramIndex
from inferd.core.ports import KvPool, StepInput
from inferd.core.speculation import MakeProposer
from inferd.logprobs import Scores
from inferd.sampler import Row


class Mailbox:
    """What the engine has not read yet. Any thread posts, one thread takes; `signal` also serves the pool's events."""

    def __init__(self) -> None:
        self.signal = threading.Event()
        self._messages: deque[Message | None] = deque()

    def post(self, message: Message | None) -> None:
        """Take a message of the front; None says that the front is gone."""
        self._messages.append(message)
        self.signal.set()

    def take(self) -> Iterator[Message | None]:
        """The messages that are there, in order; never waits."""
        while self._messages:
            yield self._messages.popleft()

    @property
    def ended(self) -> bool:
        """Whether the front's last word, Shutdown or that it is gone, is among what is there."""
        return any(message is None or isinstance(message, Shutdown) for message in tuple(self._messages))

    def rest(self, timeout_s: float | None) -> None:
        """Wait until the signal is set, for ever without a timeout."""
        if self.signal.wait(timeout_s):
            # Cleared before anything is read: what comes in later sets it again.
            self.signal.clear()


class DeviceLostError(Exception):
    """The device takes no more steps from this process: the engine ends by it, and the front starts another one."""


class Pending(Protocol):
    """A step that was launched and may still run."""

    @property
    def forward_s(self) -> float:
        """Seconds that the model's forward took, without sampling; known once `tokens` has returned."""

    def tokens(self) -> list[int]:
        """Wait for the step; the token id sampled from each logit row, in their order, -1 where logits are not finite.

        Called once, in the order of the launches. Raises what went wrong in the step; DeviceLostError if none can
        follow. Either way the step is over: it neither reads nor writes the pool any more.
        """


@runtime_checkable
class Scoring(Protocol):
    """What a Pending is besides, if its machine names none of the logprobs fields among its unsupported_fields."""

    def scores(self) -> Scores | None:
        """The logprobs that rows and targets asked for, None if nothing did; known once `tokens` has returned."""


class Model(Protocol):
    """A model over the blocks of one pool. Steps run one after the other, in the order in which they were launched."""

    @property
    def depth(self) -> int:
        """How many steps may be launched before the tokens of the first are asked for; 1 on the CPU."""

    def launch(self, step: StepInput, rows: Sequence[Row]) -> Pending:
        """Write the step's KV and sample a token from each of its logit rows, as its Row says; need not wait.

        With a depth of more than 1, ids may be tokens that are not known yet: see StepInput. Rows with extras and steps
        with targets come only to a model whose pending steps are Scoring.
        """


@dataclass(frozen=True, slots=True)
class Attachment:
    """One life with memd: the pool, and the model bound to its memory. `close` gives both up, also after Lost.

    `close` is called when no step is in flight. `warm_up`, called before the first request, runs the shapes of the
    serving path.
    """

    pool: KvPool
    model: Model
    close: Callable[[], None]
    warm_up: Callable[[], None] = lambda: None
    unary_calls: Callable[[], int] = lambda: 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine lives in.

    attach   makes an Attachment whose pool sets the mailbox's signal on every event; UNAVAILABLE: try again
    send     takes a message for the front and never waits
    mailbox  where the front's messages arrive
    clock    seconds, never going back
    make_proposer  who guesses for a sequence that speculates
    """

    attach: Callable[[], Attachment]
    send: Callable[[Message], None]
    mailbox: Mailbox
    clock: Callable[[], float]
    make_proposer: MakeProposer = NgramIndex
