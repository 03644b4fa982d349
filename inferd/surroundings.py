"""What an engine is wired to: a model over a pool, and the way to the front. `inferd.engine_process` wires it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from inferd.channel import Message
from inferd.core.ports import KvPool, StepInput


class Model(Protocol):
    """A model over the blocks of one pool."""

    def forward(self, step: StepInput) -> torch.Tensor:
        """Write the step's KV and return the logits of its logit_rows, float32 [len(logit_rows), vocab]."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """One life with memd: the pool, and the model bound to its memory. `close` gives both up, also after Lost.

    `warm_up`, called before the first request, runs the shapes of the serving path.
    """

    pool: KvPool
    model: Model
    close: Callable[[], None]
    warm_up: Callable[[], None] = lambda: None
    unary_calls: Callable[[], int] = lambda: 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine lives in.

    attach  makes an Attachment whose pool sets `signal` on every event; PagepoolError with UNAVAILABLE: try again
    send    takes a message for the front and never waits
    clock   seconds, never going back
    """

    attach: Callable[[], Attachment]
    send: Callable[[Message], None]
    signal: threading.Event
    clock: Callable[[], float]
