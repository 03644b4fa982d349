"""What a worker is asked to store in another format, and what becomes of it: memd computes nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagekernels.layout import Format


@dataclass(frozen=True, slots=True)
class Recoded:
    """A worker's word that it has done a Recode, or could not.

    `errors`: K's and V's of each source in turn, where FP8 blocks were made; else none.
    """

    sequence: int
    errors: Sequence[float] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A block that was to be stored in another format, and how it is stored now; its errors as FP8 block, if known."""

    block_id: int
    format: Format
    entry: int
    errors: tuple[float, float]


@dataclass(slots=True, eq=False)
class Recode:
    """Blocks in the places `sources`, which the worker of a lease stores to the places `targets`, in this order.

    `to_units`: FP8 blocks are made; else blocks of the native format. It is over when it has an outcome for each block
    or `failure` says why there is none.
    """

    sequence: int
    lease_id: int
    sources: list[int]
    targets: list[int]
    to_units: bool
    outcomes: list[Outcome] = field(default_factory=list)
    failure: str = ""
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class RecodeNews:
    """A Recode as its worker is told it: packed block-table words."""

    sequence: int
    sources: Sequence[int]
    targets: Sequence[int]
