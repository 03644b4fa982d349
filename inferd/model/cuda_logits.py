"""What rows with extras and targets ask of a step's logits, done behind the step, on the stream that it runs on.

A captured step samples all its rows without regard to extras. Behind it, the rows that have adjustments are sampled
once more from logits adjusted in float32, and their tokens take the places of the former, before the next step or the
host reads them. Logprobs are those of the model's own logits. Steps that ask for nothing launch nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from inferd.core.history import Extras
from inferd.core.messages import Adjustments, Sampling, Submit
from inferd.core.ports import Target
from inferd.logprobs import Scores
from inferd.model.cuda_steps import records
from inferd.model.row_adjust import adjust_
from inferd.model.row_logprobs import packed_logprobs, unpacked
from inferd.model.upload import upload
from inferd.sampler import Row

SLICE = 1 << 23
"""Logits that are worked on at once: 32 MB of them in float32, 64 MB of keys to sort by."""


class Sampler(Protocol):
    """What takes tokens from float32 rows: pagekernels.cuda.sampling.GpuSampler, whose contract it has."""

    def sample(self, logits: torch.Tensor, rows: int, tokens: int) -> None:
        """Launch the sampling of logits [R, vocab], with records at the address `rows`, into int32 at `tokens`."""

    def close(self) -> None:
        """Free the scratch."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The logprobs of a step, on their way to the host: `rows` lists the logit rows that asked, of `num_rows`.

    host has a packed row for each of these and for each target behind them, and tops how many each asked for.
    """

    host: torch.Tensor
    rows: list[int]
    num_rows: int
    tops: list[int]

    def scores(self) -> Scores:
        """What was asked for, when the step is over."""
        found = unpacked(self.host.tolist(), self.tops)
        sampled = dict(zip(self.rows, found, strict=False))
        return Scores([sampled.get(row) for row in range(self.num_rows)], found[len(self.rows) :])


class LogitsWork:
    """For steps whose sampled tokens are in `tokens`, int32 on the device; logits have `vocab` columns.

    The rows of a step's targets begin with its logits' row `first_target`.

    `sampler` takes float32 rows, rows_at_once(vocab) at a time. All launches go to torch's current stream, which must
    be the sampler's, behind the step's own. Nothing waits for the device, and nothing is kept from step to step.
    """

    def __init__(self, sampler: Sampler, tokens: torch.Tensor, vocab: int, first_target: int) -> None:
        self._sampler, self._tokens, self._vocab, self._first_target = sampler, tokens, vocab, first_target

    def launch(self, logits: torch.Tensor, rows: Sequence[Row], targets: Sequence[Target]) -> Asked | None:
        """Do what the rows and targets of a step ask for; None if they ask for no logprobs.

        logits [R, vocab], of any dtype: those of the step's rows first, those of its targets from `first_target` on.
        """
        adjusted = [at for at, row in enumerate(rows) if row.extras is not None and row.extras.adjustments is not None]
        for part in self._slices(adjusted):
            self._sample_again(logits, rows, part)
        asking = [(at, row.extras.logprobs) for at, row in enumerate(rows) if row.extras is not None]
        tops = {at: top for at, top in asking if top is not None}
        return self._score(logits, tops, targets, len(rows)) if tops or targets else None

    def warm_up(self, logits: torch.Tensor, num_rows: int, num_targets: int) -> None:
        """Load and claim all that any step of so many rows and targets will need; `logits` as of such a step."""
        how = Adjustments([0], [1.0], 1.5, 0.5, 0.5)
        row = Row(Sampling(), 0, Extras.of(Submit(0, [0], 1, adjustments=how, logprobs=1)))
        self.launch(logits, [row] * num_rows, [Target(0, 0, 1)] * num_targets)

    def close(self) -> None:
        """Give the sampler's scratch back, when nothing runs any more."""
        self._sampler.close()

    def _slices(self, rows: list[int]) -> Iterator[list[int]]:
        size = rows_at_once(self._vocab)
        return (rows[first : first + size] for first in range(0, len(rows), size))

    def _sample_again(self, logits: torch.Tensor, rows: Sequence[Row], part: list[int]) -> None:
        mine = [rows[at] for at in part]
        there = upload(logits.device, places=np.array(part, np.int64), records=records(mine, len(mine)))
        scores = logits.index_select(0, there["places"]).float()
        adjust_(scores, [row.extras for row in mine if row.extras is not None])
        sampled = torch.empty(len(mine), dtype=torch.int32, device=logits.device)
        self._sampler.sample(scores, there["records"].data_ptr(), sampled.data_ptr())
        self._tokens.index_copy_(0, there["places"], sampled)

    def _score(self, logits: torch.Tensor, tops: dict[int, int], targets: Sequence[Target], num_rows: int) -> Asked:
        rows, first_target = list(tops), self._first_target
        there = upload(
            logits.device,
            places=np.array([*rows, *range(first_target, first_target + len(targets))], np.int64),
            target_ids=np.array([target.token_id for target in targets], np.int64),
        )
        places = there["places"]
        tokens = torch.cat([self._tokens.index_select(0, places[: len(rows)]).long(), there["target_ids"]])
        each = [*tops.values(), *(target.top for target in targets)]
        size, top = rows_at_once(self._vocab), max(each)
        found = [
            packed_logprobs(logits.index_select(0, places[first : first + size]), tokens[first : first + size], top)
            for first in range(0, len(each), size)
        ]
        packed = torch.cat(found)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda)
        return Asked(host.copy_(packed, non_blocking=True), rows, num_rows, each)


def rows_at_once(vocab: int) -> int:
    """Rows of so many logits that are worked on at once."""
    return max(1, SLICE // vocab)
