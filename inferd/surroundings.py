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


class Recoding(Protocol):
    """Blocks that were launched to be stored in another format. When it is over, nothing of it touches the pool."""

    def done(self) -> bool:
        """Whether the device has the bytes; never waits. DeviceLostError if nothing can follow."""

    def errors(self) -> list[float]:
        """Wait for it; if the blocks were compressed, K's and V's error of each, in their order, else nothing.

        May be called again. Raises what went wrong, DeviceLostError if nothing can follow.
        """


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

    def recode(self, sources: Sequence[int], targets: Sequence[int]) -> Recoding:
        """Store blocks in other places, in the other of the native format and FP8; packed entries, of one format each.

        It reads behind all steps launched before, and those launched later read behind it; need not wait. Raises what
        went wrong, ValueError if such blocks cannot be recoded; then nothing of it runs any more. DeviceLostError.
        """


class Recode(Protocol):
    """Blocks that memd wants stored in other places, in another format: packed entries, parallel to each other."""

    @property
    def sequence(self) -> int:
        """Its number, which rises within a lease."""

    @property
    def sources(self) -> Sequence[int]:
        """Where they are, all of one format."""

    @property
    def targets(self) -> Sequence[int]:
        """Where they are to be too, in the other of the native format and FP8."""


class RecodeLine(Protocol):
    """Where a pool's Recodes come from, and their answers go: pagepool_client.session.PoolSession."""

    def take_recodes(self) -> Sequence[Recode]:
        """Those told since the last call, in order; never waits. The mailbox's signal is set when there are any."""

    def answer_recode(self, sequence: int, errors: Sequence[float], *, failed: bool) -> None:
        """Say in a step what has become of the oldest one that is not answered; see Recoding.errors."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """One life with memd: the pool, and the model bound to its memory. `close` gives both up, also after Lost.

    `close` is called when no step is in flight. `warm_up`, called before the first request, runs the shapes of the
    serving path. `recodes` is None if the worker has not said that it takes Recodes.
    """

    pool: KvPool
    model: Model
    close: Callable[[], None]
    warm_up: Callable[[], None] = lambda: None
    unary_calls: Callable[[], int] = lambda: 0
    recodes: RecodeLine | None = None


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
