"""The answers to a worker's last steps, kept for one whose stream breaks before it has read them."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import replace

from memd.core.values import BlockRun, Grant, StepOutcome

MAX_REPLAYED_STEPS = 1024
"""Answers kept per worker lease: more than any worker keeps in flight."""
MAX_REPLAYED_BLOCKS = 1 << 22
"""Blocks in all of them, at 12 bytes each: enough for 512 grants of 128 Ki tokens, were they of 16 tokens a block."""
REPLY_BLOCKS = 32
"""What each grant or refusal counts beside its blocks, for it takes as much memory."""


class Answers:
    """The last answers, by their consecutive step ids: as many as the limits allow, the last one always."""

    __slots__ = ("_blocks", "_kept")

    def __init__(self) -> None:
        self._blocks = 0
        self._kept: deque[tuple[StepOutcome, int]] = deque()  # with the blocks that each counts

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def append(self, outcome: StepOutcome) -> None:
        """Keep one more, with its blocks in arrays: as lists of numbers they would take six times as much."""
        blocks = REPLY_BLOCKS * (len(outcome.grants) + len(outcome.refusals))
        if outcome.grants:
            blocks += sum(len(grant.blocks.block_ids) for grant in outcome.grants)
            outcome = replace(outcome, grants=[_packed(grant) for grant in outcome.grants])
        self._kept.append((outcome, blocks))
        self._blocks += blocks
        while len(self._kept) > 1 and (len(self) > MAX_REPLAYED_STEPS or self._blocks > MAX_REPLAYED_BLOCKS):
            self._blocks -= self._kept.popleft()[1]

    def find(self, step_id: int) -> StepOutcome | None:
        """The answer to a step that is not after the last one, or None if it is not kept any more."""
        at = step_id - self._kept[0][0].step_id if self._kept else -1
        return self._kept[at][0] if at >= 0 else None

    def clear(self) -> None:
        """None is needed any more."""
        self._blocks = 0
        self._kept.clear()


def _packed(grant: Grant) -> Grant:
    blocks = BlockRun(array("Q", grant.blocks.block_ids), array("I", grant.blocks.entries))
    return replace(grant, blocks=blocks)
