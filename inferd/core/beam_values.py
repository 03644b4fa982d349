"""What a beam search is asked for. Plain values, part of a Submit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EarlyStopping(StrEnum):
    """When a beam search with `width` finished continuations is over: transformers' False, True and "never".

    HEURISTIC: when the best beam that runs, divided by its length so far ** length_penalty, is no better than the worst
    finished one. FULL: at once. NEVER: the same as the first, but divided by max_tokens if length_penalty is positive.
    """

    HEURISTIC = "heuristic"
    FULL = "full"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Beam:
    """Search by `width` beams; the num_return_sequences best continuations come at the end. See inferd.core.beam."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    num_return_sequences: int = 1
