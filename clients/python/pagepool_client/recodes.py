"""Blocks that memd wants stored in another format, as plain values: what it tells a worker, and what that answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagepool.memd.v1.worker_service_pb2 import Recode as RecodeMessage
from pagepool.memd.v1.worker_service_pb2 import Step as StepMessage


@dataclass(frozen=True, slots=True)
class Recode:
    """Store the blocks `sources` in the places `targets`: packed entries, native ones as FP8 or FP8 ones as native.

    The sources stay what they are, and nobody else uses the targets. To be answered by a Recoded, in order.
    """

    sequence: int
    sources: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Recoded:
    """The device is done with a Recode. `errors` has K's and V's of each source that was compressed, else nothing.

    `failed`: nothing is in the targets that could be used.
    """

    sequence: int
    errors: Sequence[float] = ()
    failed: bool = False


def recode_of(message: RecodeMessage) -> Recode:
    """What memd said."""
    return Recode(message.sequence, tuple(message.sources), tuple(message.targets))


def add_recoded(words: StepMessage, recoded: Recoded) -> None:
    """Say in a step what has become of a Recode."""
    words.recodings.add(sequence=recoded.sequence, errors=recoded.errors, failed=recoded.failed)
