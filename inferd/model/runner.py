"""Runs a model over packed, padding-free sequences whose keys and values lie in the pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from inferd.core.ports import StepInput
from inferd.logprobs import Scores, score
from inferd.model.attention import PagedAttention, attending
from inferd.model.load import ServedModel
from inferd.model.probe import forward
from inferd.model.recoding import Recoded, are_compressed, copy_blocks, entries_of
from inferd.sampler import Row, sample
from pagekernels.ops import AttentionBatch, PagedOps


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that is over before anybody asks for it."""

    sampled: list[int]
    forward_s: float
    scored: Scores | None = None

    def tokens(self) -> list[int]:
        """The token sampled from each logit row."""
        return self.sampled

    def scores(self) -> Scores | None:
        """See inferd.surroundings.Scoring."""
        return self.scored


class ModelRunner:
    """A served model bound to the operations on one pool, on the CPU. One thread at a time."""

    depth = 1

    def __init__(self, served: ServedModel, ops: PagedOps) -> None:
        self.served = served
        self._ops = ops
        self._attention = PagedAttention(ops, served.geometry.layers)

    def launch(self, step: StepInput, rows: Sequence[Row]) -> Computed:
        """Compute the whole step; see inferd.surroundings.Model."""
        began = time.perf_counter()
        logits = self.forward(step)
        forward_s = time.perf_counter() - began
        tokens = sample(logits[: len(rows)], rows)
        return Computed(tokens, forward_s, score(logits, step.targets, rows, tokens))

    def recode(self, sources: Sequence[int], targets: Sequence[int]) -> Recoded:
        """Recode the blocks; see inferd.surroundings.Model."""
        given, wanted = entries_of(sources, targets)
        if are_compressed(given):
            self._ops.decompress_blocks(given, wanted)
            return Recoded()
        return Recoded(self._ops.compress_blocks(given, wanted).flatten().tolist())

    @torch.inference_mode()
    def forward(self, step: StepInput) -> torch.Tensor:
        """Write the K and V of the step's tokens into their slots; float32 [rows, vocab_size] logits.

        The rows are the step's logit_rows and then those of its targets.
        """
        if step.copies:
            copy_blocks(self._ops, step.copies)
        self._attention.begin(attention_batch(step), np.array(step.slots, np.int64))
        input_ids = torch.tensor([step.token_ids])
        position_ids = torch.tensor([step.positions])
        wanted = [*step.logit_rows, *(target.row for target in step.targets)]
        rows = torch.tensor(wanted, dtype=torch.long)  # may be empty
        with attending(self._attention):
            logits = forward(self.served.model, input_ids, position_ids, rows)
        return logits.float()


def attention_batch(step: StepInput) -> AttentionBatch:
    """The arrays that all layers of a step share; tables are padded with zeros to the longest."""
    width = max(map(len, step.tables))
    tables = np.zeros((len(step.tables), width), np.uint32)
    for row, table in zip(tables, step.tables, strict=True):
        row[: len(table)] = table
    cu_q_lens = np.array([0, *accumulate(step.q_lens)], np.int32)
    return AttentionBatch(cu_q_lens, np.array(step.kv_lens, np.int32), tables)
